"""The modules of Mllama's text model, and what checkpoints call their tensors."""

from torch import Tensor

from paceline.core.model.config import ModelConfig
from paceline.core.parallel import ALONE, Parallel
from paceline.layers.attention import StepContext
from paceline.layers.decoders.decoder_layer import DecoderLayer
from paceline.layers.decoders.prenorm_layer import PreNormLayer
from paceline.layers.embedding import Embedding
from paceline.layers.mixers.self_attention import SelfAttention
from paceline.layers.moe import feed_forward
from paceline.layers.rank_sum import Delta
from paceline.layers.rms_norm import hidden_norm
from paceline.layers.weights.parameter import Placement, empty_parameter
from paceline.layers.weights.weight_format import Named, wholly
from paceline.models.causal_lm import CausalLM
from paceline.models.cross_attention import CrossAttention
from paceline.models.decoder import Decoder, rope_tables
from paceline.models.tensor_names import name_feed_forward, name_prenorm


class CrossLayer(DecoderLayer):
    """x += tanh(gate) * cross(norm(x)); x += tanh(other gate) * mlp(norm(x)): for tokens whose
    request brings rows, while those of others pass over it."""

    def __init__(
        self, config: ModelConfig, layer_id: int, *, parallel: Parallel, placement: Placement
    ) -> None:
        super().__init__()
        self.input_norm = hidden_norm(config, placement)
        self.attention = CrossAttention(config, layer_id, has_norms=True, placement=placement)
        self.attention_gate = empty_parameter(1, placement=placement)
        self.mlp_norm = hidden_norm(config, placement)
        self.mlp = feed_forward(config, layer_id, parallel=parallel, placement=placement)
        self.mlp_gate = empty_parameter(1, placement=placement)

    def mix(
        self,
        delta: Delta,
        residual: Tensor,
        positions: Tensor,
        ctx: StepContext,
    ) -> Tensor:
        x = self.input_norm.add(delta, residual)
        out: Tensor = self.attention(x, ctx).mul_(self.attention_gate.tanh())
        return out

    def feed(self, mixed: Delta, residual: Tensor, ctx: StepContext, rows: Tensor | None) -> Tensor:
        out = ctx.of_readers(self.mlp(self.mlp_norm.add(mixed, residual)), rows)
        return out.mul_(self.mlp_gate.tanh())

    def fill(self, prefix: str) -> Named:
        """What a checkpoint fills."""
        return {
            **self.attention.fill(f"{prefix}.cross_attn", out="o_proj"),
            **name_feed_forward(self.mlp, f"{prefix}.mlp"),
            f"{prefix}.input_layernorm.weight": wholly(self.input_norm.weight),
            f"{prefix}.post_attention_layernorm.weight": wholly(self.mlp_norm.weight),
            f"{prefix}.cross_attn_attn_gate": wholly(self.attention_gate),
            f"{prefix}.cross_attn_mlp_gate": wholly(self.mlp_gate),
        }


def build_mllama(
    config: ModelConfig,
    *,
    parallel: Parallel,
    placement: Placement,
    max_positions: int | None = None,
) -> CausalLM:
    """The model with uninitialised weights; `max_positions` as in `rope_tables`."""
    assert parallel == ALONE, "plan.contradictions refuses more ranks"
    tables = rope_tables(config, max_positions=max_positions, device=placement.device)

    def layer(index: int) -> DecoderLayer:
        if config.layers[index].reads_encoder:
            return CrossLayer(config, index, parallel=parallel, placement=placement)
        attention = SelfAttention(
            config,
            index,
            cos_sin=tables[index],
            qk_norms=None,
            parallel=parallel,
            placement=placement,
        )
        return PreNormLayer(config, attention, parallel=parallel, placement=placement)

    decoder = Decoder(
        Embedding(
            config.vocab_size,
            config.hidden_size,
            scale=None,
            placement=placement,
            has_head=config.tie_word_embeddings,
        ),
        [layer(index) for index in range(config.num_layers)],
        hidden_norm(config, placement),
        named=_name_layer,
    )
    return CausalLM(config, decoder, parallel=parallel, placement=placement)


def _name_layer(layer: CrossLayer | PreNormLayer, prefix: str) -> Named:
    return layer.fill(prefix) if isinstance(layer, CrossLayer) else name_prenorm(layer, prefix)
