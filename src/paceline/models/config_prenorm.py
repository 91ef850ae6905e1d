"""What config.json files of the pre-norm models have in common."""

from collections.abc import Callable
from typing import Any

from paceline.core.model.config import HIDDEN_ACTS
from paceline.core.model.rope import RopeConfig
from paceline.models.config_rope import context_limit, read_rope
from paceline.models.config_windows import read_windows
from paceline.models.fields import Fields


def read_plain(fields: Fields) -> dict[str, Any]:
    """Llama's: biases where the file asks for them."""
    return read_prenorm(fields) | {
        **attention_biases(fields),
        "mlp_bias": fields.flag("mlp_bias", False),
        "layer_windows": read_windows(fields, window=None, default=lambda _: False),
    }


def attention_biases(fields: Fields, *, default: bool = False) -> dict[str, bool]:
    """Of files with one flag for all projections of attention."""
    bias = fields.flag("attention_bias", default)
    return {"attention_bias": bias, "attention_out_bias": bias}


def read_prenorm(
    fields: Fields, *, partial_rope: Callable[[Fields, int], tuple[RopeConfig, int]] | None = None
) -> dict[str, Any]:
    """Fields that all of them spell alike.

    partial_rope: of a head's dimensions, the rope and how many of them it turns; None: all.
    """
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if heads > hidden:
        fields.fail("num_attention_heads", f"at most hidden_size {hidden}", heads)
    dim = fields.integer("head_dim", hidden // heads)
    rope, rotary_dim = partial_rope(fields, dim) if partial_rope else (read_rope(fields), dim)
    return {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": fields.integer("intermediate_size"),
        "num_layers": fields.integer("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": fields.integer("num_key_value_heads", heads),
        "head_dim": dim,
        "v_head_dim": dim,
        "rotary_dim": rotary_dim,
        "max_position": context_limit(rope, fields.integer("max_position_embeddings")),
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
        "rope": rope,
        "attention_scale": dim**-0.5,
        "hidden_act": fields.choice("hidden_act", tuple(HIDDEN_ACTS), "silu"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", False),
    }
