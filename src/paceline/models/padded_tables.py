"""Checkpoints of a draft model whose tables have other rows than its target's.

Models of one family pad their vocabulary differently (Qwen 2.5: 151,936 rows at 0.5B, 152,064 at
7B).  Rows that no token of the shared tokenizer has are cut off, or copies of the last row: such
an id is hardly ever proposed, and the target decides.
"""

import torch
from torch import Tensor

from paceline.models.checkpoint import StoredTensors

_TABLES = ("embed_tokens.weight", "lm_head.weight")


class PaddedTables:
    """A checkpoint whose tables of `stored` rows are seen with `rows`; the rest as it is."""

    def __init__(self, checkpoint: StoredTensors, *, stored: int, rows: int) -> None:
        self._checkpoint = checkpoint
        self._stored = stored
        self._rows = rows

    @property
    def names(self) -> list[str]:
        """Every tensor's name."""
        return self._checkpoint.names

    def shape(self, name: str) -> tuple[int, ...]:
        """As the model has it; reads no data."""
        shape = self._checkpoint.shape(name)
        return (self._rows, *shape[1:]) if self._is_table(name) else shape

    def dtype(self, name: str) -> str:
        """As the file spells it: "BF16", "F32", ..."""
        return self._checkpoint.dtype(name)

    def tensor(self, name: str) -> Tensor:
        """On the CPU."""
        tensor = self._checkpoint.tensor(name)
        if not self._is_table(name):
            return tensor
        missing = self._rows - self._stored
        if missing <= 0:
            return tensor[: self._rows]
        return torch.cat((tensor, tensor[-1:].expand(missing, -1)))

    def _is_table(self, name: str) -> bool:
        shape = self._checkpoint.shape(name)
        return name.endswith(_TABLES) and len(shape) == 2 and shape[0] == self._stored
