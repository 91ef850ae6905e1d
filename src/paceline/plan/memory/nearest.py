"""Nearest: the command closest to what was asked whose memory fits, when the asked one does not.

One option is lowered alone where that is enough; otherwise all take turns, a notch at a time, until
it fits, and what was not needed is undone.  The order is that of `knobs`: fewer requests at a time,
a shorter context, a smaller KV format, another cache size, a shorter step, more of the GPU, a
smaller number format.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import islice, zip_longest

from paceline.core.dtypes import DTYPES, FP8
from paceline.core.errors import ConfigError
from paceline.core.gpus import GPUS, DeviceFacts
from paceline.core.options.engine_options import EngineOptions, known
from paceline.core.options.spec import spec_of
from paceline.models.config import parse_config
from paceline.models.locate import locate, shape_names
from paceline.models.size import weights_bytes
from paceline.plan.memory.demand import Demands
from paceline.plan.memory.fit import SHORTEST_LEN, Fit
from paceline.plan.memory.suggestion import Asked, Change, Command, Nearest
from paceline.plan.resolution import Resolution
from paceline.plan.resolve import shortage
from paceline.plan.speculation import shape_of, without_speculation

LEAST_STEP = 256  # tokens; a shorter step makes every prompt slow
MOST_OF_A_GPU = 95  # percent; beyond it the driver and the allocator have no room
MOST_COMMANDS = 4
# Asked, and left to the engine where another value rules them out.
YIELDING = ("latent_expand_from", "latent_expand_backend")
Fits = Callable[[Asked], bool | None]  # None: it cannot run, however much memory there is


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One option that gives memory back, with the values it may take instead of the asked one."""

    option: str
    values: Sequence[object]  # the nearest to the ask first, the one that gives most last
    bounds: tuple[str, ...] = ()  # asked options that may not exceed this one, and follow it down
    same: tuple[str, ...] = ()  # asked formats that must be this one's, and follow it

    def turned(self, asked: Asked, notch: int) -> dict[str, object]:
        """`asked` with this option at values[notch]."""
        changed = dict(asked)
        value = changed[self.option] = self.values[notch]
        for name in self.bounds:
            bounded = changed.get(name)
            if isinstance(bounded, int) and isinstance(value, int):
                changed[name] = min(bounded, value)
        return changed | {name: value for name in self.same if changed.get(name) in DTYPES}


def nearest(
    asked: Asked,
    resolution: Resolution,
    fit: Fit,
    demands: Demands,
    *,
    runs: Callable[[EngineOptions], bool],
) -> Nearest:
    """Search from `asked`, which resolves to `resolution`, and whose budget `fit` is short.

    demands: of its model, drafter and device.  runs: whether resolved options have an attention
    backend.
    """

    def fits(options: Asked) -> bool | None:
        return _fits(options, demands, runs)

    nodes = shape_of(demands.speculation).num_draft_tokens
    options = knobs(asked, resolution.options, fit, device=demands.device, nodes=nodes)
    alone = (lowered(asked, [knob], fits) for knob in options)
    found = list(islice((each for each in alone if each is not None), MOST_COMMANDS))
    if not found:
        able = [knob for knob in options if fits(turned(asked, [(knob, -1)], fits)) is not None]
        together = lowered(asked, able, fits)
        found = [] if together is None else [together]
    if found:
        return Nearest(
            commands=tuple(_command(asked, each, resolution.options) for each in found),
            short_by_bytes=0,
            weights_over_bytes=0,
            devices=(),
            models=(),
        )
    return _nothing(asked, options, demands)


def knobs(
    asked: Asked, options: EngineOptions, fit: Fit, *, device: DeviceFacts, nodes: int
) -> tuple[Knob, ...]:
    """What may change, in the order of preference; `options` and `fit` are those of `asked`.

    nodes: rows that a request brings to a step that is no prefill.
    """
    rows, tokens = known(options.max_num_seqs), known(options.max_num_batched_tokens)
    found = [
        Knob(option="max_num_seqs", values=_halves(rows, 1), bounds=("cuda_graph_max_bs",)),
        Knob(
            option="max_model_len",
            values=_lengths(known(options.max_model_len), fit.longest_len)
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
            values=_halves(tokens, max(rows * nodes, LEAST_STEP)),
            bounds=("chunked_prefill_size", "cuda_graph_max_tokens", "latent_expand_from"),
        ),
        Knob(option="gpu_memory_utilization", values=_shares(options.gpu_memory_utilization)),
        Knob(option="dtype", values=_smaller_formats(options, device), same=("kv_cache_dtype",)),
    ]
    return tuple(knob for knob in found if len(knob.values))


