"""InputRows: rows that a request brings in place of embeddings; no torch."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InputRows:
    """Rows that stand in for the embeddings of neighbouring tokens of a prompt."""

    start: int  # position of the first
    num_tokens: int
    media_hash: str  # of what they are: equal ones are the same rows
    rows: Any  # tensor [num_tokens, hidden] on the host, in the model's dtype; nobody writes to it

    @property
    def stop(self) -> int:
        """The position behind the last."""
        return self.start + self.num_tokens
