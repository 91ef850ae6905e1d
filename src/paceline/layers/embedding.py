"""Token embedding and the language-model head, tied or not."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.core.parallel import Parallel, whole
from paceline.kernels.all_reduce import Exchange, all_gather
from paceline.layers.weights.parameter import Placement
from paceline.layers.weights.weight_format import Held, LinearFormat, hold


class OverlaidRows(NamedTuple):
    """Rows that stand in for embeddings."""

    rows: Tensor  # [slots, hidden]  the embedding's dtype; slot 0 is nobody's
    slot: Tensor  # [tokens]  int64  slot of the row that stands in for a token's; 0: none does

    def over(self, embedded: Tensor) -> Tensor:
        """embedded [tokens, hidden] -> a new tensor, with these rows in place."""
        stands_in = (self.slot > 0).unsqueeze(1)
        return torch.where(stands_in, self.rows.index_select(0, self.slot), embedded)


class Embedding(nn.Module):
    """Rows of the token table, times `scale`; every rank has all of them, and sends none."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        scale: float | None,
        placement: Placement,
        has_head: bool = False,
    ) -> None:
        """has_head: a language-model head multiplies with the table, too."""
        super().__init__()
        format_ = placement.formats.embedding
        weight = format_.allocate(vocab_size, hidden_size, placement=placement, has_head=has_head)
        self.held = hold(self, format_, weight)
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
    """Hidden states to logits.  Given `tied`, it shares that embedding's table.  Each rank has the
    products with its rows, and all of them the logits."""

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
        rows = parallel.share_rows(vocab_size)
        self.held: Held[LinearFormat[Any]] | None = None  # None: the head is tied
        product: Callable[[Tensor], Tensor]
        if tied is None:
            format_ = placement.formats.head
            weight = format_.allocate((rows,), whole(hidden_size), bias=False, placement=placement)
            self.held = hold(self, format_, weight)
            product = self._own
        else:
            table = tied.held.weight
            if placement.exchange is not None:
                table = tied.held.format.part(table, rows)
            product = partial(tied.held.format.project, weight=table)
        self._product = product
        if placement.exchange is not None:
            self._product = partial(_gathered, product, vocab_size, placement.exchange)

    def _own(self, hidden: Tensor) -> Tensor:
        assert self.held is not None, "the head is tied"
        return self.held.format.apply(hidden, self.held.weight)

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


def _gathered(
    product: Callable[[Tensor], Tensor], vocab_size: int, exchange: Exchange, hidden: Tensor
) -> Tensor:
    return all_gather(product(hidden), vocab_size, exchange)
