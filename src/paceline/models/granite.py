"""Granite (model_type granite): Llama with multipliers on embeddings, on what each block adds, on
attention scores and on logits."""

from typing import Any

from paceline.core.model.config import Multipliers
from paceline.models.architecture import Architecture
from paceline.models.config_prenorm import read_plain
from paceline.models.fields import Fields


def _read(fields: Fields) -> dict[str, Any]:
    return read_plain(fields) | {
        "attention_scale": fields.number("attention_multiplier", 1.0),
        "multipliers": Multipliers(
            embedding=fields.number("embedding_multiplier", 1.0),
            residual=fields.number("residual_multiplier", 1.0),
            logit_divisor=fields.number("logits_scaling", 1.0),
        ),
    }


ARCHITECTURE = Architecture(read=_read, defaults={"max_position_embeddings": 2048})
