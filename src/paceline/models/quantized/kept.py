"""Which weights an engine keeps as codes, from headers alone: before a weight is read."""

from collections.abc import Mapping

import torch

from paceline.core.errors import ConfigError
from paceline.core.model.config import ModelConfig
from paceline.core.options.engine_options import EngineOptions
from paceline.kernels.packed_weight import FP8, INT4, INT8, Packing
from paceline.models.checkpoint import open_checkpoint
from paceline.models.checkpoint_names import canonical_names, of_the_model
from paceline.models.locate import ModelSource
from paceline.models.packed_layers import PLAIN, Packings
from paceline.models.quantized.scheme import Quantization
from paceline.models.quantized.stored import Dequantised
from paceline.models.registry import architecture

# What plain numbers can become: fp8 as they are read, all of them as dummy weights.
MADE: Mapping[str, Packing] = {
    "fp8": Packing(FP8, None, False, torch.float32, rounds_inputs=True),
    "fp8-block": Packing(FP8, 128, False, torch.float32, shared_rows=128, rounds_inputs=True),
    "w4a16": Packing(INT4, 128, False, torch.bfloat16),
    "w8a16": Packing(INT8, 128, False, torch.bfloat16),
}


def made_packing(options: EngineOptions, quantization: Quantization | None) -> Packing | None:
    """What linear layers are rounded to, because `options` ask for it; None: they stay as they are
    stored.  Raises ConfigError where `options` ask for another format than weights have."""
    asked, is_dummy = options.quantization, options.load_format == "dummy"
    can_make = is_dummy or (quantization is None and asked == "fp8")
    if can_make and asked is not None and asked in MADE:
        _require_one_process(options)
        return MADE[asked]
    method = "none" if quantization is None or is_dummy else quantization.method
    if asked not in (None, method):
        said = f"{method!r}, as the config.json of '{options.model}' says"
        raise ConfigError.about(
            "quantization",
            expected=f"one of {', '.join(MADE)}, or none, of dummy weights" if is_dummy else said,
            got=repr(asked),
            remedy="leave --quantization out, or name a checkpoint that is stored so: plain "
            f"weights become fp8 as they are read, and dummy ones {', '.join(MADE)}",
        )
    return None


def stored_packings(
    options: EngineOptions,
    source: ModelSource,
    config: ModelConfig,
    quantization: Quantization | None,
    *,
    device_type: str,
) -> Packings:
    """What a checkpoint stores as codes that kernels read.  Raises WeightsError for headers that
    cannot be read.

    Unasked, codes become plain numbers on a CPU, and in float32 on a GPU: no kernel multiplies with
    them there, and unpacking them for every step is slower.
    """
    folder, is_dummy = source.folder, options.load_format == "dummy"
    if quantization is None or is_dummy or folder is None or device_type == "cpu":
        return PLAIN
    if options.dtype == "float32" and options.quantization is None:
        return PLAIN
    file = architecture(config.model_type)
    with open_checkpoint(folder) as checkpoint:
        stored = Dequantised(checkpoint, quantization, model=source.name)
        names = canonical_names(stored.names, file, model=source.name)
        names = of_the_model(names, file, config.num_layers)
        found, num_unread = {}, 0
        for canonical, name in names.items():
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
