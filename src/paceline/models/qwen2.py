"""Qwen 2 and 2.5 (model_type qwen2): biases on Q, K and V; a window in the upper layers."""

from typing import Any

from paceline.models.architecture import Architecture
from paceline.models.config_prenorm import read_prenorm
from paceline.models.config_qwen import DEFAULTS, upper_windows
from paceline.models.fields import Fields


def _read(fields: Fields) -> dict[str, Any]:
    return read_prenorm(fields) | {"attention_bias": True, "layer_windows": upper_windows(fields)}


ARCHITECTURE = Architecture(read=_read, defaults=DEFAULTS)
