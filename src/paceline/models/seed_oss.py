"""Seed-OSS (model_type seed_oss): Llama with a head size of its own, biases on Q, K and V, and one
on the output projection where the file asks for it."""

from typing import Any

from paceline.models.architecture import Architecture
from paceline.models.config_prenorm import read_plain
from paceline.models.fields import Fields


def _read(fields: Fields) -> dict[str, Any]:
    out_bias = fields.flag("attention_out_bias", False)
    return read_plain(fields) | {"attention_out_bias": out_bias}


ARCHITECTURE = Architecture(
    read=_read,
    defaults={
        "max_position_embeddings": 524_288,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
    },
)
