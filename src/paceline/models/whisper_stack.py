"""The modules of Whisper, and what checkpoints call their tensors."""

from typing import Any

from torch import Tensor, nn

from paceline.core.model.config import ModelConfig
from paceline.core.parallel import ALONE, Parallel
from paceline.layers.attention import StepContext
from paceline.layers.embedding import Embedding, OverlaidRows
from paceline.layers.layer_norm import LayerNorm
from paceline.layers.mixers.self_attention import SelfAttention
from paceline.layers.rank_sum import part_of
from paceline.layers.weights.parameter import Placement, empty_parameter
from paceline.layers.weights.weight_format import Named, wholly
from paceline.models.audio_encoder import AudioEncoder, GeluMLP
from paceline.models.causal_lm import CausalLM
from paceline.models.cross_attention import CrossAttention
from paceline.models.decoder import Hidden, read_rows


class WhisperBlock(nn.Module):
    """x += attention(norm(x)); x += cross(norm(x)); x += mlp(norm(x)).

    To caches its two attentions are two layers: 2n of tokens, 2n + 1 of an encoder's rows.
    """

    def __init__(
        self, config: ModelConfig, index: int, *, parallel: Parallel, placement: Placement
    ) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.attention_norm = LayerNorm(hidden, eps, bias=True, placement=placement)
        self.attention = SelfAttention(
            config, 2 * index, cos_sin=None, qk_norms=None, parallel=parallel, placement=placement
        )
        self.cross_norm = LayerNorm(hidden, eps, bias=True, placement=placement)
        self.cross = CrossAttention(config, 2 * index + 1, has_norms=False, placement=placement)
        self.mlp_norm = LayerNorm(hidden, eps, bias=True, placement=placement)
        self.mlp = GeluMLP(hidden, config.intermediate_size, placement=placement)

    def forward(self, x: Tensor, positions: Tensor, ctx: StepContext) -> Tensor:
        """x [tokens, hidden] -> a new tensor of the same shape."""
        x = self.attention(self.attention_norm(x), positions, ctx).add_(x)
        x = self.cross(self.cross_norm(x), ctx).add_(x)
        out: Tensor = self.mlp(self.mlp_norm(x)).add_(x)
        return out

    def fill(self, prefix: str) -> Named:
        """What a checkpoint fills."""
        own = f"{prefix}.self_attn"
        return {
            **self.attention.qkv.held.fill(f"{own}.q_proj", f"{own}.k_proj", f"{own}.v_proj"),
            **part_of(self.attention.out).held.fill(f"{own}.out_proj"),
            **self.attention_norm.fill(f"{own}_layer_norm"),
            **self.cross.fill(f"{prefix}.encoder_attn", out="out_proj"),
            **self.cross_norm.fill(f"{prefix}.encoder_attn_layer_norm"),
            **self.mlp.fill(prefix),
            **self.mlp_norm.fill(f"{prefix}.final_layer_norm"),
        }


class WhisperDecoder(nn.Module):
    """Stands where a decoder does in `CausalLM`."""

    def __init__(self, config: ModelConfig, *, parallel: Parallel, placement: Placement) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.embedding = Embedding(
            config.vocab_size,
            hidden,
            scale=None,
            placement=placement,
            has_head=config.tie_word_embeddings,
        )
        # [positions, hidden]
        self.positions = empty_parameter(config.position_rows, hidden, placement=placement)
        self.layers = nn.ModuleList(
            WhisperBlock(config, index, parallel=parallel, placement=placement)
            for index in range(config.num_layers // 2)
        )
        self.norm = LayerNorm(hidden, config.rms_norm_eps, bias=True, placement=placement)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        ctx: StepContext,
        taps: tuple[str, ...] = (),
        overlaid: OverlaidRows | None = None,
        read: Tensor | None = None,
    ) -> Hidden:
        """As of `CausalLM`; nobody taps it.  What padding has beyond the last position takes
        that."""
        assert not taps, "drafters with features have other targets"
        x = self.embedding(input_ids)
        if overlaid is not None:
            x = overlaid.over(x)
        rows = positions.clamp(max=self.positions.shape[0] - 1)
        x = x + self.positions.index_select(0, rows)
        for layer in self.layers:
            x = layer(x, positions, ctx)
        return Hidden(self.norm(read_rows(x, read)), {})

    def destinations(self, prefix: str) -> Named:
        """What a checkpoint fills."""
        named: Named = {
            **self.embedding.held.fill(f"{prefix}.embed_tokens"),
            f"{prefix}.embed_positions.weight": wholly(self.positions),
            **self.norm.fill(f"{prefix}.layer_norm"),
        }
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, WhisperBlock)
            named |= layer.fill(f"{prefix}.layers.{index}")
        return named


def build_whisper(
    config: ModelConfig,
    *,
    parallel: Parallel,
    placement: Placement,
    max_positions: int | None = None,
) -> Any:
    """The model with uninitialised weights; its positions are a table of the checkpoint."""
    assert parallel == ALONE, "plan.contradictions refuses more ranks"
    return CausalLM(
        config,
        WhisperDecoder(config, parallel=parallel, placement=placement),
        encoder=AudioEncoder(config, placement),
        parallel=parallel,
        placement=placement,
    )
