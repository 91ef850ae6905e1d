"""InputRows: rows that a request brings in place of embeddings; EncoderInput: what it brings for an
encoder.  No torch."""

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncoderInput:
    """What an encoder makes its rows of; every token of the request sees all of them."""

    num_rows: int  # that the encoder makes
    media_hash: str  # of what it is: the KV of every token depends on it
    data: Any  # tensor on the host, as the model's encoder_kv takes it; nobody writes to it
