"""Target: what is served and where: a model that was found and read, and a device's facts.

`boot` and `explain` start here, so that a plan and a run cannot disagree about either.
"""

from dataclasses import dataclass

from paceline.core.errors import ConfigError
from paceline.core.gpus import DeviceFacts, gpu_by_name
from paceline.core.model.config import ModelConfig
from paceline.core.modes import End, Pooling
from paceline.core.options.engine_options import OFF, EngineOptions
from paceline.models.config import parse_config
from paceline.models.ends import with_ends
from paceline.models.locate import ModelSource, locate
from paceline.models.packed_layers import PLAIN, Packings
from paceline.models.quantized.config import read_quantization
from paceline.models.quantized.kept import made_packing, stored_packings
from paceline.models.quantized.scheme import Quantization
from paceline.models.weight_files import are_all_here
from paceline.plan.machine import local_device


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    source: ModelSource
    config: ModelConfig
    device: DeviceFacts
    quantization: Quantization | None  # of the stored weights; None: they are plain numbers
    packings: Packings  # of those that kernels read as codes


def find_target(options: EngineOptions, *, weights: bool, gpu: str | None = None) -> Target:
    """Find and read the model of `options`, and the device: a GPU by name, or one of this machine.

    weights=False does not download those of a hub model: where its headers are not here, all count
    as plain numbers.  Raises ModelError, ConfigError, WeightsError.
    """
    source = locate(options.model, options.revision, weights=False)
    asked = None if options.pooling is None else Pooling(options.pooling)
    config = with_ends(parse_config(source.config, source.generation_config), source, asked)
    device = local_device(options.device) if gpu is None else gpu_by_name(gpu)
    quantization = read_quantization(source.config)
    _require_generating(options, config)
    made = made_packing(options, quantization)
    if weights:  # which a model that is refused does not download
        source = locate(options.model, options.revision)
    packings = PLAIN
    if made is not None:
        packings = Packings(made=made)
    elif weights or (source.folder is not None and are_all_here(source.folder)):
        packings = stored_packings(
            options, source, config, quantization, device_type=device.device_type
        )
    return Target(
        source=source,
        config=config,
        device=device,
        quantization=quantization,
        packings=packings,
    )


def _require_generating(options: EngineOptions, config: ModelConfig) -> None:
    if End.GENERATE in config.ends or options.speculative_algorithm in (None, OFF):
        return
    raise ConfigError.about(
        "speculative_algorithm",
        expected=f"left out for '{options.model}', which generates nothing",
        got=options.speculative_algorithm,
        remedy="leave it out, or serve a model with a language-model head",
    )
