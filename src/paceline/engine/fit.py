"""Fit: where the memory of a device will go, before a weight is read, and how far off that was.

Weights and KV are exact from the config.  The rest are upper bounds by the formulas of
`engine.footprint`; after loading, `budget_table.compare` puts what was measured beside them.
"""

from dataclasses import asdict, dataclass, replace

from paceline.attention.contract import AttentionBackend, Limits
from paceline.core.errors import ConfigError, message
from paceline.core.gpus import DeviceFacts, gib
from paceline.core.model_config import CacheGroupSpec, ModelConfig, cache_group_specs
from paceline.core.options import ELEMENT_BYTES, KV_ELEMENT_BYTES, EngineOptions, known
from paceline.engine.attention_choice import planned_backend, planned_limits
from paceline.engine.footprint import (
    GroupBudget,
    StepLimits,
    graph_bytes,
    longest_request,
    request_bytes,
    request_pages,
    split_kv,
    standing_bytes,
    standing_pages,
    step_bytes,
    workspace_bytes,
)
from paceline.models.size import weights_bytes
from paceline.runner.graphs import RESERVE_FACTOR
from paceline.runner.staging import STEPS_IN_FLIGHT

CUDA_CONTEXT_BYTES = 640 << 20  # allowance: CUDA context, cuBLAS handles and workspaces
SHORTEST_LEN = 256  # tokens; a device that cannot hold one such request cannot serve


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
    workspace_bytes: int  # tables and buffers that stay
    activations_bytes: int  # what the largest step takes and gives back
    kv_bytes: int
    kv_room_bytes: int  # what is left for KV once everything else is placed, below 0 when short
    kv_least_bytes: int  # for one request of max_model_len
    kv_limit_bytes: int | None  # what the options allow KV; None: all the room
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Demand:
    """Bytes of everything but KV."""

    context: int
    weights: int
    graphs: int
    workspace: int
    activations: int

    @property
    def total(self) -> int:
        return self.context + self.weights + self.graphs + self.workspace + self.activations


