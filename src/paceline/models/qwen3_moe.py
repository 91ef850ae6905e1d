"""Qwen 3 MoE (model_type qwen3_moe): Qwen 3 with experts; one window for all layers."""

from typing import Any

from paceline.core.model.config import QKNorm
from paceline.models.architecture import Architecture
from paceline.models.config_prenorm import attention_biases, read_prenorm
from paceline.models.config_qwen import read_experts
from paceline.models.config_windows import switched_window, uniform_windows
from paceline.models.fields import Fields


def _read(fields: Fields) -> dict[str, Any]:
    fields.refuse("layer_types", "qwen3_moe has one kind of layer; use a model of another type")
    shared = read_prenorm(fields)
    return shared | {
        **attention_biases(fields),
        "layer_windows": uniform_windows(shared, switched_window(fields)),
        "qk_norm": QKNorm.HEAD,
        "moe": read_experts(fields),
    }


ARCHITECTURE = Architecture(
    read=_read,
    defaults={
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "num_local_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    names_experts=True,
)
