"""KVFormat of an engine: the number format of its cache, with the scales the checkpoint brings."""

from pathlib import Path

from paceline.cache.pool import KVFormat, Scales, torch_kv_dtype
from paceline.core.errors import WeightsError, message
from paceline.core.events import Event, Notify
from paceline.core.options import FP8
from paceline.models.kv_scales import ScaleName, has_kv_scales, read_kv_scales


def kv_format(name: str, weights: Path | None, *, num_layers: int, notify: Notify) -> KVFormat:
    """The format `name` (a value of kv_cache_dtype) for a checkpoint in folder `weights`.

    weights: None where none are read.  Says which scales were found, or are not used, by an event.
    Raises WeightsError for a broken scale, or one of no layer, of a cache that would use it.
    """
    dtype = torch_kv_dtype(name)
    if name != FP8:
        if weights is not None and has_kv_scales(weights):
            notify(Event("kv_scales_unused", f"those of the checkpoint; the cache is {name}"))
        return KVFormat(dtype=dtype)
    found = {} if weights is None else read_kv_scales(weights)
    strangers = sorted({at.layer for at in found if at.layer >= num_layers})
    if strangers:
        raise WeightsError(
            message(
                "scales of the KV cache",
                expected=f"those of layers 0 to {num_layers - 1}",
                got=f"layers {strangers}",
                remedy="check that config.json and the weights belong together",
            )
        )
    scales = {
        layer: Scales(*(found.get(ScaleName(layer, side), 1.0) for side in "kv"))
        for layer in range(num_layers)
    }
    share = f"{len(found)} of {2 * num_layers} scales come from the checkpoint"
    detail = share if len(found) == 2 * num_layers else f"{share}; the others are 1"
    notify(Event("kv_scales", detail))
    return KVFormat(dtype=dtype, scales=scales)
