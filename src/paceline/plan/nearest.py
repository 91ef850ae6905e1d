"""Nearest: the command closest to what was asked whose memory fits, when the asked one does not.

One option is changed before two, and two before three.  Among equals the order of `knobs` decides:
fewer requests at a time, a shorter context, a smaller KV format, another cache size, a shorter
step, more of the GPU, a smaller number format.  Every change goes as far as needed and no further:
one notch back towards the ask does not fit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import combinations

from paceline.core.errors import ConfigError
from paceline.core.gpus import GPUS, DeviceFacts
from paceline.core.model_config import ModelConfig
from paceline.core.option_spec import spec_of
from paceline.core.options import DTYPES, FP8, EngineOptions, known
from paceline.models.config import parse_config
from paceline.models.locate import locate, shape_names
from paceline.plan.fit import SHORTEST_LEN, Fit
from paceline.plan.resolve import resolve
from paceline.plan.speculation import Speculation, shape_of, without_speculation
from paceline.plan.suggestion import Asked, Change, Command, Nearest

LEAST_STEP = 256  # tokens; a shorter step makes every prompt slow
MOST_OF_A_GPU = 95  # percent; beyond it the driver and the allocator have no room
MOST_COMMANDS = 4
COMMON_STEPS = 1024
Fits = Callable[[Asked], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One option that gives memory back, with the values it may take instead of the asked one."""

    option: str
    values: Sequence[object]  # the nearest to the ask first, the one that gives most last
    bounds: tuple[str, ...] = ()  # asked options that may not exceed this one, and follow it down
    same: tuple[str, ...] = ()  # asked formats that must be this one's, and follow it

    def turned(self, asked: Asked, notch: int) -> dict[str, object]:
        """`asked` with this option at values[notch]; -1 leaves it as it was."""
        changed = dict(asked)
        if notch >= 0:
            value = changed[self.option] = self.values[notch]
            for name in self.bounds:
                bounded = changed.get(name)
                if isinstance(bounded, int) and isinstance(value, int):
                    changed[name] = min(bounded, value)
            changed |= {name: value for name in self.same if changed.get(name) in DTYPES}
        return changed


def nearest(
    asked: Asked,
    *,
    config: ModelConfig,
    device: DeviceFacts,
    speculation: Speculation | None,
    runs: Callable[[EngineOptions], bool],
) -> Nearest:
    """Search from `asked`, which resolves but is short of memory.

    runs: whether resolved options have an attention backend.
    """
    plan = partial(resolve, config=config, device=device, speculation=speculation)
    resolution, fit = plan(asked)

    def fits(options: Asked) -> bool:
        try:
            found, budget = plan(options)
        except ConfigError:
            return False
        return not budget.short_by_bytes and runs(found.options)

    nodes = shape_of(speculation).num_draft_tokens
    options = knobs(asked, resolution.options, fit, device=device, nodes=nodes)
    for size in range(1, len(options) + 1):
        found = [push(asked, chosen, fits) for chosen in combinations(options, size)]
        commands = [_command(asked, f, resolution.options) for f in found if f is not None]
        if commands:
            return Nearest(
                commands=tuple(commands[:MOST_COMMANDS]),
                short_by_bytes=0,
                weights_over_bytes=0,
                devices=(),
                models=(),
            )
    return _nothing(asked, options, config=config, device=device, speculation=speculation)


def knobs(
    asked: Asked, options: EngineOptions, fit: Fit, *, device: DeviceFacts, nodes: int
) -> tuple[Knob, ...]:
    """What may change, in the order of preference; `options` and `fit` are those of `asked`.

    nodes: rows that a request brings to a step that is no prefill.
    """
    rows, tokens = known(options.max_num_seqs), known(options.max_num_batched_tokens)
    found = [
        Knob(option="max_num_seqs", values=range(rows - 1, 0, -1), bounds=("cuda_graph_max_bs",)),
        Knob(
            option="max_model_len",
            values=range((options.max_model_len or 0) - 1, SHORTEST_LEN - 1, -1)
            if asked.get("max_model_len") is not None
            else (),
            bounds=("cuda_graph_max_tokens",),
        ),
        Knob(option="kv_cache_dtype", values=(FP8,) if options.kv_cache_dtype != FP8 else ()),
        Knob(
            option="kv_cache_bytes",
            values=_cache_sizes(asked.get("kv_cache_bytes"), fit.kv_least_bytes),
        ),
        Knob(
            option="max_num_batched_tokens",
            values=range(tokens - 1, max(rows * nodes, LEAST_STEP) - 1, -1),
            bounds=("chunked_prefill_size", "cuda_graph_max_tokens"),
        ),
        Knob(option="gpu_memory_utilization", values=_shares(options.gpu_memory_utilization)),
        Knob(option="dtype", values=_smaller_formats(options, device), same=("kv_cache_dtype",)),
    ]
    return tuple(knob for knob in found if len(knob.values))


