"""RMSNorm, alone and fused with the residual addition before it."""

from torch import Tensor, nn

from paceline.core.model.config import ModelConfig, NormKind
from paceline.kernels.all_reduce_norm import all_reduce_add_rms_norm
from paceline.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_reference
from paceline.layers.rank_sum import Delta, Product, ProductParts, RankParts, Unscaled, add_
from paceline.layers.weights.parameter import Placement, empty_parameter


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension (Zhang & Sennrich 2019)."""

    def __init__(
        self, size: int, eps: float, *, placement: Placement, kind: NormKind = NormKind.ROUNDED
    ) -> None:
        super().__init__()
        self.eps = eps
        self.unit_offset = kind is NormKind.UNIT_OFFSET
        self.wide = kind is NormKind.WIDE
        self.weight = empty_parameter(size, placement=placement)  # [size]

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> a new tensor of the same shape."""
        return rms_norm(x, self.weight, self.eps, unit_offset=self.unit_offset, wide=self.wide)

    def in_place_(self, x: Tensor) -> None:
        """Normalise x [tokens, size], whose rows may be strided."""
        rms_norm(x, self.weight, self.eps, unit_offset=self.unit_offset, wide=self.wide, out=x)

    def part_in_place_(self, x: Tensor, mean_square: Tensor) -> None:
        """Normalise x [tokens, size], of rows of which other ranks hold the other parts.

        mean_square: [tokens, 1] float32, of the whole rows.
        """
        offset, wide = self.unit_offset, self.wide
        weight, eps = self.weight, self.eps
        x.copy_(
            rms_norm_reference(
                x, weight, eps, unit_offset=offset, wide=wide, mean_square=mean_square
            )
        )

    def add(self, delta: Delta, residual: Tensor) -> Tensor:
        """residual += delta, in place; returns the norm of the sum.  Both [tokens, size]."""
        if delta is None or isinstance(delta, Product):
            return self.forward(add_(residual, delta))
        offset, wide = self.unit_offset, self.wide
        if isinstance(delta, Unscaled):
            rows, scale = delta
            return add_rms_norm(
                rows, residual, self.weight, self.eps, unit_offset=offset, wide=wide, scale=scale
            )
        if isinstance(delta, RankParts):
            part, exchange = delta
            return all_reduce_add_rms_norm(
                part, residual, self.weight, self.eps, exchange, unit_offset=offset, wide=wide
            )
        x = delta.parts if isinstance(delta, ProductParts) else delta
        return add_rms_norm(x, residual, self.weight, self.eps, unit_offset=offset, wide=wide)

    def neutral_(self) -> None:
        """Make the factor 1, for weights that were not read from a checkpoint."""
        self.weight.fill_(0.0 if self.unit_offset else 1.0)


def hidden_norm(config: ModelConfig, placement: Placement) -> RMSNorm:
    """A norm over the hidden states of a model."""
    return RMSNorm(config.hidden_size, config.rms_norm_eps, kind=config.norm, placement=placement)
