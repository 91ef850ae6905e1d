"""Qwen 3 (model_type qwen3): a head size of its own, per-head norms of Q and K; a window in the
upper layers."""

from typing import Any

from paceline.core.model.config import QKNorm
from paceline.models.architecture import Architecture
from paceline.models.config_prenorm import attention_biases, read_prenorm
from paceline.models.config_qwen import DEFAULTS, upper_windows
from paceline.models.fields import Fields


def _read(fields: Fields) -> dict[str, Any]:
    return read_prenorm(fields) | {
        **attention_biases(fields),
        "layer_windows": upper_windows(fields),
        "qk_norm": QKNorm.HEAD,
    }


ARCHITECTURE = Architecture(read=_read, defaults=DEFAULTS | {"head_dim": 128})
