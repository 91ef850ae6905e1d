"""Token embedding and the language-model head, tied or not."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from paceline.core.parallel import Parallel
from paceline.kernels.linear import linear
from paceline.layers.parameter import Placement, empty_matrix, empty_parameter


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
        self.weight = empty_parameter(rows, hidden_size, placement=placement)  # [vocab, hidden]
        self.scale = scale

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids [tokens] -> a new tensor [tokens, hidden]."""
        rows = self.weight.index_select(0, input_ids)
        return rows if self.scale is None else rows.mul_(self.scale)


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
        self.is_tied = tied is not None
        if tied is not None:
            self.weight = tied.weight
        else:
            rows = parallel.share(vocab_size, "vocab_size")
            self.weight = empty_matrix(rows, hidden_size, placement=placement)  # [vocab, hidden]

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden] -> a new tensor [rows, vocab] in hidden's dtype, over the divisor;
        where capped, cap * tanh(x / cap) in float32.
        """
        logits = linear(hidden, self.weight, None)
        if self.divisor != 1.0:
            logits.div_(self.divisor)
        if self.soft_cap is None:
            return logits
        return logits.float().div_(self.soft_cap).tanh_().mul_(self.soft_cap)
