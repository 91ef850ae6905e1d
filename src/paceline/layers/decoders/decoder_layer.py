"""DecoderLayer: what a decoder stack asks of a layer, in two halves."""

from abc import abstractmethod
from typing import NamedTuple

from torch import Tensor, nn

from paceline.layers.attention import StepContext
from paceline.layers.rank_sum import Delta, Product, add_, rows_of


class HiddenStream(NamedTuple):
    """What a layer hands on: the sum of the two, which is made by who reads it."""

    delta: Delta  # [rows, hidden]  of its last block, where the stream has that not yet
    residual: Tensor  # [rows, hidden]  the stream before that

    def only(self, rows: Tensor | None) -> "HiddenStream":
        """Rows [rows] int64 of it, in new tensors; None: it as it is."""
        if rows is None:
            return self
        return HiddenStream(rows_of(self.delta, rows), self.residual.index_select(0, rows))

    def settled(self) -> "HiddenStream":
        """It, with a product that is still to be made in the stream: what that reads is wide, and
        would be held until the next norm.  Mutates residual."""
        if not isinstance(self.delta, Product):
            return self
        return HiddenStream(None, add_(self.residual, self.delta))


class DecoderLayer(nn.Module):
    """`mix`, in which tokens see each other, then `feed`, a function of each row alone.

    Where few rows are read behind a layer, only these take the second: the others were mixed, and
    what a cache keeps of them is written.
    """

    @abstractmethod
    def mix(
        self,
        delta: Delta,
        residual: Tensor,
        positions: Tensor,
        ctx: StepContext,
    ) -> Delta:
        """residual += delta; returns what mixing adds to it, which is not added yet.

        delta, residual [tokens, hidden]; positions as of `CausalLM`.  Mutates residual.
        """

    @abstractmethod
    def feed(self, mixed: Delta, residual: Tensor, ctx: StepContext, rows: Tensor | None) -> Delta:
        """residual += mixed; returns what the feed-forward block adds to it, not added yet.

        mixed, residual [rows, hidden]; rows [rows] int64, which tokens of the step they are; None:
        all.  Mutates residual.
        """

    def forward(
        self,
        delta: Delta,
        residual: Tensor,
        positions: Tensor,
        ctx: StepContext,
        rows: Tensor | None = None,
    ) -> HiddenStream:
        """Both halves; the second of `rows` alone, which are then what is handed on.

        delta, residual [tokens, hidden]; rows [rows] int64, or None: all.  Mutates residual.
        """
        mixed = HiddenStream(self.mix(delta, residual, positions, ctx), residual)
        mixed = mixed.only(rows).settled()
        return mixed._replace(delta=self.feed(*mixed, ctx, rows)).settled()
