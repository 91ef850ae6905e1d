"""Fit: where the memory of a device will go, before a weight is read, and how far off that was.

Weights are counted and KV is exact.  The rest are upper bounds by the formulas of `plan.footprint`,
beside which `plan.rehearsal` counts the same on the meta device; after loading,
`budget_table.compare` puts what was measured beside them.
"""

from dataclasses import asdict, dataclass

from paceline.core.errors import ConfigError
from paceline.core.gpus import DeviceFacts, gib
from paceline.core.model_config import ModelConfig
from paceline.core.options import EngineOptions, known
from paceline.plan.balance import balance_of
from paceline.plan.capacity import Concurrency, concurrency, kv_tokens, planned_len, split_kv
from paceline.plan.footprint import GroupBudget, longest_request
from paceline.plan.speculation import Speculation

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
    kv_tokens: int  # of the smallest group that keeps every token (or of the smallest group)
    groups: tuple[GroupBudget, ...]
    planned_len: int  # tokens; the groups' pools are balanced for such requests
    concurrency: tuple[Concurrency, ...]

    def to_json(self) -> dict[str, object]:
        """The document `paceline explain --json` carries under "fit"."""
        document = asdict(self)
        for group, budget in zip(document["groups"], self.groups, strict=True):
            group["tokens"] = budget.tokens
        return document


def plan_memory(
    config: ModelConfig,
    options: EngineOptions,
    device: DeviceFacts,
    speculation: Speculation | None,
) -> Fit:
    """The budget of `config` under resolved `options`; only `max_model_len` may still be None.

    A left-out max_model_len becomes the model's limit, or less where the KV budget holds less.
    """
    step_tokens = known(options.max_num_batched_tokens)
    balance = balance_of(config, options, device, speculation)
    specs = balance.specs
    wanted_len = options.max_model_len or config.max_position
    longest = longest_request(lambda n: balance.least(n) <= balance.budget(n), limit=wanted_len)
    served = wanted_len if options.max_model_len else longest
    floor = max(served, min(wanted_len, SHORTEST_LEN))
    demand, kv = balance.demand(floor), balance.budget(floor)
    room, least = balance.usable - demand.total, balance.least(floor)
    short = max(0, least - kv, (options.kv_cache_bytes or 0) - room)
    groups: tuple[GroupBudget, ...] = ()
    if not short:
        longest_kv = floor + balance.reach
        groups = split_kv(
            specs, kv, balance.kv_element, step_tokens=step_tokens, max_len=longest_kv
        )
    taken = sum(group.bytes for group in groups) if groups else max(kv, 0)
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
