"""Gemma 3, text only (model_type gemma3_text, and the text_config of gemma3).

Norms with 1 + weight before and after each block, per-head norms of Q and K, embeddings times
sqrt(hidden_size), and windowed layers with a rope table of their own.
"""

import torch
from torch import Tensor, nn

from paceline.core.model_config import ModelConfig
from paceline.core.parallel import Parallel
from paceline.layers.attention import AttentionContext
from paceline.layers.embedding import Embedding
from paceline.layers.mlp import GatedMLP
from paceline.layers.parameter import Placement
from paceline.layers.rms_norm import RMSNorm
from paceline.layers.self_attention import SelfAttention
from paceline.models.causal_lm import CausalLM
from paceline.models.decoder import Decoder, rope_tables


class SandwichLayer(nn.Module):
    """x += norm(attention(norm(x))); x += norm(mlp(norm(x)))."""

    def __init__(
        self,
        config: ModelConfig,
        layer_id: int,
        *,
        cos_sin: Tensor,
        parallel: Parallel,
        placement: Placement,
    ) -> None:
        super().__init__()

        def norm(size: int) -> RMSNorm:
            return RMSNorm(size, config.rms_norm_eps, placement=placement, unit_offset=True)

        self.attention = SelfAttention(
            config,
            layer_id,
            cos_sin=cos_sin,
            qk_norms=(norm(config.head_dim), norm(config.head_dim)),
            parallel=parallel,
            placement=placement,
        )
        self.input_norm = norm(config.hidden_size)
        self.attention_norm = norm(config.hidden_size)
        self.mlp_norm = norm(config.hidden_size)
        self.output_norm = norm(config.hidden_size)
        self.mlp = GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            activation=config.hidden_act,
            bias=config.mlp_bias,
            parallel=parallel,
            placement=placement,
        )

    def forward(
        self, delta: Tensor | None, residual: Tensor, positions: Tensor, ctx: AttentionContext
    ) -> Tensor:
        """delta, residual [tokens, hidden] -> the MLP output; residual += delta + attention."""
        norm = self.input_norm
        x = norm(residual) if delta is None else norm.add(delta, residual)
        x = self.attention_norm(self.attention(x, positions, ctx))
        return self.output_norm(self.mlp(self.mlp_norm.add(x, residual)))

    def destinations(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint tensor name -> the tensor it fills."""
        named = self.attention.destinations(f"{prefix}.self_attn")
        named |= self.mlp.destinations(f"{prefix}.mlp")
        named[f"{prefix}.input_layernorm.weight"] = self.input_norm.weight
        named[f"{prefix}.post_attention_layernorm.weight"] = self.attention_norm.weight
        named[f"{prefix}.pre_feedforward_layernorm.weight"] = self.mlp_norm.weight
        named[f"{prefix}.post_feedforward_layernorm.weight"] = self.output_norm.weight
        return named


def build(
    config: ModelConfig,
    *,
    parallel: Parallel,
    device: torch.device,
    dtype: torch.dtype,
    max_positions: int | None = None,
) -> CausalLM:
    """The model with uninitialised weights; `max_positions` as in `rope_tables`."""
    placement = Placement(device, dtype)
    tables = rope_tables(config, max_positions=max_positions, device=device)
    local = config.rope_local or config.rope
    layers = [
        SandwichLayer(
            config,
            layer_id,
            cos_sin=tables[config.rope if window is None else local],
            parallel=parallel,
            placement=placement,
        )
        for layer_id, window in enumerate(config.layer_windows)
    ]
    embedding = Embedding(
        config.vocab_size,
        config.hidden_size,
        scale=config.hidden_size**0.5,
        parallel=parallel,
        placement=placement,
    )
    norm = RMSNorm(config.hidden_size, config.rms_norm_eps, placement=placement, unit_offset=True)
    decoder = Decoder(embedding, layers, norm)
    return CausalLM(config, decoder, parallel=parallel, placement=placement)
