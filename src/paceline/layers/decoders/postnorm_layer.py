"""The decoder layer of OLMo 2 and EXAONE 4: norms behind attention and feed-forward."""

from torch import Tensor

from paceline.core.model.config import ModelConfig
from paceline.core.parallel import Parallel
from paceline.layers.attention import StepContext
from paceline.layers.decoders.decoder_layer import DecoderLayer
from paceline.layers.mixers.self_attention import SelfAttention
from paceline.layers.moe import feed_forward
from paceline.layers.rank_sum import Delta, add_
from paceline.layers.rms_norm import hidden_norm
from paceline.layers.weights.parameter import Placement


class PostNormLayer(DecoderLayer):
    """x += norm(attention(x)); x += norm(mlp(x))."""

    def __init__(
        self,
        config: ModelConfig,
        attention: SelfAttention,
        *,
        parallel: Parallel,
        placement: Placement,
    ) -> None:
        super().__init__()
        self.attention = attention
        self.attention_norm = hidden_norm(config, placement)
        self.output_norm = hidden_norm(config, placement)
        self.mlp = feed_forward(config, attention.layer_id, parallel=parallel, placement=placement)

    def mix(
        self,
        delta: Delta,
        residual: Tensor,
        positions: Tensor,
        ctx: StepContext,
    ) -> Tensor:
        out: Tensor = self.attention_norm(self.attention(add_(residual, delta), positions, ctx))
        return out

    def feed(self, mixed: Delta, residual: Tensor, ctx: StepContext, rows: Tensor | None) -> Tensor:
        out: Tensor = self.output_norm(self.mlp(add_(residual, mixed)))
        return out
