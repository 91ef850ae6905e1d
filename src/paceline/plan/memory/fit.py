"""Fit: where the memory of a device will go, before a weight is read, and how far off that was.

KV is exact, and all else is counted in a rehearsal (`plan.memory.rehearsal`), but for what
`plan.memory.demand` allows; after loading, `budget_table.compare` puts what was measured beside it.
"""

from dataclasses import asdict, dataclass, replace

from paceline.core.dtypes import KV_ELEMENT_BYTES
from paceline.core.errors import ConfigError
from paceline.core.gpus import gib
from paceline.core.model.cache_groups import CacheGroupSpec
from paceline.core.model.config import ModelConfig
from paceline.core.options.engine_options import EngineOptions, known
from paceline.plan.memory.capacity import Concurrency, concurrency, kv_tokens, planned_len, split_kv
from paceline.plan.memory.demand import Demand, Demands
from paceline.plan.memory.footprint import (
    GroupBudget,
    longest_request,
    request_bytes,
    standing_bytes,
)
from paceline.plan.speculation import all_groups, shape_of

SHORTEST_LEN = 256  # tokens; a device that cannot hold one such request cannot serve


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The budget of one model on one device.  Every number is bytes unless its name says else."""

    device: str
    total_bytes: int
    usable_bytes: int  # what the options allow the engine to take
    context_bytes: int
    weights_bytes: int
    draft_weights_bytes: int  # of a drafter; 0 without
    graphs_bytes: int
    workspace_bytes: int  # tables and buffers that stay
    activations_bytes: int  # what the largest step takes and gives back
    kv_bytes: int
    kv_room_bytes: int  # what is left for KV once everything else is placed, below 0 when short
    kv_least_bytes: int  # for one request of max_model_len
    kv_limit_bytes: int | None  # what the options allow KV; None: all the room
    slack_bytes: int  # usable - all of the above
    short_by_bytes: int  # 0 when it fits
    max_model_len: int  # tokens; the longest request that will be served
    longest_len: int  # tokens; the longest request that would fit alone, 0 when none does
    kv_tokens: int  # of the smallest group that keeps every token (or of the smallest group that
    # holds tokens; 0: none does)
    groups: tuple[GroupBudget, ...]
    planned_len: int  # tokens; the groups' pools are balanced for such requests
    concurrency: tuple[Concurrency, ...]

    def to_json(self) -> dict[str, object]:
        """The document `paceline explain --json` carries under "fit"."""
        document = asdict(self)
        for group, budget in zip(document["groups"], self.groups, strict=True):
            group |= {"tokens": budget.tokens, "slots": budget.slots}
        return document


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """What KV needs and what is left for it, by the length of the longest request."""

    options: EngineOptions
    specs: tuple[CacheGroupSpec, ...]  # the target's, then the drafter's
    reach: int  # tokens that a round may write behind a request's length
    demands: Demands

    @property
    def kv_element(self) -> int:
        return KV_ELEMENT_BYTES[known(self.options.kv_cache_dtype)]

    @property
    def usable(self) -> int:
        share, device = self.options.gpu_memory_utilization or 1.0, self.demands.device
        return min(int(device.total_bytes * share), device.free_bytes)

    def demand(self, length: int) -> Demand:
        """Bytes of everything else."""
        found = self.demands.of(self.options, length)
        return replace(found, graphs=0) if self.options.enforce_eager else found

    def room(self, length: int) -> int:
        """Bytes that everything else leaves; below 0 when it is too large already."""
        return self.usable - self.demand(length).total

    def least(self, length: int, requests: int = 1) -> int:
        """KV bytes of so many such requests, and of what stands."""
        standing = standing_bytes(
            self.specs, self.kv_element, known(self.options.max_num_batched_tokens)
        )
        each = request_bytes(self.specs, length + self.reach, self.kv_element)
        return standing + requests * each

    def spare(self, length: int) -> int:
        """Bytes left beside one such request and the asked cache; below 0 where they do not fit."""
        left, asked = self.budget(length) - self.least(length), self.options.kv_cache_bytes
        return left if asked is None else min(left, self.room(length) - asked)

    def short_by(self, length: int) -> int:
        """Bytes that one such request, or the asked cache, lacks; 0 where both fit."""
        return max(0, -self.spare(length))

    def longest(self, limit: int) -> int:
        """The longest request, up to `limit` tokens, that fits; 0 when none does."""
        pages = {"page_size": known(self.options.page_size), "reach": self.reach}
        most = self.options.kv_cache_bytes
        if most is not None:  # it decides alone in most cases, and costs nothing to ask
            limit = longest_request(lambda n: most - self.least(n), limit=limit, **pages)
        return longest_request(self.spare, limit=limit, **pages) if limit else 0

    def budget(self, length: int) -> int:
        """Bytes KV may take: the room, or as much of it as was asked for."""
        room, limit = self.room(length), self.options.kv_cache_bytes
        return room if limit is None else min(room, limit)


def balance_of(options: EngineOptions, demands: Demands) -> Balance:
    speculation = demands.speculation
    return Balance(
        options=options,
        specs=all_groups(demands.rank_config, options, speculation),
        reach=shape_of(speculation).reach,
        demands=demands,
    )


def plan_memory(config: ModelConfig, options: EngineOptions, demands: Demands) -> Fit:
    """The budget of resolved `options`, of which only `max_model_len` may still be None.

    A left-out max_model_len becomes the model's limit, or less where the KV budget holds less.
    config: the model at the context that is taken.
    """
    step_tokens = known(options.max_num_batched_tokens)
    balance, device = balance_of(options, demands), demands.device
    specs = balance.specs
    wanted_len = options.max_model_len or config.max_position
    longest = balance.longest(wanted_len)
    served = wanted_len if options.max_model_len else longest
    floor = max(served, min(wanted_len, SHORTEST_LEN))
    demand, kv = balance.demand(floor), balance.budget(floor)
    room, least = balance.room(floor), balance.least(floor)
    short = balance.short_by(floor)
    groups: tuple[GroupBudget, ...] = ()
    if not short:
        longest_kv = floor + balance.reach
        groups = split_kv(
            specs, kv, balance.kv_element, step_tokens=step_tokens, max_len=longest_kv
        )
    is_split = groups or not specs  # a model that caches nothing takes nothing
    taken = sum(group.bytes for group in groups) if is_split else max(kv, 0)
    return Fit(
        device=device.name,
        total_bytes=device.total_bytes,
        usable_bytes=balance.usable,
        context_bytes=demand.context,
        weights_bytes=demand.weights,
        draft_weights_bytes=demand.draft_weights,
        graphs_bytes=demand.graphs,
        workspace_bytes=demand.workspace,
        activations_bytes=demand.activations,
        kv_bytes=taken,
        kv_room_bytes=room,
        kv_least_bytes=least,
        kv_limit_bytes=options.kv_cache_bytes,
        slack_bytes=max(0, room - taken),
        short_by_bytes=short,
        max_model_len=floor,
        longest_len=longest,
        kv_tokens=kv_tokens(groups),
        groups=groups,
        planned_len=planned_len(floor + balance.reach),
        concurrency=concurrency(
            specs,
            groups,
            floor,
            reach=balance.reach,
            step_tokens=step_tokens,
            max_num_seqs=known(options.max_num_seqs),
        ),
    )


def require_fit(fit: Fit, advice: str | None = None) -> None:
    """Raise ConfigError, saying by how much, when the model cannot be served on the device.

    advice: a remedy that is known to help; None names the options that may.
    """
    if not fit.short_by_bytes:
        return
    limit = fit.kv_limit_bytes
    if limit is not None and limit < fit.kv_least_bytes <= fit.kv_room_bytes:
        raise ConfigError.about(
            f"memory for the KV cache on {fit.device}",
            expected=f"at least {fit.kv_least_bytes} bytes",
            got=f"{limit} bytes (short by {fit.short_by_bytes}; a request of "
            f"{fit.max_model_len} tokens was wanted, the longest that fits has "
            f"{fit.longest_len})",
            remedy=advice
            or f"raise --kv-cache-memory-bytes to {fit.kv_least_bytes}, or lower --max-model-len",
        )
    others = fit.usable_bytes - fit.kv_room_bytes
    lower = "" if limit is None else "--kv-cache-memory-bytes, "
    raise ConfigError.about(
        f"memory for the model on {fit.device}",
        expected=f"at least {fit.usable_bytes + fit.short_by_bytes} bytes",
        got=f"{fit.usable_bytes} bytes usable of {gib(fit.total_bytes)} "
        f"(short by {gib(fit.short_by_bytes)}; weights "
        f"{gib(fit.weights_bytes + fit.draft_weights_bytes)}, "
        f"all but KV {gib(others)}; a request of {fit.max_model_len} tokens was wanted, "
        f"the longest that fits has {fit.longest_len})",
        remedy=advice
        or f"lower {lower}--max-model-len, --max-num-seqs or --max-num-batched-tokens, "
        "raise --gpu-memory-utilization, or choose a smaller model or dtype",
    )
