"""EngineOptions: every knob of the engine, once.

The command line, the benchmark and `LLM(...)` all take their names, defaults, help and aliases from
these fields.  `None` means "decide for me"; `engine.resolve` removes it.  No torch.
"""

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from difflib import get_close_matches
from typing import Any, TypeVar

from paceline.core.errors import ConfigError, message
from paceline.core.sampling_params import SEED_LIMIT

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
DTYPES = tuple(ELEMENT_BYTES)
FP8 = "fp8_e4m3"
KV_ELEMENT_BYTES = ELEMENT_BYTES | {FP8: 1}
LOAD_FORMATS = ("auto", "dummy")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionSpec:
    """How a field appears to people."""

    kind: type  # str, int, float, bool, or tuple: words, each with a flag of its own
    help: str
    flags: tuple[str, ...]  # the first is ours, the others are what users of other engines type
    off_flags: tuple[str, ...] = ()  # bool only: flags that say False
    unit: str | None = None
    choices: tuple[str, ...] | None = None
    aliases: tuple[tuple[str, str], ...] = ()  # (another word, the choice it means)
    low: float | None = None  # inclusive
    high: float | None = None  # inclusive


def _option(default: Any, kind: type, help: str, *flags: str, **facts: Any) -> Any:
    spec = OptionSpec(kind=kind, help=help, flags=flags, **facts)
    return field(default=default, metadata={"option": spec})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What a caller may ask of the engine.  Checked when built; raises ConfigError."""

    model: str = _option(
        "bundled",
        str,
        "Hub id, local folder, 'bundled', or a shape shipped in the package.",
        "--model",
        "--model-path",
    )
    revision: str | None = _option(None, str, "Branch, tag or commit of a hub id.", "--revision")
    device: str | None = _option(
        None, str, "Where the model runs.", "--device", choices=("cpu", "cuda")
    )
    dtype: str | None = _option(
        None, str, "Number format of weights and activations.", "--dtype", choices=DTYPES
    )
    kv_cache_dtype: str | None = _option(
        None,
        str,
        "Number format of the KV cache: the model's, or 8 bits with a scale per layer.",
        "--kv-cache-dtype",
        choices=tuple(KV_ELEMENT_BYTES),
        aliases=(("fp8", FP8),),
    )
    load_format: str = _option(
        "auto",
        str,
        "'dummy' fills the weights with seeded random numbers instead of reading them.",
        "--load-format",
        choices=LOAD_FORMATS,
    )
    max_model_len: int | None = _option(
        None,
        int,
        "Context limit: prompt and output of one request.",
        "--max-model-len",
        "--context-length",
        unit="tokens",
        low=2,
    )
    page_size: int | None = _option(
        None,
        int,
        "Tokens of one page of the KV cache.",
        "--page-size",
        "--block-size",
        unit="tokens",
        low=1,
    )
    gpu_memory_utilization: float | None = _option(
        None,
        float,
        "Share of the GPU's memory the engine may use.",
        "--gpu-memory-utilization",
        "--mem-fraction-static",
        low=0.01,
        high=1.0,
    )
    kv_cache_bytes: int | None = _option(
        None,
        int,
        "Size of the KV cache.",
        "--kv-cache-memory-bytes",
        unit="bytes",
        low=1,
    )
    max_num_seqs: int | None = _option(
        None,
        int,
        "Requests running at the same time.",
        "--max-num-seqs",
        "--max-running-requests",
        unit="requests",
        low=1,
    )
    max_num_batched_tokens: int | None = _option(
        None,
        int,
        "Tokens computed in one step.",
        "--max-num-batched-tokens",
        unit="tokens",
        low=1,
    )
    chunked_prefill_size: int | None = _option(
        None,
        int,
        "Prompt tokens of one request computed in one step.",
        "--chunked-prefill-size",
        unit="tokens",
        low=1,
    )
    enable_prefix_cache: bool = _option(
        True,
        bool,
        "Share the KV of equal prompt prefixes.",
        "--enable-prefix-caching",
        off_flags=("--no-enable-prefix-caching", "--disable-radix-cache"),
    )
    attention_backend: str | None = _option(
        None,
        str,
        "Attention backend by name, prefill+decode, cascade(name), or pkg.mod:Class.",
        "--attention-backend",
    )
    logits_processors: tuple[str, ...] = _option(
        (),
        tuple,
        "Logits processor as pkg.mod:Class; may be given several times.",
        "--logits-processor",
        "--logits-processors",
    )
    enforce_eager: bool = _option(
        False, bool, "Never use graphs.", "--enforce-eager", "--disable-cuda-graph"
    )
    cuda_graph_max_bs: int | None = _option(
        None,
        int,
        "Largest decode batch that runs as a graph.",
        "--cuda-graph-max-bs",
        unit="requests",
        low=1,
    )
    cuda_graph_max_tokens: int | None = _option(
        None,
        int,
        "Largest prefill or mixed step that runs as a graph; 0: none.",
        "--cuda-graph-max-tokens",
        unit="tokens",
        low=0,
    )
    sanitize: bool = _option(
        False,
        bool,
        "Run every step again over poison where it may not read; stop where that shows.  For "
        "debugging: tens of times slower.",
        "--sanitize",
    )
    seed: int = _option(
        0,
        int,
        "Seed of requests that bring none, and of dummy weights.",
        "--seed",
        "--random-seed",
        low=-SEED_LIMIT,
        high=SEED_LIMIT - 1,
    )
    overlap: bool = _option(
        True,
        bool,
        "Schedule the next step while the device computes this one.",
        "--overlap",
        off_flags=("--no-overlap", "--disable-overlap-schedule"),
    )
    threads: int | None = _option(
        None, int, "CPU threads of tensor operations.", "--threads", unit="threads", low=1
    )

    def __post_init__(self) -> None:
        for option in fields(self):
            _check(option, getattr(self, option.name))


def known(value: T | None) -> T:
    """The value of an option that `engine.resolve` has decided."""
    assert value is not None, "resolve() decides every open value"
    return value


def spec_of(option: Field[Any]) -> OptionSpec:
    """The OptionSpec a field of EngineOptions carries."""
    spec: OptionSpec = option.metadata["option"]
    return spec


def engine_options(asked: Mapping[str, object]) -> EngineOptions:
    """Build options from what was asked; the word 'auto' leaves an undecided field undecided.

    Raises ConfigError for an unknown name, with the nearest known one.
    """
    known = {option.name: option for option in fields(EngineOptions)}
    values: dict[str, Any] = {}
    for name, value in asked.items():
        if name not in known:
            near = get_close_matches(name, known, n=1)
            remedy = f"did you mean {near[0]}?" if near else "see paceline generate --help"
            raise ConfigError(
                message(
                    "engine option", expected=f"one of {sorted(known)}", got=name, remedy=remedy
                )
            )
        if not (value == "auto" and known[name].default is None):
            values[name] = _unaliased(spec_of(known[name]), value)
    return EngineOptions(**values)


def _unaliased(spec: OptionSpec, value: object) -> object:
    if spec.kind is tuple and isinstance(value, list):
        return tuple(value)
    return next((choice for word, choice in spec.aliases if word == value), value)


def _check(option: Field[Any], value: object) -> None:
    spec = spec_of(option)
    if value is None and option.default is None:
        return
    if isinstance(value, int) and not isinstance(value, bool) and spec.kind is float:
        value = float(value)
    if type(value) is not spec.kind:
        raise _refusal(option, "a list" if spec.kind is tuple else spec.kind.__name__, value)
    if isinstance(value, tuple) and not all(isinstance(word, str) and word for word in value):
        raise _refusal(option, "a list of non-empty str", value)
    if spec.choices is not None and value not in spec.choices:
        raise _refusal(option, "one of " + ", ".join(spec.choices), value)
    low, high = spec.low, spec.high
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        # Written so that NaN fails.
        above = low is None or value >= low
        below = high is None or value <= high
        if not (above and below):
            wanted = f"at least {low:g}" if high is None else f"from {low:g} to {high:g}"
            raise _refusal(option, wanted, value)


def _refusal(option: Field[Any], expected: str, got: object) -> ConfigError:
    spec = spec_of(option)
    unit = f" {spec.unit}" if spec.unit else ""
    remedy = f"set {spec.flags[0]} accordingly"
    if option.default is None:
        remedy += " or leave it out to let the engine decide"
    text = message(option.name, expected=expected + unit, got=repr(got), remedy=remedy)
    return ConfigError(text)
