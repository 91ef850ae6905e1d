"""Fit: where the memory of a device will go, before a weight is read, and how far off that was.

Weights and KV are exact from the config.  Graphs and workspace are upper estimates by the formulas
below; after loading, `compare` prints what was measured beside them.  No torch.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TypeVar

from paceline.core.errors import ConfigError, message
from paceline.core.gpus import GIB, DeviceFacts
from paceline.core.model_config import CacheGroupSpec, ModelConfig, cache_group_specs
from paceline.core.options import EngineOptions
from paceline.engine.footprint import (
    GroupBudget,
    graph_bytes,
    longest_request,
    request_bytes,
    request_pages,
    split_kv,
    standing_bytes,
    standing_pages,
    workspace_bytes,
)
from paceline.models.size import ELEMENT_BYTES, weights_bytes

CUDA_CONTEXT_BYTES = 640 << 20  # allowance: CUDA context, cuBLAS handles and workspaces
SHORTEST_LEN = 256  # tokens; a device that cannot hold one such request cannot serve
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Concurrency:
    """How many requests of one context length run at the same time."""

    context_len: int
    requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The budget of one model on one device.  Every number is bytes unless its name says else."""

    device: str
    total_bytes: int
    usable_bytes: int  # what the options allow the engine to take
    context_bytes: int
    weights_bytes: int
    graphs_bytes: int
    workspace_bytes: int
    kv_bytes: int
    slack_bytes: int  # total - all of the above; left to others
    short_by_bytes: int  # 0 when it fits
    max_model_len: int  # tokens; the longest request that will be served
    longest_len: int  # tokens; the longest request that would fit alone, 0 when none does
    kv_tokens: int  # of the smallest group that keeps every token (or of the smallest group)
    groups: tuple[GroupBudget, ...]
    concurrency: tuple[Concurrency, ...]

    def to_json(self) -> dict[str, object]:
        """The document `paceline explain --json` carries under "fit"."""
        document = asdict(self)
        for group, budget in zip(document["groups"], self.groups, strict=True):
            group["tokens"] = budget.tokens
        return document


def plan_memory(config: ModelConfig, options: EngineOptions, device: DeviceFacts) -> Fit:
    """The budget of `config` under resolved `options`; only `max_model_len` may still be None.

    A left-out max_model_len becomes the model's limit, or less where the KV budget holds less.
    """
    dtype = _known(options.dtype)
    seqs, step_tokens = _known(options.max_num_seqs), _known(options.max_num_batched_tokens)
    specs = cache_group_specs(config, _known(options.page_size))
    element = ELEMENT_BYTES[dtype]
    wanted_len = options.max_model_len or config.max_position

    context = CUDA_CONTEXT_BYTES if device.device_type == "cuda" else 0
    weights = weights_bytes(config, dtype)
    graphs = 0
    if not options.enforce_eager:
        graphs = graph_bytes(config, _known(options.cuda_graph_max_bs), element)
    workspace = workspace_bytes(
        config,
        element,
        tokens=step_tokens,
        rows=seqs,
        max_model_len=wanted_len,
    )
    share = options.gpu_memory_utilization or 1.0
    usable = min(int(device.total_bytes * share), device.free_bytes)
    room = usable - context - weights - graphs - workspace
    kv = min(room, options.kv_cache_bytes) if options.kv_cache_bytes is not None else room

    standing = standing_bytes(specs, element, step_tokens)
    longest = longest_request(specs, kv - standing, element, limit=wanted_len)
    served = wanted_len if options.max_model_len else longest
    floor = max(served, min(wanted_len, SHORTEST_LEN))
    least = standing + request_bytes(specs, floor, element)
    short = max(0, least - kv, (options.kv_cache_bytes or 0) - room)
    groups: tuple[GroupBudget, ...] = ()
    if not short:
        groups = split_kv(specs, kv, element, step_tokens=step_tokens, max_len=floor)
    taken = sum(group.bytes for group in groups) if groups else max(kv, 0)
    rest = device.total_bytes - context - weights - graphs - workspace - taken
    return Fit(
        device=device.name,
        total_bytes=device.total_bytes,
        usable_bytes=usable,
        context_bytes=context,
        weights_bytes=weights,
        graphs_bytes=graphs,
        workspace_bytes=workspace,
        kv_bytes=taken,
        slack_bytes=max(0, rest),
        short_by_bytes=short,
        max_model_len=floor,
        longest_len=longest,
        kv_tokens=_kv_tokens(groups),
        groups=groups,
        concurrency=_concurrency(specs, groups, floor, step_tokens=step_tokens, max_num_seqs=seqs),
    )


