"""The gated feed-forward block: down(act(gate(x)) * up(x)) (Shazeer 2020)."""

from torch import Tensor, nn

from paceline.core.model.config import HIDDEN_ACTS
from paceline.core.parallel import Parallel, whole
from paceline.layers.linear import GateUpLinear, Linear
from paceline.layers.rank_sum import Product, ProductParts
from paceline.layers.weights.parameter import Placement


class GatedMLP(nn.Module):
    """Fused gate/up with activation, down; of a rank the part that its share of columns gives."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str,
        bias: bool,
        parallel: Parallel,
        placement: Placement,
        gate_scale: float | None = None,
    ) -> None:
        super().__init__()
        inter = parallel.share(intermediate_size, "intermediate_size")
        self.gate_up = GateUpLinear(
            hidden_size,
            inter,
            activation=HIDDEN_ACTS[activation],
            bias=bias,
            placement=placement,
            gate_scale=gate_scale,
        )
        self.down = Linear(inter, whole(hidden_size), bias=bias, placement=placement)

    def forward(self, x: Tensor) -> Tensor | ProductParts | Product:
        """x [tokens, hidden] -> [tokens, hidden]."""
        gated = self.gate_up(x)
        parts = self.down.parts(gated) if self.down.is_left else None
        if parts is not None:
            return ProductParts(parts, x.dtype)
        out: Tensor | Product = self.down(gated)
        return out
