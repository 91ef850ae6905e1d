"""Resolve: turns what was asked into what will run, with the origin of every value.

The same function serves `LLM`, the benchmark and `explain`, so that a plan for a GPU that is not
here shows what the engine would do there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from paceline.core.errors import ConfigError, message
from paceline.core.gpus import GIB, DeviceFacts
from paceline.core.model_config import ModelConfig, cache_group_specs
from paceline.core.options import ELEMENT_BYTES, EngineOptions, engine_options, known, spec_of
from paceline.engine.fit import Fit, graph_demand, plan_memory
from paceline.engine.footprint import request_bytes, standing_bytes

CPU_KV_LIMIT = 4 * GIB
CPU_GRAPH_ROWS = 64  # requests; recorded graphs share no memory, and calls are cheap beside rows


@dataclass(frozen=True, slots=True)
class StepSize:
    """How much one step holds when nobody says."""

    requests: int
    tokens: int


USUAL_ON_CPU = StepSize(32, 1024)
# By total memory, the largest first: buffers, graphs and samplers grow with both numbers.
USUAL_ON_GPU = ((60 * GIB, StepSize(256, 8192)), (35 * GIB, StepSize(128, 4096)))
USUAL_ON_SMALL_GPU = StepSize(64, 2048)


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
    resolution = _choose_graphs(resolution, config, device)
    _refuse_step_contradictions(resolution.options)
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
    if device.device_type == "cuda":
        resolution = resolution.choose("gpu_memory_utilization", 0.9, "leaves a tenth to others")
    resolution = resolution.choose("page_size", 16, "short page tables, little waste")
    resolution = _choose_step(resolution, device)
    tokens = resolution.options.max_num_batched_tokens
    return resolution.choose("chunked_prefill_size", tokens, "the whole step")


def _choose_graphs(resolution: Resolution, config: ModelConfig, device: DeviceFacts) -> Resolution:
    """The largest decode batch that runs as a graph: all, where its graphs leave room for KV."""
    options = resolution.options
    if options.enforce_eager:
        return resolution
    rows, why = known(options.max_num_seqs), "every decode batch runs as a graph"
    if device.device_type == "cpu" and rows > CPU_GRAPH_ROWS:
        rows, why = CPU_GRAPH_ROWS, "larger batches gain nothing from a graph on a CPU"
    length = options.max_model_len or config.max_position
    limit = device.free_bytes // 4
    while rows > 1:
        if graph_demand(config, options, device.device_type, rows=rows, length=length) <= limit:
            break
        rows, why = (rows + 1) // 2, "its graphs take at most a quarter of free memory"
    return resolution.choose("cuda_graph_max_bs", rows, why)


def _choose_step(resolution: Resolution, device: DeviceFacts) -> Resolution:
    """Requests and tokens of a step: the usual, or what the other number asks for."""
    options, (usual, why) = resolution.options, _usual(device)
    rows, why_rows = usual.requests, why
    if options.max_num_batched_tokens is not None and options.max_num_batched_tokens < rows:
        rows = options.max_num_batched_tokens
        why_rows = "a step of --max-num-batched-tokens holds one token of each"
    resolution = resolution.choose("max_num_seqs", rows, why_rows)
    tokens, why_tokens = usual.tokens, why
    if known(resolution.options.max_num_seqs) > tokens:
        tokens = known(resolution.options.max_num_seqs)
        why_tokens = "one token of each of --max-num-seqs"
    if options.chunked_prefill_size is not None and options.chunked_prefill_size > tokens:
        tokens, why_tokens = options.chunked_prefill_size, "one chunk of --chunked-prefill-size"
    return resolution.choose("max_num_batched_tokens", tokens, why_tokens)


def _usual(device: DeviceFacts) -> tuple[StepSize, str]:
    if device.device_type == "cpu":
        return USUAL_ON_CPU, "usual on cpu"
    for least, size in USUAL_ON_GPU:
        if device.total_bytes >= least:
            return size, "usual on cuda"
    return USUAL_ON_SMALL_GPU, f"usual on cuda below {USUAL_ON_GPU[-1][0] // GIB} GiB"


def _choose_cpu_cache(
    resolution: Resolution, config: ModelConfig, device: DeviceFacts
) -> Resolution:
    options = resolution.options
    specs = cache_group_specs(config, known(options.page_size))
    element = ELEMENT_BYTES[known(options.dtype)]
    longest = options.max_model_len or config.max_position
    full = known(options.max_num_seqs) * request_bytes(specs, longest, element)
    full += standing_bytes(specs, element, known(options.max_num_batched_tokens))
    limits = {
        full: "every running request at full length",
        CPU_KV_LIMIT: "the most taken unasked on a CPU",
        device.free_bytes // 4: "a quarter of free memory",
    }
    fit = plan_memory(config, options, device)
    if not fit.short_by_bytes:
        limits.setdefault(fit.kv_bytes, "what weights and buffers leave")
    size = min(limits)
    return resolution.choose("kv_cache_bytes", size, limits[size])


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


def _refuse_step_contradictions(options: EngineOptions) -> None:
    """Numbers of one step that contradict each other; `options` has all of them."""
    rows, tokens = known(options.max_num_seqs), known(options.max_num_batched_tokens)
    chunk, graph_rows = known(options.chunked_prefill_size), options.cuda_graph_max_bs
    if tokens < rows:
        raise ConfigError(
            message(
                "max_num_batched_tokens",
                expected=f"at least {rows}",
                got=tokens,
                remedy="a step holds one token of every running request: raise "
                f"--max-num-batched-tokens to {rows}, or lower --max-num-seqs to {tokens}",
            )
        )
    if chunk > tokens:
        raise ConfigError(
            message(
                "chunked_prefill_size",
                expected=f"at most {tokens}, the tokens of one step",
                got=chunk,
                remedy="lower --chunked-prefill-size or raise --max-num-batched-tokens",
            )
        )
    if graph_rows is not None and graph_rows > rows:
        raise ConfigError(
            message(
                "cuda_graph_max_bs",
                expected=f"at most {rows}, the requests of one step",
                got=graph_rows,
                remedy="lower --cuda-graph-max-bs or raise --max-num-seqs",
            )
        )


def _shown(value: object) -> object:
    return "-" if value is None else value
