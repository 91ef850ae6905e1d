"""config.json of Gemma 2 and 3 (text): fields that both spell alike, and what tells them apart."""

from typing import Any

from paceline.core.activations import ACTIVATIONS
from paceline.models.config_rope import context_limit, read_dual_rope, read_rope
from paceline.models.config_windows import read_windows
from paceline.models.fields import Fields


def read_gemma2(fields: Fields) -> dict[str, Any]:
    """Soft caps on attention and logits, one rope, every other layer windowed, the first too."""
    rope = read_rope(fields)
    max_position = fields.integer("max_position_embeddings", 8192)
    attention_cap = fields.unless_null("attn_logit_softcapping", 50.0)
    logit_cap = fields.unless_null("final_logit_softcapping", 30.0)
    return _gemma(fields, vocab_size=256_000) | {
        "max_position": context_limit(rope, max_position),
        "rope": rope,
        "rope_local": None,
        "layer_windows": read_windows(
            fields,
            window=fields.integer("sliding_window", fields.unless_null("sliding_window", 4096)),
            default=lambda layer: layer % 2 == 0,
        ),
        "attention_soft_cap": fields.number("attn_logit_softcapping", attention_cap),
        "logit_soft_cap": fields.number("final_logit_softcapping", logit_cap),
    }


def read_gemma3(fields: Fields) -> dict[str, Any]:
    """A rope of their own for windowed layers, which are all but each sixth."""
    pattern = fields.integer("sliding_window_pattern", 6)
    windows = read_windows(
        fields,
        window=fields.integer("sliding_window", 4096),
        default=lambda layer: (layer + 1) % pattern != 0,
    )
    full, sliding = read_dual_rope(fields, full_theta=1_000_000.0, sliding_theta=10_000.0)
    differs = sliding != full and any(window is not None for window in windows)
    return _gemma(fields, vocab_size=262_208) | {
        "max_position": context_limit(full, fields.integer("max_position_embeddings", 131_072)),
        "rope": full,
        "rope_local": sliding if differs else None,
        "layer_windows": windows,
        "attention_soft_cap": fields.number("attn_logit_softcapping", None),
        "logit_soft_cap": fields.number("final_logit_softcapping", None),
    }


def _gemma(fields: Fields, *, vocab_size: int) -> dict[str, Any]:
    bias = fields.flag("attention_bias", False)
    head_dim = fields.integer("head_dim", 256)
    return {
        "vocab_size": fields.integer("vocab_size", vocab_size),
        "hidden_size": fields.integer("hidden_size", 2304),
        "intermediate_size": fields.integer("intermediate_size", 9216),
        "num_layers": fields.integer("num_hidden_layers", 26),
        "num_heads": fields.integer("num_attention_heads", 8),
        "num_kv_heads": fields.integer("num_key_value_heads", 4),
        "head_dim": head_dim,
        "v_head_dim": head_dim,
        "rotary_dim": head_dim,
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
        "attention_scale": fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        "attention_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": False,
        "hidden_act": fields.choice("hidden_activation", tuple(ACTIVATIONS), "gelu_pytorch_tanh"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", True),
    }
