"""Token embedding and the language-model head, tied or not."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.core.parallel import Parallel
from paceline.layers.parameter import Placement
from paceline.layers.weight_format import Held, LinearFormat, hold


class OverlaidRows(NamedTuple):
    """Rows that stand in for embeddings."""

    rows: Tensor  # [slots, hidden]  the embedding's dtype; slot 0 is nobody's
    slot: Tensor  # [tokens]  int64  slot of the row that stands in for a token's; 0: none does

    def over(self, embedded: Tensor) -> Tensor:
        """embedded [tokens, hidden] -> a new tensor, with these rows in place."""
        stands_in = (self.slot > 0).unsqueeze(1)
        return torch.where(stands_in, self.rows.index_select(0, self.slot), embedded)


class Embedding(nn.Module):
    """Rows of the token table, times `scale`."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        scale: float | None,
        parallel: Parallel,
        placement: Placement,
    ) -> None:
        super().__init__()
        rows = parallel.share(vocab_size, "vocab_size")
        format_ = placement.formats.embedding
        self.held = hold(self, format_, format_.allocate(rows, hidden_size, placement=placement))
        self.scale = scale

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids [tokens] -> a new tensor [tokens, hidden]."""
        rows = self.held.format.apply(input_ids, self.held.weight)
        return rows if self.scale is None else rows.mul_(self.scale)

    def table(self) -> Tensor:
        """[vocab, hidden] its rows, not scaled; no parameter of who takes it."""
        return self.held.format.table(self.held.weight)


def root_scale(hidden_size: int, dtype: torch.dtype) -> float:
    """Gemma's embedding scale: the root of hidden_size, rounded to the table's dtype."""
    return float(torch.tensor(hidden_size**0.5, dtype=dtype))


class LMHead(nn.Module):
    """Hidden states to logits.  Given `tied`, it shares that embedding's table."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        tied: Embedding | None,
        soft_cap: float | None,
        divisor: float = 1.0,
        parallel: Parallel,
        placement: Placement,
    ) -> None:
        super().__init__()
        self.soft_cap = soft_cap
        self.divisor = divisor
        self.vocab_size = vocab_size
        self.held: Held[LinearFormat[Any]] | None = None  # None: the head is tied
        if tied is None:
            rows, format_ = parallel.share(vocab_size, "vocab_size"), placement.formats.head
            weight = format_.allocate((rows,), hidden_size, bias=False, placement=placement)
            self.held = hold(self, format_, weight)
            self._product = partial(format_.apply, weight=weight)
        else:
            self._product = partial(tied.held.format.project, weight=tied.held.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden] -> a new tensor [rows, vocab] in hidden's dtype, over the divisor;
        where capped, cap * tanh(x / cap) in float32.
        """
        logits = self._product(hidden)
        if self.divisor != 1.0:
            logits.div_(self.divisor)
        if self.soft_cap is None:
            return logits
        return logits.float().div_(self.soft_cap).tanh_().mul_(self.soft_cap)
