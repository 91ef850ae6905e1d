"""config.json of Gemma 1, 2 and 3 (text)."""

from typing import Any

from paceline.core.activations import ACTIVATIONS
from paceline.core.model_config import NormKind
from paceline.models.config_prenorm import attention_biases, read_prenorm
from paceline.models.config_rope import context_limit, read_dual_rope, read_rope
from paceline.models.config_windows import read_windows, uniform_windows
from paceline.models.fields import Fields


def read_gemma(fields: Fields) -> dict[str, Any]:
    """Gemma 1: a pre-norm decoder.  Its "gelu" always meant the approximation by tanh."""
    shared = read_prenorm(fields)
    act = "gelu_pytorch_tanh" if shared["hidden_act"] == "gelu" else shared["hidden_act"]
    if fields.get("hidden_activation") not in (None, act):
        fields.fail("hidden_activation", f"hidden_act, {act}", fields.get("hidden_activation"))
    return shared | {
        "hidden_act": act,
        **attention_biases(fields),
        "layer_windows": uniform_windows(shared, None),
        "norm": NormKind.UNIT_OFFSET,
    }


def read_gemma2(fields: Fields) -> dict[str, Any]:
    """Soft caps on attention and logits, one rope, every other layer windowed, the first too."""
    rope = read_rope(fields)
    return _gemma(fields) | {
        "max_position": context_limit(rope, fields.integer("max_position_embeddings")),
        "rope": rope,
        "layer_windows": read_windows(
            fields,
            window=fields.integer("sliding_window", None),
            default=lambda layer: layer % 2 == 0,
        ),
        "attention_soft_cap": fields.number("attn_logit_softcapping", None),
        "logit_soft_cap": fields.number("final_logit_softcapping", None),
    }


def read_gemma3(fields: Fields) -> dict[str, Any]:
    """A rope of their own for windowed layers, which are all but each sixth."""
    remedy = "Gemma 3 was trained without a cap on scores, and transformers applies none: remove it"
    fields.refuse("attn_logit_softcapping", remedy)
    pattern = fields.integer("sliding_window_pattern", 6)
    windows = read_windows(
        fields,
        window=fields.integer("sliding_window", None),
        default=lambda layer: (layer + 1) % pattern != 0,
    )
    full, sliding = read_dual_rope(fields, full_theta=1_000_000.0, sliding_theta=10_000.0)
    differs = sliding != full and any(window is not None for window in windows)
    return _gemma(fields) | {
        "max_position": context_limit(full, fields.integer("max_position_embeddings")),
        "rope": full,
        "rope_local": sliding if differs else None,
        "layer_windows": windows,
        "logit_soft_cap": fields.number("final_logit_softcapping", None),
    }


def _gemma(fields: Fields) -> dict[str, Any]:
    head_dim = fields.integer("head_dim")
    heads = fields.integer("num_attention_heads")
    return {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": fields.integer("hidden_size"),
        "intermediate_size": fields.integer("intermediate_size"),
        "num_layers": fields.integer("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": fields.integer("num_key_value_heads", heads),
        "head_dim": head_dim,
        "v_head_dim": head_dim,
        "rotary_dim": head_dim,
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
        "attention_scale": fields.number("query_pre_attn_scalar") ** -0.5,
        **attention_biases(fields),
        "norm": NormKind.UNIT_OFFSET,
        "hidden_act": fields.choice("hidden_activation", tuple(ACTIVATIONS)),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", True),
    }