def push(asked: Asked, chosen: Sequence[Knob], fits: Fits) -> dict[str, object] | None:
    """`asked` with all of `chosen` turned as little as fits; None where their ends do not fit.

    First all together, by the same share of their way; then each back as far as it goes, the last
    one first.
    """

    def fits_at(notches: Sequence[int]) -> bool:
        return fits(_turned(asked, chosen, notches))

    def fits_with(notches: list[int], index: int, notch: int) -> bool:
        return fits_at([*notches[:index], notch, *notches[index + 1 :]])

    def together(step: int) -> list[int]:
        return [-(-step * len(knob.values) // COMMON_STEPS) - 1 for knob in chosen]

    if not fits_at(together(COMMON_STEPS)):
        return None
    notches = together(_least(lambda step: fits_at(together(step)), 0, COMMON_STEPS))
    before: list[int] = []
    while notches != before:
        before = list(notches)
        for index in reversed(range(len(chosen))):
            fits_alone = partial(fits_with, notches, index)
            notches[index] = _least(fits_alone, -1, notches[index])
    return _turned(asked, chosen, notches)


def _least(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The number from `low` to `high`, which fits, below which the next one does not."""
    if low == high or fits(low):
        return low
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _turned(asked: Asked, chosen: Sequence[Knob], notches: Sequence[int]) -> dict[str, object]:
    changed = dict(asked)
    for knob, notch in zip(chosen, notches, strict=True):
        changed = knob.turned(changed, notch)
    return changed


def _cache_sizes(asked: object, least: int) -> Sequence[int | None]:
    """Up to the `least` that holds one request; or left out, where more was asked than there is."""
    if not isinstance(asked, int):
        return ()
    return range(asked + 1, least + 1) if asked < least else (None,)


def _shares(share: float | None) -> Sequence[float]:
    if share is None:
        return ()
    return [part / 100 for part in range(int(round(100 * share, 6)) + 1, MOST_OF_A_GPU + 1)]


def _smaller_formats(options: EngineOptions, device: DeviceFacts) -> Sequence[str]:
    if options.dtype != "float32":
        return ()
    return ("float16" if device.device_type == "cuda" and not device.native_bf16 else "bfloat16",)


def _command(asked: Asked, changed: Asked, options: EngineOptions) -> Command:
    """`options` are the resolved ones of `asked`."""
    changes = tuple(
        Change(
            option=option.name,
            flag=spec_of(option).flags[0],
            was=getattr(options, option.name),
            now=changed[option.name],
        )
        for option in fields(EngineOptions)
        if changed.get(option.name) != asked.get(option.name)
    )
    return Command(asked=changed, changes=changes)


def _nothing(
    asked: Asked,
    options: Sequence[Knob],
    *,
    config: ModelConfig,
    device: DeviceFacts,
    speculation: Speculation | None,
) -> Nearest:
    """Why nothing fits, and what would."""
    least = _turned(asked, options, [len(knob.values) - 1 for knob in options])
    _, fit = resolve(least, config=config, device=device, speculation=speculation)
    elsewhere = {name: value for name, value in asked.items() if name != "device"}
    plain = without_speculation(asked)  # a drafter is of one model
    shapes = {name: parse_config(locate(name).config) for name in shape_names()}
    weights = fit.weights_bytes + fit.draft_weights_bytes
    return Nearest(
        commands=(),
        short_by_bytes=fit.short_by_bytes,
        weights_over_bytes=max(0, weights + fit.context_bytes - fit.usable_bytes),
        devices=tuple(n for n, gpu in GPUS.items() if _holds(elsewhere, config, gpu, speculation)),
        models=tuple(n for n, shape in shapes.items() if _holds(plain, shape, device, None)),
    )


def _holds(
    asked: Asked, config: ModelConfig, device: DeviceFacts, speculation: Speculation | None
) -> bool:
    try:
        _, fit = resolve(asked, config=config, device=device, speculation=speculation)
    except ConfigError:
        return False
    return not fit.short_by_bytes
