"""Which weights an engine keeps as codes, from headers alone: before a weight is read."""

from collections.abc import Mapping

import torch

from paceline.core.errors import ConfigError
from paceline.core.model_config import ModelConfig
from paceline.core.options import EngineOptions
from paceline.kernels.packed_weight import FP8, INT4, INT8, Packing
from paceline.models.checkpoint import open_checkpoint
from paceline.models.checkpoint_names import canonical_names
from paceline.models.locate import ModelSource
from paceline.models.packed_layers import PLAIN, Packings
from paceline.models.quantized.scheme import Quantization
from paceline.models.quantized.stored import Dequantised
from paceline.models.registry import architecture

# What plain numbers can become: fp8 as they are read, all of them as dummy weights.
MADE: Mapping[str, Packing] = {
    "fp8": Packing(FP8, None, False, torch.float32),
    "fp8-block": Packing(FP8, 128, False, torch.float32),
    "w4a16": Packing(INT4, 128, False, torch.bfloat16),
    "w8a16": Packing(INT8, 128, False, torch.bfloat16),
}


def kept_weights(
    options: EngineOptions,
    source: ModelSource,
    config: ModelConfig,
    quantization: Quantization | None,
    *,
    device_type: str,
) -> Packings:
    """What stays or becomes codes.  On a CPU codes become plain numbers, which it multiplies
    faster.  Raises ConfigError where `options` ask for another format than weights have."""
    is_dummy = options.load_format == "dummy"
    asked = options.quantization
    can_make = quantization is None and (is_dummy or asked == "fp8")
    if can_make and asked is not None and asked in MADE:
        _require_one_process(options)
        return Packings(made=MADE[asked])
    method = "none" if quantization is None else quantization.method
    if asked not in (None, method):
        raise ConfigError.about(
            "quantization",
            expected=f"{method!r}, as the config.json of '{options.model}' says",
            got=repr(asked),
            remedy="leave --quantization out, or name a checkpoint that is stored so: plain "
            f"weights become fp8 as they are read, and dummy ones {', '.join(MADE)}",
        )
    if quantization is None or is_dummy or source.folder is None or device_type == "cpu":
        return PLAIN
    file = architecture(config.model_type)
    with open_checkpoint(source.folder) as checkpoint:
        stored = Dequantised(checkpoint, quantization, model=source.name)
        found, num_unread = {}, 0
        for canonical, name in canonical_names(stored.names, file, model=source.name).items():
            packing = stored.packing(name)
            if packing is not None:
                found[canonical.removesuffix(".weight")] = packing
            elif stored.is_made(name):
                num_unread += 1
    return Packings(found, num_unread=num_unread)


def _require_one_process(options: EngineOptions) -> None:
    if options.load_format == "dummy" and options.tensor_parallel_size > 1:
        raise ConfigError.about(
            "quantization",
            expected="none, of dummy weights on several processes",
            got=repr(options.quantization),
            remedy="leave out --quantization, or --tensor-parallel-size",
        )
