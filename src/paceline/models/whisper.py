"""Whisper (model_type whisper; arXiv:2212.04356): an encoder of audio, and a decoder that reads it.

A decoder's block is two layers of `ModelConfig`: one over its tokens, one over the encoder's rows.
"""

from typing import Any

from paceline.core.model.config import Heads, LayerSpec, ModelConfig
from paceline.core.model.encoder import EncoderInputConfig
from paceline.models.architecture import COMPUTED, Architecture
from paceline.models.fields import Fields

MOST_BLOCKS = 1000
_FRAMES_PER_ROW = 2  # the stride of the second convolution


def read(fields: Fields) -> dict[str, Any]:
    """Of the decoder, with what it reads."""
    fields.refuse("scale_embedding", "embeddings are taken as they are, as in released files")
    if fields.get("activation_function") != "gelu":
        fields.fail("activation_function", "'gelu'", fields.get("activation_function"))
    hidden, heads = fields.integer("d_model"), fields.integer("decoder_attention_heads")
    own_heads, blocks = fields.integer("encoder_attention_heads"), fields.integer("decoder_layers")
    sizes = {"decoder_attention_heads": heads, "encoder_attention_heads": own_heads}
    for name, number in sizes.items():
        if hidden % number:
            fields.fail(name, f"a divisor of d_model {hidden}", number)
    for name in ("decoder_layers", "encoder_layers"):
        if fields.integer(name) > MOST_BLOCKS:
            fields.fail(name, f"at most {MOST_BLOCKS}", fields.get(name))
    dim = hidden // heads
    own = LayerSpec(heads=Heads(heads, heads, dim, dim), scale=dim**-0.5)
    cross = LayerSpec(heads=own.heads, scale=own.scale, reads_encoder=True)
    return {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": fields.integer("decoder_ffn_dim"),
        "max_position": fields.integer("max_target_positions"),
        "position_rows": fields.integer("max_target_positions"),
        "rms_norm_eps": 1e-5,
        "layers": (own, cross) * blocks,
        "attention_bias": True,
        "attention_out_bias": True,
        "hidden_act": "gelu",
        "tie_word_embeddings": fields.flag("tie_word_embeddings", True),
        "max_encoder_len": fields.integer("max_source_positions"),
        "encoder_input": EncoderInputConfig(
            width=fields.integer("num_mel_bins"),
            frames_per_row=_FRAMES_PER_ROW,
            width_first=True,
            is_needed=True,
            num_layers=fields.integer("encoder_layers"),
            num_heads=own_heads,
            intermediate_size=fields.integer("encoder_ffn_dim"),
        ),
    }


def build(config: ModelConfig, **where: Any) -> Any:
    """where: as of `build_whisper`."""
    from paceline.models.whisper_stack import build_whisper

    return build_whisper(config, **where)


ARCHITECTURE = Architecture(
    read=read,
    build=build,
    defaults={
        "vocab_size": 51865,
        "num_mel_bins": 80,
        "encoder_layers": 4,
        "encoder_attention_heads": 6,
        "decoder_layers": 4,
        "decoder_attention_heads": 6,
        "decoder_ffn_dim": 1536,
        "encoder_ffn_dim": 1536,
        "activation_function": "gelu",
        "d_model": 384,
        "max_source_positions": 1500,
        "max_target_positions": 448,
        "tie_word_embeddings": True,
    },
    renamed=(("model.decoder.", "model."), ("proj_out.", "lm_head.")),
    ignored=COMPUTED,
    left_out=r"^model\.(encoder\.)?layers\.\d+\.self_attn\.k_proj\.bias$",
)
