"""The decoder layer of Falcon-H1: attention beside a mixer that keeps states, then feed-forward."""

from torch import Tensor

from paceline.core.model.config import ModelConfig
from paceline.core.parallel import Parallel
from paceline.layers.attention import StepContext
from paceline.layers.decoders.decoder_layer import DecoderLayer
from paceline.layers.mixers.mamba2 import Mamba2
from paceline.layers.mixers.self_attention import SelfAttention
from paceline.layers.moe import feed_forward
from paceline.layers.rank_sum import Delta
from paceline.layers.rms_norm import hidden_norm
from paceline.layers.weights.parameter import Placement


class SideLayer(DecoderLayer):
    """x += a * attention(norm(x)) + s * mixer(norm(x)); x += d * mlp(norm(x))."""

    def __init__(
        self,
        config: ModelConfig,
        attention: SelfAttention,
        *,
        parallel: Parallel,
        placement: Placement,
    ) -> None:
        super().__init__()
        factors = config.side_multipliers
        assert factors is not None, "a model of such layers has them"
        self.factors = factors
        self.attention = attention
        layer_id = attention.layer_id
        self.mixer = Mamba2(config, layer_id, parallel=parallel, placement=placement)
        self.input_norm = hidden_norm(config, placement)
        self.mlp_norm = hidden_norm(config, placement)
        self.mlp = feed_forward(config, layer_id, parallel=parallel, placement=placement)

    def mix(
        self,
        delta: Delta,
        residual: Tensor,
        positions: Tensor,
        ctx: StepContext,
    ) -> Tensor:
        factors = self.factors
        x = self.input_norm.add(delta, residual)
        both: Tensor = self.attention(x, positions, ctx).mul_(factors.attention)
        return both.add_(self.mixer(x, positions, ctx), alpha=factors.state)

    def feed(self, mixed: Delta, residual: Tensor, ctx: StepContext, rows: Tensor | None) -> Tensor:
        out: Tensor = self.mlp(self.mlp_norm.add(mixed, residual)).mul_(self.factors.down)
        return out
