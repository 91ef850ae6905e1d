"""Resolve: turns what was asked into what will run, with the origin of every value.

The same function serves `LLM`, the benchmark and `explain`, so that a plan for a GPU that is not
here shows what the engine would do there.  No torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from paceline.core.errors import ConfigError, message
from paceline.core.gpus import GIB, DeviceFacts
from paceline.core.model_config import ModelConfig, cache_group_specs
from paceline.core.options import EngineOptions, engine_options, spec_of
from paceline.engine.fit import Fit, plan_memory
from paceline.engine.footprint import request_bytes, standing_bytes
from paceline.models.size import ELEMENT_BYTES

CPU_KV_LIMIT = 4 * GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """Options with the origin of each: "asked", "default" or "chosen: <why>"."""

    options: EngineOptions
    origins: Mapping[str, str]

    def choose(self, name: str, value: object, why: str) -> "Resolution":
        """A new Resolution in which a value that was left open is decided; others are kept."""
        if getattr(self.options, name) is not None:
            return self
        changed: dict[str, Any] = {name: value}
        return Resolution(
            options=replace(self.options, **changed),
            origins={**self.origins, name: f"chosen: {why}"},
        )

    def table(self) -> str:
        """One line per value that was asked or chosen, and one for all that kept their default."""
        lines, kept = [], []
        for option in fields(EngineOptions):
            flag = spec_of(option).flags[0].removeprefix("--")
            value, origin = getattr(self.options, option.name), self.origins[option.name]
            if origin == "default":
                kept.append(f"{flag}={_shown(value)}")
            else:
                lines.append(f"  {flag:<24}{_shown(value)!s:<15} ({origin})")
        lines.append("  default: " + ", ".join(kept))
        return "\n".join(["configuration", *lines])

    def to_json(self) -> dict[str, dict[str, object]]:
        """{option: {value, origin}}."""
        names = [option.name for option in fields(EngineOptions)]
        return {
            name: {"value": getattr(self.options, name), "origin": self.origins[name]}
            for name in names
        }


def resolve(
    asked: Mapping[str, object], *, config: ModelConfig, device: DeviceFacts
) -> tuple[Resolution, Fit]:
    """Decide every open value for `config` on `device`.

    Returns the resolution and the memory budget that belongs to it; the budget may be short, see
    `fit.require_fit`.  Raises ConfigError for values that contradict the model or the device.
    """
    given = engine_options(asked)
    explicit = {n for n, v in asked.items() if v is not None and getattr(given, n) is not None}
    origins = {
        option.name: "asked" if option.name in explicit else "default"
        for option in fields(EngineOptions)
    }
    _refuse_contradictions(given, config, device)
    start = Resolution(options=given, origins=origins)
    resolution = _choose_shape(_choose_device(start, config, device), device)
    if device.device_type == "cpu":
        resolution = _choose_cpu_cache(resolution, config, device)
    fit = plan_memory(config, resolution.options, device)
    why = "context limit of the model"
    if fit.max_model_len < config.max_position:
        why = f"what the KV budget holds; the model's limit is {config.max_position}"
    resolution = resolution.choose("max_model_len", fit.max_model_len, why)
    if fit.kv_bytes:
        resolution = resolution.choose("kv_cache_bytes", fit.kv_bytes, "what the budget leaves")
    return resolution, fit


def _choose_device(resolution: Resolution, config: ModelConfig, device: DeviceFacts) -> Resolution:
    resolution = resolution.choose("device", device.device_type, device.name)
    if device.native_bf16 or config.dtype == "float32":
        dtype, why = config.dtype, "as stored in the checkpoint"
    elif device.device_type == "cuda":
        dtype, why = "float16", "this GPU has no bfloat16 instructions"
    else:
        dtype, why = "float32", f"this CPU has no {config.dtype} instructions"
    resolution = resolution.choose("dtype", dtype, why)
    if device.cores is not None:
        resolution = resolution.choose("threads", device.cores, "physical cores")
    return resolution


def _choose_shape(resolution: Resolution, device: DeviceFacts) -> Resolution:
    here = device.device_type
    is_gpu = here == "cuda"
    if is_gpu:
        resolution = resolution.choose("gpu_memory_utilization", 0.9, "leaves a tenth to others")
    resolution = resolution.choose("page_size", 16, "short page tables, little waste")
    resolution = resolution.choose("max_num_seqs", 256 if is_gpu else 32, f"usual on {here}")
    usual = 8192 if is_gpu else 1024
    resolution = resolution.choose("max_num_batched_tokens", usual, f"usual on {here}")
    tokens, rows = resolution.options.max_num_batched_tokens, resolution.options.max_num_seqs
    resolution = resolution.choose("chunked_prefill_size", tokens, "the whole step")
    return resolution.choose("cuda_graph_max_bs", rows, "every decode batch runs as a graph")


def _choose_cpu_cache(
    resolution: Resolution, config: ModelConfig, device: DeviceFacts
) -> Resolution:
    options = resolution.options
    assert options.page_size is not None
    assert options.dtype is not None
    assert options.max_num_seqs is not None
    assert options.max_num_batched_tokens is not None
    specs = cache_group_specs(config, options.page_size)
    element = ELEMENT_BYTES[options.dtype]
    longest = options.max_model_len or config.max_position
    full = options.max_num_seqs * request_bytes(specs, longest, element)
    full += standing_bytes(specs, element, options.max_num_batched_tokens)
    limit = min(CPU_KV_LIMIT, device.free_bytes // 4)
    why = "every running request at full length" if full <= limit else "a quarter of free memory"
    if full > limit == CPU_KV_LIMIT:
        why = "the most taken unasked on a CPU"
    return resolution.choose("kv_cache_bytes", min(full, limit), why)


def _refuse_contradictions(
    options: EngineOptions, config: ModelConfig, device: DeviceFacts
) -> None:
    if options.device is not None and options.device != device.device_type:
        raise ConfigError(
            message(
                "device",
                expected=f"{device.device_type} ({device.name})",
                got=options.device,
                remedy="leave --device out, or choose another --gpu",
            )
        )
    if options.gpu_memory_utilization is not None and device.device_type == "cpu":
        raise ConfigError(
            message(
                "gpu_memory_utilization",
                expected="left out on a CPU",
                got=options.gpu_memory_utilization,
                remedy="size the cache with --kv-cache-memory-bytes",
            )
        )
    if options.max_model_len is not None and options.max_model_len > config.max_position:
        raise ConfigError(
            message(
                "max_model_len",
                expected=f"at most {config.max_position}, the model's context limit",
                got=options.max_model_len,
                remedy="lower --max-model-len",
            )
        )
    if options.enforce_eager and options.cuda_graph_max_bs is not None:
        raise ConfigError(
            message(
                "cuda_graph_max_bs",
                expected="left out with --enforce-eager",
                got=options.cuda_graph_max_bs,
                remedy="give one of the two",
            )
        )


def _shown(value: object) -> object:
    return "-" if value is None else value
