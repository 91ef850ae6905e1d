"""The pre-norm decoder layer of Llama, Qwen and Granite: norm, attention, norm, feed-forward."""

from torch import Tensor

from paceline.core.model.config import ModelConfig
from paceline.core.parallel import Parallel
from paceline.layers.attention import StepContext
from paceline.layers.decoders.decoder_layer import DecoderLayer
from paceline.layers.mixers.gated_delta import GatedDeltaNet
from paceline.layers.mixers.latent_attention import LatentAttention
from paceline.layers.mixers.mamba2 import Mamba2
from paceline.layers.mixers.self_attention import SelfAttention
from paceline.layers.mlp import GatedMLP
from paceline.layers.moe import feed_forward
from paceline.layers.rank_sum import Delta, Made, RankSum, leave_sums, total
from paceline.layers.rms_norm import hidden_norm
from paceline.layers.weights.parameter import Placement


class PreNormLayer(DecoderLayer):
    """x += scale * attention(norm(x)); x += scale * mlp(norm(x)); few models have a scale."""

    def __init__(
        self,
        config: ModelConfig,
        attention: SelfAttention | LatentAttention | GatedDeltaNet | Mamba2,
        *,
        parallel: Parallel,
        placement: Placement,
    ) -> None:
        super().__init__()
        self.attention = attention
        self.scale = None if config.multipliers is None else config.multipliers.residual
        self.input_norm = hidden_norm(config, placement)
        self.mlp_norm = hidden_norm(config, placement)
        self.mlp = feed_forward(config, attention.layer_id, parallel=parallel, placement=placement)
        if self.scale is None:  # whose factor is the sum's
            if not isinstance(attention, Mamba2):
                leave_sums(attention.out)
            if isinstance(self.mlp, (GatedMLP, RankSum)):
                leave_sums(self.mlp.down if isinstance(self.mlp, GatedMLP) else self.mlp)

    def mix(
        self,
        delta: Delta,
        residual: Tensor,
        positions: Tensor,
        ctx: StepContext,
    ) -> Delta:
        return self._scaled(self.attention(self.input_norm.add(delta, residual), positions, ctx))

    def feed(self, mixed: Delta, residual: Tensor, ctx: StepContext, rows: Tensor | None) -> Delta:
        return self._scaled(self.mlp(self.mlp_norm.add(mixed, residual)))

    def _scaled(self, x: Made) -> Made:
        return x if self.scale is None else total(x).mul_(self.scale)
