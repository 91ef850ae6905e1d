"""The scales of an 8-bit KV cache that some checkpoints bring, by calibration, and the
format of a cache that has them."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from paceline.cache.pool import KVFormat, Scales, torch_kv_dtype
from paceline.core.dtypes import FP8
from paceline.core.errors import WeightsError
from paceline.core.events import Event, Notify
from paceline.models.checkpoint import Checkpoint, open_checkpoint
from paceline.models.quantized.config import said_of

# compressed-tensors, its forerunners and ModelOpt: beside the attention block, below its
# projections, or, in older files, one for both sides, or what a projection's output was scaled by.
_NAME = re.compile(
    r"layers\.(\d+)\.self_attn\.(?:(?:k_proj\.|qkv_proj\.)?(k)_scale|(?:v_proj\.|qkv_proj\.)?(v)_scale"
    r"|(kv)_scale|([kv])_proj\.output_scale)$"
)
# Of queries and of attention's weights, which stay in the model's dtype.
_UNREAD = re.compile(r"self_attn\.((q_proj\.)?q_scale|q_proj\.output_scale|prob_output_scale)$")


class ScaleName(NamedTuple):
    """What a tensor's name says."""

    layer: int
    sides: str  # "k", "v" or, of one scale for both, "kv"


def kv_scale_name(name: str) -> ScaleName | None:
    """The layer and sides whose scale tensor `name` is; None when it is another tensor."""
    found = _NAME.search(name)
    return None if found is None else ScaleName(int(found[1]), found[found.lastindex or 1])


def is_cache_scale(name: str) -> bool:
    """Whether tensor `name` is a scale of keys, values or queries, and no weight's."""
    return kv_scale_name(name) is not None or _UNREAD.search(name) is not None


def has_kv_scales(folder: Path) -> bool:
    """Whether the checkpoint at `folder` brings any; reads no data."""
    with open_checkpoint(folder) as checkpoint:
        return any(kv_scale_name(name) is not None for name in checkpoint.names)


def read_kv_scales(folder: Path) -> dict[ScaleName, float]:
    """Every scale in the checkpoint at `folder`, by layer and one side: true value = stored value *
    scale.

    Raises WeightsError for one that is not a single positive number.
    """
    with open_checkpoint(folder) as checkpoint:
        named = {name: kv_scale_name(name) for name in checkpoint.names}
        return {
            ScaleName(at.layer, side): _scale(checkpoint, name)
            for name, at in named.items()
            if at is not None
            for side in at.sides
        }


def other_format(config: Mapping[str, Any]) -> str | None:
    """What else than float8 a whole config.json says that scales of a cache are for, as ModelOpt's
    NVFP4, whose largest number is another; None: nothing else."""
    said = said_of(config)
    fields: Mapping[str, Any] = said if isinstance(said, Mapping) else {}
    algorithm, scheme = fields.get("kv_cache_quant_algo"), fields.get("kv_cache_scheme")
    if isinstance(algorithm, str) and algorithm.upper() != "FP8":
        return algorithm
    bits = scheme.get("num_bits", 8) if isinstance(scheme, Mapping) else 8
    return None if bits == 8 else f"{bits} bits"


def kv_format(
    name: str,
    weights: Path | None,
    config: Mapping[str, Any],
    *,
    num_layers: int,
    of_latents: bool,
    notify: Notify,
) -> KVFormat:
    """The format `name` (a value of kv_cache_dtype) for a checkpoint in folder `weights`.

    weights: None where none are read.  config: its whole config.json.  of_latents: each row in
    float8 has a scale of its own.  Says which scales were found, or are not used, by an event.
    Raises WeightsError for a broken scale, or one of no layer, of a cache that would use it.
    """
    dtype, unused = torch_kv_dtype(name), None
    if name != FP8:
        unused = f"the cache is {name}"
    elif of_latents:
        unused = "rows of latents have their own"
    elif (others := other_format(config)) is not None:
        unused = f"they are for {others}"
    if unused is not None and weights is not None and has_kv_scales(weights):
        notify(Event("kv_scales_unused", f"those of the checkpoint; {unused}"))
    if name != FP8 or of_latents:
        return KVFormat(dtype=dtype)
    found = {} if weights is None or unused is not None else read_kv_scales(weights)
    strangers = sorted({at.layer for at in found if at.layer >= num_layers})
    if strangers:
        raise WeightsError.about(
            "scales of the KV cache",
            expected=f"those of layers 0 to {num_layers - 1}",
            got=f"layers {strangers}",
            remedy="check that config.json and the weights belong together",
        )
    scales = {
        layer: Scales(*(found.get(ScaleName(layer, side), 1.0) for side in "kv"))
        for layer in range(num_layers)
    }
    share = f"{len(found)} of {2 * num_layers} scales come from the checkpoint"
    detail = share if len(found) == 2 * num_layers else f"{share}; the others are 1"
    notify(Event("kv_scales", detail))
    return KVFormat(dtype=dtype, scales=scales)


def _scale(checkpoint: Checkpoint, name: str) -> float:
    values = checkpoint.tensor(name).flatten().tolist()
    if len(values) == 1 and math.isfinite(values[0]) and values[0] > 0:
        return float(values[0])
    raise WeightsError.about(
        f"tensor '{name}'",
        expected="one positive number, the scale of a layer's KV cache",
        got=values[:4],
        remedy="calibrate with one scale per layer, or leave --kv-cache-dtype out",
    )
