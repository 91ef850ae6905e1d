"""Gemma 2 (model_type gemma2): soft caps on attention scores and logits, every other layer
windowed, the first too."""

from typing import Any

from paceline.models.architecture import Architecture, sandwich
from paceline.models.config_gemma import DEFAULTS, read_sandwich
from paceline.models.config_rope import context_limit, read_rope
from paceline.models.config_windows import read_windows
from paceline.models.fields import Fields


def _read(fields: Fields) -> dict[str, Any]:
    rope = read_rope(fields)
    return read_sandwich(fields) | {
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


ARCHITECTURE = Architecture(
    read=_read,
    build=sandwich,
    defaults=DEFAULTS
    | {
        "vocab_size": 256_000,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
)
