"""The modules of ModernBERT, and what checkpoints call their tensors."""

from typing import Any

from torch import nn

from paceline.core.model.config import ModelConfig
from paceline.layers.encoder_layer import EncoderAttention, PreNormEncoderLayer
from paceline.layers.weights.parameter import Placement
from paceline.layers.weights.weight_format import Named
from paceline.models.causal_lm import CausalLM
from paceline.models.encoder import Encoder, build_encoder


def build_modernbert(config: ModelConfig, **where: Any) -> CausalLM:
    """where: as of `build_encoder`."""
    assert config.encoder is not None, "ModernBERT is an encoder"
    bias = config.encoder.norm_bias

    def layer(index: int, attention: EncoderAttention, placement: Placement) -> nn.Module:
        return PreNormEncoderLayer(
            config, attention, placement, is_first=index == 0, norm_bias=bias
        )

    return build_encoder(
        config,
        layer=layer,
        norm_bias=bias,
        has_final_norm=True,
        named=_name,
        named_layer=_name_layer,
        **where,
    )


def _name(encoder: Encoder) -> Named:
    assert encoder.norm is not None, "it ends in a norm"
    return {
        **encoder.embedding.held.fill("embeddings.tok_embeddings"),
        **encoder.embedding_norm.fill("embeddings.norm"),
        **encoder.norm.fill("final_norm"),
    }


def _name_layer(layer: PreNormEncoderLayer, index: str) -> Named:
    prefix = f"model.layers.{index}"
    named = {
        **layer.attention.qkv.held.fill(f"{prefix}.attn.Wqkv"),
        **layer.attention.out.held.fill(f"{prefix}.attn.Wo"),
        **layer.mlp_norm.fill(f"{prefix}.mlp_norm"),
        **layer.gate_up.held.fill(f"{prefix}.mlp.Wi"),
        **layer.down.held.fill(f"{prefix}.mlp.Wo"),
    }
    if layer.attention_norm is None:
        return named
    return named | layer.attention_norm.fill(f"{prefix}.attn_norm")
