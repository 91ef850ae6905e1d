"""The scales of an 8-bit KV cache that some checkpoints bring, by calibration."""

import math
import re
from pathlib import Path
from typing import NamedTuple

from paceline.core.errors import WeightsError, message
from paceline.models.checkpoint import Checkpoint, open_checkpoint

# compressed-tensors and its forerunners: beside the attention block, or below its projections.
_NAME = re.compile(r"layers\.(\d+)\.self_attn\.(?:k_proj\.k|v_proj\.v|k|v)_scale$")


class ScaleName(NamedTuple):
    """What a tensor's name says."""

    layer: int
    side: str  # "k" or "v"


def kv_scale_name(name: str) -> ScaleName | None:
    """The layer and side whose scale tensor `name` is; None when it is another tensor."""
    found = _NAME.search(name)
    return None if found is None else ScaleName(int(found[1]), name[-len("k_scale")])


def has_kv_scales(folder: Path) -> bool:
    """Whether the checkpoint at `folder` brings any; reads no data."""
    with open_checkpoint(folder) as checkpoint:
        return any(kv_scale_name(name) is not None for name in checkpoint.names)


def read_kv_scales(folder: Path) -> dict[ScaleName, float]:
    """Every scale in the checkpoint at `folder`: true value = stored value * scale.

    Raises WeightsError for one that is not a single positive number.
    """
    with open_checkpoint(folder) as checkpoint:
        named = {name: kv_scale_name(name) for name in checkpoint.names}
        return {at: _scale(checkpoint, name) for name, at in named.items() if at is not None}


def _scale(checkpoint: Checkpoint, name: str) -> float:
    values = checkpoint.tensor(name).flatten().tolist()
    if len(values) == 1 and math.isfinite(values[0]) and values[0] > 0:
        return float(values[0])
    raise WeightsError(
        message(
            f"tensor '{name}'",
            expected="one positive number, the scale of a layer's KV cache",
            got=values[:4],
            remedy="calibrate with one scale per layer, or leave --kv-cache-dtype out",
        )
    )
