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
from paceline.layers.rank_sum import Delta, leave_sums, total
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
            leave_sums(self.attention, self.mlp)
            if isinstance(self.mlp, GatedMLP):
                self.mlp.is_left = True

    def mix(
        self,
        delta: Delta | None,
        residual: Tensor,
        positions: Tensor,
        ctx: StepContext,
    ) -> Delta:
        norm = self.input_norm
        x = norm(residual) if delta is None else norm.add(delta, residual)
        return self._scaled(self.attention(x, positions, ctx))

    def feed(self, mixed: Delta, residual: Tensor, ctx: StepContext, rows: Tensor | None) -> Delta:
        return self._scaled(self.mlp(self.mlp_norm.add(mixed, residual)))

    def _scaled(self, x: Delta) -> Delta:
        return x if self.scale is None else total(x).mul_(self.scale)