def lowered(asked: Asked, options: Sequence[Knob], fits: Fits) -> dict[str, object] | None:
    """`asked` with `options` turned by turns, as little as fits; None where their ends do not."""
    turns = [
        turn
        for notches in zip_longest(*(range(len(knob.values)) for knob in options))
        for turn in zip(options, notches, strict=True)
        if turn[1] is not None
    ]

    def after(taken: Sequence[tuple[Knob, int]]) -> dict[str, object]:
        return turned(asked, taken, fits)

    if not turns or not fits(after(turns)):
        return None
    first = bisect_left(range(1, len(turns)), True, key=lambda num: bool(fits(after(turns[:num]))))
    taken, before = turns[: first + 1], turns[:0]
    while len(options) > 1 and taken != before:  # a larger cache, once undone, frees others
        before = taken
        for knob in options:
            rest = [turn for turn in taken if turn[0] is not knob]
            taken = rest if rest != taken and fits(after(rest)) else taken
    return after(taken)


def turned(asked: Asked, taken: Sequence[tuple[Knob, int]], fits: Fits) -> dict[str, object]:
    """`asked` with each option at its notch, and what that rules out left to the engine."""
    changed = dict(asked)
    for knob, notch in taken:
        changed = knob.turned(changed, notch)
    yielding = {name: None for name in YIELDING if changed.get(name) is not None}
    return changed | yielding if yielding and fits(changed) is None else changed


def _fits(
    asked: Asked, demands: Demands, runs: Callable[[EngineOptions], bool] = lambda _: True
) -> bool | None:
    try:
        balance, short = shortage(asked, demands)
    except ConfigError:
        return None
    return not short if runs(balance.options) else None


def _halves(value: int, least: int) -> Sequence[int]:
    """Half of `value`, half of that, ... and `least`, without `value` itself."""
    halves = [value >> bit for bit in range(1, value.bit_length()) if value >> bit > least]
    return (*halves, least) if least < value else ()


def _lengths(asked: int, longest: int) -> Sequence[int]:
    """The longest that fits, where any does, and halves of what was asked."""
    if longest >= SHORTEST_LEN:
        return (longest, *_halves(longest, SHORTEST_LEN))
    return _halves(asked, SHORTEST_LEN)


def _cache_sizes(asked: object, least: int) -> Sequence[int | None]:
    """Up to the `least` that holds one request; or left out, where more was asked than there is."""
    if not isinstance(asked, int):
        return ()
    return (least,) if asked < least else (None,)


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


def _nothing(asked: Asked, options: Sequence[Knob], demands: Demands) -> Nearest:
    """Why nothing fits, and what would."""
    config, device, speculation = demands.config, demands.device, demands.speculation

    def fits(options: Asked) -> bool | None:
        return _fits(options, demands)

    ends = [(knob, -1) for knob in options if fits(turned(asked, [(knob, -1)], fits)) is not None]
    balance, short = shortage(turned(asked, ends, fits), demands)
    needs = balance.demand(known(balance.options.max_model_len))
    elsewhere = {name: value for name, value in asked.items() if name != "device"}
    plain = without_speculation(asked)  # a drafter is of one model
    shapes = {name: parse_config(locate(name).config) for name in shape_names()}
    weights = needs.weights + needs.draft_weights
    return Nearest(
        commands=(),
        short_by_bytes=short,
        weights_over_bytes=max(0, weights + needs.context - balance.usable),
        devices=tuple(
            name
            for name, gpu in GPUS.items()
            if weights < gpu.total_bytes
            and _fits(elsewhere, Demands(config, gpu, speculation, packings=demands.packings))
        ),
        models=tuple(
            name
            for name, shape in shapes.items()
            if weights_bytes(shape, "bfloat16") < balance.usable
            and _fits(plain, Demands(shape, device, None))
        ),
    )
