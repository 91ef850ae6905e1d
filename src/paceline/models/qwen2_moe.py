"""Qwen 2 MoE (model_type qwen2_moe): Qwen 2 with experts, one of which every token takes; a
switched-on window is in every other lower layer, the first too."""

from dataclasses import replace
from typing import Any

from paceline.models.architecture import Architecture
from paceline.models.config_prenorm import read_prenorm
from paceline.models.config_qwen import DEFAULTS, read_experts
from paceline.models.config_windows import read_windows, switched_window
from paceline.models.fields import Fields


def _read(fields: Fields) -> dict[str, Any]:
    first_full = fields.integer("max_window_layers", minimum=0)
    is_used = fields.flag("use_sliding_window", False)
    experts = read_experts(fields)
    if experts is not None:
        shared_size = fields.integer("shared_expert_intermediate_size")
        experts = replace(experts, shared_size=shared_size)
    return read_prenorm(fields) | {
        "attention_bias": fields.flag("qkv_bias", True),
        "layer_windows": read_windows(
            fields,
            window=switched_window(fields),
            default=lambda layer: is_used and layer % 2 == 0 and layer < first_full,
        ),
        "moe": experts,
    }


ARCHITECTURE = Architecture(
    read=_read,
    defaults=DEFAULTS
    | {
        "num_key_value_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    names_experts=True,
)
