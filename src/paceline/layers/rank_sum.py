"""What blocks return and a stream is given (`Delta`), and how: `total`, `add_`, `rows_of`.

RankSum: a block of which each rank computes a part, and the sum of the parts; `mean_squares`, of
rows of which each holds a part.  One process computes the whole, and has no RankSum: it runs no
operation of it, and asks nothing.

A layer whose norms add up what its blocks return leaves the sum to them (`leave_sums`): then a
block returns an `Unsummed`, and `RMSNorm.add` sums, adds and normalises in one operation.  So it
does with an `Unscaled`.  Of one process a `GatedMLP` leaves the parts of its last product, where
that is computed in parts, and a block the whole of it, a `Product`, where that is faster made into
the stream: `HiddenStream.settled` does so before a norm reads it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.core.parallel import Parallel
from paceline.kernels.all_reduce import Exchange, all_reduce
from paceline.kernels.linear import add_linear, linear
from paceline.kernels.rms_norm import RowScale
from paceline.layers.weights.parameter import Placement


class RankParts(NamedTuple):
    """A sum over ranks that is still to be made."""

    part: Tensor  # [tokens, hidden]  this rank's
    exchange: Exchange


class ProductParts(NamedTuple):
    """A sum over the parts of a product that is still to be made, and rounded."""

    parts: Tensor  # [parts, tokens, hidden]  float32
    dtype: torch.dtype  # of the sum


class Product(NamedTuple):
    """A product that is still to be made, into the stream."""

    rows: Tensor  # [tokens, columns]
    weight: Tensor  # [hidden, columns]


class Unscaled(NamedTuple):
    """A product of rows whose norm's scale is still to be applied."""

    rows: Tensor  # [tokens, hidden]
    scale: RowScale


Unsummed = RankParts | ProductParts | Product
Made = Tensor | Unsummed | Unscaled  # what a block adds to the stream
Delta = Made | None  # None: nothing that the stream has not


class RankSum(nn.Module):
    """The sum of `part` over ranks, rank 0's first, the same bits on each of them."""

    def __init__(self, part: nn.Module, exchange: Exchange) -> None:
        super().__init__()
        self.part = part
        self.exchange = exchange
        self.is_left = False  # see `leave_sums`

    def forward(self, x: Tensor) -> Tensor | Unsummed:
        """As of `part`; x is the same on every rank, or its share of columns."""
        unsummed = RankParts(self.part(x), self.exchange)
        return unsummed if self.is_left else total(unsummed)


def total(x: Made) -> Tensor:
    """The sum itself; what is one already stays as it is."""
    if isinstance(x, Product):
        return linear(x.rows, x.weight, None)
    if isinstance(x, ProductParts):
        return x.parts.sum(0).to(x.dtype)
    if isinstance(x, Unscaled):
        return x.scale.of(x.rows).to(x.rows.dtype)
    return all_reduce(x.part, x.exchange) if isinstance(x, RankParts) else x


def add_(stream: Tensor, delta: Delta) -> Tensor:
    """stream += delta, in place; returns it.  Both [tokens, hidden]."""
    if isinstance(delta, Product):
        add_linear(*delta, stream)
    elif delta is not None:
        stream.add_(total(delta))
    return stream


def rows_of(x: Delta, rows: Tensor) -> Delta:
    """Rows [rows] int64 of x [tokens, hidden], in a new tensor; of a sum that is still to be made,
    of each part."""
    if x is None:
        return None
    if isinstance(x, Product):
        return x._replace(rows=x.rows.index_select(0, rows))
    if isinstance(x, ProductParts):
        return x._replace(parts=x.parts.index_select(1, rows))
    if isinstance(x, RankParts):
        return x._replace(part=x.part.index_select(0, rows))
    if isinstance(x, Unscaled):
        squares = x.scale.squares.index_select(0, rows)
        return Unscaled(x.rows.index_select(0, rows), x.scale._replace(squares=squares))
    return x.index_select(0, rows)


def leave_sums(*last: Any) -> None:
    """Have the last operations of blocks return an `Unsummed`, where that is faster: a RankSum and
    a GatedMLP's Linear parts for `RMSNorm.add`, a Linear a `Product` for `HiddenStream.settled`."""
    for operation in last:
        operation.is_left = True


def mean_squares(parts: Sequence[Tensor], exchange: Exchange) -> Sequence[Tensor]:
    """[tokens, 1] float32 of each part [tokens, columns of this rank]: over the columns of all
    ranks, of which each has as many.  Columns that several have count as often in the sum as in
    their number."""
    squares = [part.float().square().sum(1, keepdim=True) / part.shape[1] for part in parts]
    total = all_reduce(torch.cat(squares, dim=1), exchange)
    means: Sequence[Tensor] = total.div_(exchange.ranks).split(1, dim=1)
    return means


def summed(part: nn.Module, parallel: Parallel, placement: Placement) -> Any:
    """`part`, whose result is a rank's share of a sum where there are several; of one process the
    module itself."""
    ranks = 1 if placement.exchange is None else placement.exchange.ranks
    assert parallel.size == ranks, f"{parallel} with an exchange of {ranks}"
    return part if placement.exchange is None else RankSum(part, placement.exchange)


def part_of(block: Any) -> Any:
    """What `summed` was given."""
    return block.part if isinstance(block, RankSum) else block
