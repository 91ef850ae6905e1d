"""DecoderLayer: what a decoder stack asks of a layer, in two halves."""

from abc import abstractmethod

from torch import Tensor, nn

from paceline.layers.attention import StepContext
from paceline.layers.rank_sum import Unsummed


class DecoderLayer(nn.Module):
    """`mix`, in which tokens see each other, then `feed`, a function of each row alone.

    Who reads few rows behind a layer takes them between the two: the others were mixed, and what
    a cache keeps of them is written.
    """

    @abstractmethod
    def mix(
        self,
        delta: Tensor | Unsummed | None,
        residual: Tensor,
        positions: Tensor,
        ctx: StepContext,
    ) -> Tensor | Unsummed:
        """residual += delta; returns what mixing adds to it, which is not added yet.

        delta, residual [tokens, hidden]; positions as of `CausalLM`.  Mutates residual.
        """

    @abstractmethod
    def feed(
        self, mixed: Tensor | Unsummed, residual: Tensor, ctx: StepContext, rows: Tensor | None
    ) -> Tensor | Unsummed:
        """residual += mixed; returns what the feed-forward block adds to it, not added yet.

        mixed, residual [rows, hidden]; rows [rows] int64, which tokens of the step they are; None:
        all.  Mutates residual.
        """

    def forward(
        self,
        delta: Tensor | Unsummed | None,
        residual: Tensor,
        positions: Tensor,
        ctx: StepContext,
    ) -> Tensor | Unsummed:
        """Both halves over all tokens of the step."""
        return self.feed(self.mix(delta, residual, positions, ctx), residual, ctx, None)
