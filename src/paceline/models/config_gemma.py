"""What config.json files of Gemma 2 and 3 have in common."""

from typing import Any

from paceline.core.model.config import HIDDEN_ACTS, NormKind
from paceline.models.config_prenorm import attention_biases
from paceline.models.fields import Fields

DEFAULTS: dict[str, Any] = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}


def read_sandwich(fields: Fields) -> dict[str, Any]:
    """Fields that both spell alike."""
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
        "hidden_act": fields.choice("hidden_activation", tuple(HIDDEN_ACTS)),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", True),
    }
