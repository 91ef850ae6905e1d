"""The decoder layer of Gemma 2 and 3: a norm before and after attention, and around the MLP."""

from torch import Tensor

from paceline.core.model.config import ModelConfig
from paceline.core.parallel import Parallel
from paceline.layers.attention import StepContext
from paceline.layers.decoders.decoder_layer import DecoderLayer
from paceline.layers.mixers.self_attention import SelfAttention
from paceline.layers.moe import feed_forward
from paceline.layers.rank_sum import Delta
from paceline.layers.rms_norm import RMSNorm
from paceline.layers.weights.parameter import Placement


class SandwichLayer(DecoderLayer):
    """x += norm(attention(norm(x))); x += norm(mlp(norm(x)))."""

    def __init__(
        self,
        config: ModelConfig,
        layer_id: int,
        *,
        cos_sin: Tensor | None,
        qk_norm: bool,
        parallel: Parallel,
        placement: Placement,
    ) -> None:
        super().__init__()

        def norm(size: int) -> RMSNorm:
            return RMSNorm(size, config.rms_norm_eps, placement=placement, kind=config.norm)

        spec = config.layers[layer_id]
        head_dim = spec.heads.head_dim
        self.attention = SelfAttention(
            config,
            layer_id,
            cos_sin=cos_sin,
            qk_norms=(norm(head_dim), norm(head_dim)) if qk_norm else None,
            parallel=parallel,
            placement=placement,
        )
        self.input_norm = norm(config.hidden_size)
        self.attention_norm = norm(config.hidden_size)
        self.mlp_norm = norm(config.hidden_size)
        self.output_norm = norm(config.hidden_size)
        self.mlp = feed_forward(config, layer_id, parallel=parallel, placement=placement)

    def mix(
        self,
        delta: Delta,
        residual: Tensor,
        positions: Tensor,
        ctx: StepContext,
    ) -> Tensor:
        x = self.input_norm.add(delta, residual)
        out: Tensor = self.attention_norm(self.attention(x, positions, ctx))
        return out

    def feed(self, mixed: Delta, residual: Tensor, ctx: StepContext, rows: Tensor | None) -> Tensor:
        out: Tensor = self.output_norm(self.mlp(self.mlp_norm.add(mixed, residual)))
        return out
