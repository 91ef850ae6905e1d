"""LayerNorm, of encoders, alone and fused with the residual addition before it."""

import torch.nn.functional as F
from torch import Tensor, nn

from paceline.kernels.add_layer_norm import add_layer_norm
from paceline.layers.weights.parameter import Placement, empty_parameter
from paceline.layers.weights.weight_format import Named, wholly


class LayerNorm(nn.Module):
    """(x - mean) / std * weight + bias over the last dimension (Ba et al. 2016)."""

    def __init__(self, size: int, eps: float, *, bias: bool, placement: Placement) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter(size, placement=placement)  # [size]
        self.bias = empty_parameter(size, placement=placement) if bias else None  # [size]

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> a new tensor of the same shape."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def of_sum(self, x: Tensor, residual: Tensor) -> Tensor:
        """The norm of x + residual, both [tokens, size], as a new tensor."""
        return add_layer_norm(x, residual, self.weight, self.bias, self.eps)

    def neutral_(self) -> None:
        """Make it the identity of what is normalised, as `RMSNorm.neutral_`."""
        self.weight.fill_(1.0)
        if self.bias is not None:
            self.bias.zero_()

    def fill(self, prefix: str) -> Named:
        """What a checkpoint fills."""
        named = {f"{prefix}.weight": wholly(self.weight)}
        return named if self.bias is None else named | {f"{prefix}.bias": wholly(self.bias)}
