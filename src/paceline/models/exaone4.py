"""EXAONE 4 (model_type exaone4): norms behind attention and feed-forward, and per head of Q and K;
with a window, each fourth layer sees all keys and has no rope."""

from typing import Any

from paceline.core.model.config import QKNorm
from paceline.models.architecture import Architecture, postnorm
from paceline.models.config_prenorm import read_prenorm
from paceline.models.config_windows import read_windows
from paceline.models.fields import Fields


def _read(fields: Fields) -> dict[str, Any]:
    window = fields.integer("sliding_window", None)
    every = 4
    if fields.get("layer_types") is None:  # beside layer_types a file may spell it LLLG
        every = fields.integer("sliding_window_pattern", 4)
    windows = read_windows(
        fields,
        window=window,
        default=lambda layer: window is not None and (layer + 1) % every != 0,
    )
    full = tuple(layer for layer, width in enumerate(windows) if width is None)
    return read_prenorm(fields) | {
        "layer_windows": windows,
        "unrotated_layers": () if window is None else full,
        "qk_norm": QKNorm.HEAD,
    }


ARCHITECTURE = Architecture(
    read=_read,
    build=postnorm,
    defaults={
        "max_position_embeddings": 2048,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
    },
)
