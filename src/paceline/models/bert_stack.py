"""The modules of BERT and its kin, and what checkpoints call their tensors."""

from typing import Any

from torch import nn

from paceline.core.model.config import ModelConfig
from paceline.layers.encoder_layer import EncoderAttention, PostNormEncoderLayer
from paceline.layers.weights.parameter import Placement
from paceline.layers.weights.weight_format import Named, wholly
from paceline.models.causal_lm import CausalLM
from paceline.models.encoder import Encoder, LearnedPositions, build_encoder


def build_bert(config: ModelConfig, **where: Any) -> CausalLM:
    """where: as of `build_encoder`."""
    own = config.encoder

    def layer(_: int, attention: EncoderAttention, placement: Placement) -> nn.Module:
        return PostNormEncoderLayer(config, attention, placement)

    def learned(placement: Placement) -> LearnedPositions:
        assert own is not None, "BERT is an encoder"
        rows, types = own.position_rows, own.token_types
        return LearnedPositions(
            rows, types, config.hidden_size, first=own.first_position, placement=placement
        )

    return build_encoder(
        config, layer=layer, learned=learned, named=_name, named_layer=_name_layer, **where
    )


def _name(encoder: Encoder) -> Named:
    learned = encoder.learned
    assert learned is not None, "BERT's positions are learned"
    return {
        **encoder.embedding.held.fill("embeddings.word_embeddings"),
        "embeddings.position_embeddings.weight": wholly(learned.positions),
        "embeddings.token_type_embeddings.weight": wholly(learned.types),
        **encoder.embedding_norm.fill("embeddings.LayerNorm"),
    }


def _name_layer(layer: PostNormEncoderLayer, index: str) -> Named:
    prefix = f"encoder.layer.{index}"
    own = f"{prefix}.attention.self"
    return {
        **layer.attention.qkv.held.fill(f"{own}.query", f"{own}.key", f"{own}.value"),
        **layer.attention.out.held.fill(f"{prefix}.attention.output.dense"),
        **layer.attention_norm.fill(f"{prefix}.attention.output.LayerNorm"),
        **layer.up.held.fill(f"{prefix}.intermediate.dense"),
        **layer.down.held.fill(f"{prefix}.output.dense"),
        **layer.output_norm.fill(f"{prefix}.output.LayerNorm"),
    }