def require_fit(fit: Fit) -> None:
    """Raise ConfigError, saying by how much, when the model cannot be served on the device."""
    if not fit.short_by_bytes:
        return
    fixed = fit.context_bytes + fit.weights_bytes + fit.graphs_bytes + fit.workspace_bytes
    raise ConfigError(
        message(
            f"memory for the model on {fit.device}",
            expected=f"at least {gib(fit.usable_bytes + fit.short_by_bytes)}",
            got=f"{gib(fit.usable_bytes)} usable of {gib(fit.total_bytes)} "
            f"(short by {gib(fit.short_by_bytes)}; weights {gib(fit.weights_bytes)}, "
            f"all but KV {gib(fixed)}; a request of {fit.max_model_len} tokens was wanted, "
            f"the longest that fits has {fit.longest_len})",
            remedy="lower --max-model-len, --max-num-seqs or --max-num-batched-tokens, "
            "raise --gpu-memory-utilization, or choose a smaller model or dtype",
        )
    )


def budget_lines(fit: Fit) -> tuple[tuple[str, int], ...]:
    """The budget as (name, bytes), in the order people read it."""
    return (
        ("weights", fit.weights_bytes),
        *((f"KV {group.name}", group.bytes) for group in fit.groups),
        ("graphs", fit.graphs_bytes),
        ("workspace", fit.workspace_bytes),
        ("device context", fit.context_bytes),
        ("slack", fit.slack_bytes),
    )


def table(fit: Fit) -> str:
    """The budget for people."""
    rows = [f"memory of {fit.device}: {gib(fit.total_bytes)}, usable {gib(fit.usable_bytes)}"]
    rows += [f"  {name:<16}{gib(size):>12}" for name, size in budget_lines(fit)]
    if fit.short_by_bytes:
        rows.append(f"  does not fit: short by {gib(fit.short_by_bytes)}")
        return "\n".join(rows)
    rows.append(f"KV holds {fit.kv_tokens} tokens; longest request {fit.max_model_len} tokens")
    rows += [f"  {row.requests:>6} requests of {row.context_len} tokens" for row in fit.concurrency]
    return "\n".join(rows)


def compare(fit: Fit, measured: Mapping[str, int]) -> str:
    """The budget with what was measured beside it.

    `measured` has bytes by the names of `budget_lines`; raises ConfigError for a name it lacks.
    """
    planned = dict(budget_lines(fit))
    unknown = sorted(set(measured) - set(planned))
    if unknown:
        raise ConfigError(
            message(
                "measured",
                expected=f"names among {sorted(planned)}",
                got=unknown,
                remedy="use the names of budget_lines()",
            )
        )
    rows = [f"  {'':<16}{'planned':>12}{'measured':>12}"]
    for name, size in planned.items():
        seen = gib(measured[name]) if name in measured else "-"
        rows.append(f"  {name:<16}{gib(size):>12}{seen:>12}")
    return "\n".join(rows)


def gib(size: int) -> str:
    """Bytes for people: GiB, or MiB below a tenth of one."""
    return f"{size / GIB:.2f} GiB" if abs(size) >= GIB // 10 else f"{size / (1 << 20):.1f} MiB"


def _kv_tokens(groups: tuple[GroupBudget, ...]) -> int:
    keepers = [group.tokens for group in groups if group.window is None]
    return min(keepers or [group.tokens for group in groups], default=0)


def _concurrency(
    specs: tuple[CacheGroupSpec, ...],
    groups: tuple[GroupBudget, ...],
    max_model_len: int,
    *,
    step_tokens: int,
    max_num_seqs: int,
) -> tuple[Concurrency, ...]:
    if not groups:
        return ()
    lengths = [n for n in (1024, 4096, 16384, 65536) if n < max_model_len] + [max_model_len]
    rows = []
    for length in lengths:
        held = [
            (group.num_pages - standing_pages(spec, step_tokens)) // request_pages(spec, length)
            for spec, group in zip(specs, groups, strict=True)
        ]
        rows.append(Concurrency(context_len=length, requests=min(*held, max_num_seqs)))
    return tuple(rows)


def _known(value: T | None) -> T:
    assert value is not None, "plan_memory takes resolved options"
    return value