@dataclass(frozen=True, slots=True, kw_only=True)
class _Balance:
    """What KV needs and what is left for it, by the length of the longest request."""

    config: ModelConfig
    options: EngineOptions
    device: DeviceFacts
    specs: tuple[CacheGroupSpec, ...]
    backend: type[AttentionBackend] | None  # None: none can run, and nothing is allocated
    attention: Limits  # for the backend, at a length of one token

    def backend_bytes(self, length: int) -> int:
        """What the attention backend holds.  length: tokens in flight included."""
        if self.backend is None:
            return 0
        widths = tuple(-(-length // spec.page_size) for spec in self.specs)
        return self.backend.buffer_bytes(replace(self.attention, max_pages=widths))

    @property
    def kv_element(self) -> int:
        return KV_ELEMENT_BYTES[known(self.options.kv_cache_dtype)]

    @property
    def usable(self) -> int:
        share = self.options.gpu_memory_utilization or 1.0
        return min(int(self.device.total_bytes * share), self.device.free_bytes)

    def demand(self, length: int) -> _Demand:
        """Bytes of everything else."""
        config, options, here = self.config, self.options, self.device.device_type
        dtype = known(options.dtype)
        element = ELEMENT_BYTES[dtype]
        limits = StepLimits(
            rows=self.attention.max_reqs,
            tokens=self.attention.max_tokens,
            length=length + STEPS_IN_FLIGHT,
            plug_ins=bool(options.logits_processors),
        )
        graphs = 0
        if not options.enforce_eager:
            rows = known(options.cuda_graph_max_bs)
            graphs = graph_demand(config, options, here, rows=rows, length=length)
        return _Demand(
            context=CUDA_CONTEXT_BYTES if here == "cuda" else 0,
            weights=weights_bytes(config, dtype),
            graphs=graphs,
            workspace=workspace_bytes(config, self.specs, limits)
            + self.backend_bytes(limits.length),
            activations=step_bytes(config, element, limits),
        )

    def least(self, length: int) -> int:
        """KV bytes of one such request, and of what stands."""
        standing = standing_bytes(
            self.specs, self.kv_element, known(self.options.max_num_batched_tokens)
        )
        return standing + request_bytes(self.specs, length, self.kv_element)

    def budget(self, length: int) -> int:
        """Bytes KV may take; below 0 when the rest is too large already."""
        room = self.usable - self.demand(length).total
        limit = self.options.kv_cache_bytes
        return room if limit is None else min(room, limit)


def plan_memory(config: ModelConfig, options: EngineOptions, device: DeviceFacts) -> Fit:
    """The budget of `config` under resolved `options`; only `max_model_len` may still be None.

    A left-out max_model_len becomes the model's limit, or less where the KV budget holds less.
    """
    step_tokens = known(options.max_num_batched_tokens)
    specs = cache_group_specs(config, known(options.page_size))
    backend = planned_backend(config, options, device)
    balance = _Balance(
        config=config,
        options=options,
        device=device,
        specs=specs,
        backend=backend,
        attention=planned_limits(config, options, specs),
    )
    wanted_len = options.max_model_len or config.max_position
    longest = longest_request(lambda n: balance.least(n) <= balance.budget(n), limit=wanted_len)
    served = wanted_len if options.max_model_len else longest
    floor = max(served, min(wanted_len, SHORTEST_LEN))
    demand, kv = balance.demand(floor), balance.budget(floor)
    room, least = balance.usable - demand.total, balance.least(floor)
    short = max(0, least - kv, (options.kv_cache_bytes or 0) - room)
    groups: tuple[GroupBudget, ...] = ()
    if not short:
        groups = split_kv(specs, kv, balance.kv_element, step_tokens=step_tokens, max_len=floor)
    taken = sum(group.bytes for group in groups) if groups else max(kv, 0)
    return Fit(
        device=device.name,
        total_bytes=device.total_bytes,
        usable_bytes=balance.usable,
        context_bytes=demand.context,
        weights_bytes=demand.weights,
        graphs_bytes=demand.graphs,
        workspace_bytes=demand.workspace,
        activations_bytes=demand.activations,
        kv_bytes=taken,
        kv_room_bytes=room,
        kv_least_bytes=least,
        kv_limit_bytes=options.kv_cache_bytes,
        slack_bytes=max(0, device.total_bytes - demand.total - taken),
        short_by_bytes=short,
        max_model_len=floor,
        longest_len=longest,
        kv_tokens=_kv_tokens(groups),
        groups=groups,
        concurrency=_concurrency(
            specs,
            groups,
            floor,
            step_tokens=step_tokens,
            max_num_seqs=known(options.max_num_seqs),
        ),
    )


def graph_demand(
    config: ModelConfig, options: EngineOptions, device_type: str, *, rows: int, length: int
) -> int:
    """What graphs of up to `rows` requests of `length` tokens may hold."""
    return graph_bytes(
        config,
        ELEMENT_BYTES[known(options.dtype)],
        rows=rows,
        tokens=options.cuda_graph_max_tokens or 0,
        length=length + STEPS_IN_FLIGHT,
        device_type=device_type,
        reserve=RESERVE_FACTOR[device_type],
    )


def require_fit(fit: Fit, advice: str | None = None) -> None:
    """Raise ConfigError, saying by how much, when the model cannot be served on the device.

    advice: a remedy that is known to help; None names the options that may.
    """
    if not fit.short_by_bytes:
        return
    limit = fit.kv_limit_bytes
    if limit is not None and limit < fit.kv_least_bytes <= fit.kv_room_bytes:
        raise ConfigError(
            message(
                f"memory for the KV cache on {fit.device}",
                expected=f"at least {fit.kv_least_bytes} bytes",
                got=f"{limit} bytes (short by {fit.short_by_bytes}; a request of "
                f"{fit.max_model_len} tokens was wanted, the longest that fits has "
                f"{fit.longest_len})",
                remedy=advice
                or f"raise --kv-cache-memory-bytes to {fit.kv_least_bytes}, or lower "
                "--max-model-len",
            )
        )
    others = fit.usable_bytes - fit.kv_room_bytes
    lower = "" if limit is None else "--kv-cache-memory-bytes, "
    raise ConfigError(
        message(
            f"memory for the model on {fit.device}",
            expected=f"at least {fit.usable_bytes + fit.short_by_bytes} bytes",
            got=f"{fit.usable_bytes} bytes usable of {gib(fit.total_bytes)} "
            f"(short by {gib(fit.short_by_bytes)}; weights {gib(fit.weights_bytes)}, "
            f"all but KV {gib(others)}; a request of {fit.max_model_len} tokens was wanted, "
            f"the longest that fits has {fit.longest_len})",
            remedy=advice
            or f"lower {lower}--max-model-len, --max-num-seqs or --max-num-batched-tokens, "
            "raise --gpu-memory-utilization, or choose a smaller model or dtype",
        )
    )


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
