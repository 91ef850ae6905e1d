"""The gated feed-forward block: down(act(gate(x)) * up(x)) (Shazeer 2020)."""

from torch import Tensor, nn

from paceline.core.model_config import HIDDEN_ACTS
from paceline.core.parallel import Parallel
from paceline.layers.linear import GateUpLinear, Linear
from paceline.layers.parameter import Placement


class GatedMLP(nn.Module):
    """Fused gate/up with activation, down."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str,
        bias: bool,
        parallel: Parallel,
        placement: Placement,
    ) -> None:
        super().__init__()
        self.gate_up = GateUpLinear(
            hidden_size,
            intermediate_size,
            activation=HIDDEN_ACTS[activation],
            bias=bias,
            parallel=parallel,
            placement=placement,
        )
        self.down = Linear(
            intermediate_size, hidden_size, bias=bias, parallel=parallel, placement=placement
        )

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        return self.down(self.gate_up(x))
