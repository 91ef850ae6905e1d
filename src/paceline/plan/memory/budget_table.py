"""Budget table: a Fit as people read it, and beside it what was measured after loading."""

from collections.abc import Mapping

from paceline.core.errors import ConfigError
from paceline.core.gpus import gib
from paceline.plan.memory.capacity import Concurrency
from paceline.plan.memory.fit import Fit
from paceline.plan.memory.footprint import GroupBudget


def budget_lines(fit: Fit) -> tuple[tuple[str, int], ...]:
    """The budget as (name, bytes), in the order people read it; they add up to what is
    usable, unless it is short."""
    return (
        ("weights", fit.weights_bytes),
        *([("draft weights", fit.draft_weights_bytes)] if fit.draft_weights_bytes else []),
        *((f"KV {group.name}", group.bytes) for group in fit.groups),
        ("graphs", fit.graphs_bytes),
        ("workspace", fit.workspace_bytes),
        ("activations", fit.activations_bytes),
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
    holds = f"KV holds {fit.kv_tokens} tokens{_each(fit)}; " if fit.kv_tokens else ""
    rows.append(f"{holds}longest request {fit.max_model_len} tokens")
    rows += [_states(group) for group in fit.groups if group.slots is not None]
    rows += [_encoded(group) for group in fit.groups if group.encoder_len is not None]
    if len({(g.window, g.state_every, g.encoder_len) for g in fit.groups}) > 1:
        rows.append(_split(fit))
    rows += [
        f"  {row.requests:>6} requests of {row.context_len} tokens{_why(row)}"
        for row in fit.concurrency
    ]
    return "\n".join(rows)


def _each(fit: Fit) -> str:
    """Bytes of a token, where one group holds them."""
    holders = [group for group in fit.groups if group.tokens is not None]
    return f" of {holders[0].page_bytes // holders[0].page_size} bytes" if len(holders) == 1 else ""


def _states(group: GroupBudget) -> str:
    """What a group of states holds, and for whom."""
    return (
        f"{group.slots} states of {group.name}, {gib(group.page_bytes)} each: one for each running "
        f"request; the prefix cache, unless it is off, has the others, of lengths divisible by "
        f"{group.state_every}"
    )


def _encoded(group: GroupBudget) -> str:
    """What a group of encoders' rows holds."""
    rows = (group.num_pages - 1) * group.page_size
    return f"{rows} rows of encoders in {group.name}: {group.encoder_len} of a request at most"


def _split(fit: Fit) -> str:
    """How KV was split, and what follows for requests of other lengths."""
    shares = ", ".join(f"{group.name} {group.bytes / fit.kv_bytes:.0%}" for group in fit.groups)
    return (
        f"pools of KV ({shares}) are balanced for requests of {fit.planned_len} tokens; with "
        "others one is full first, and a --max-model-len below that moves the balance"
    )


def _why(row: Concurrency) -> str:
    if row.full_first is None:
        return ""
    return f" ({row.full_first} is full first; the bytes of all pools hold {row.by_bytes})"


def compare(fit: Fit, measured: Mapping[str, int]) -> str:
    """The budget with what was measured beside it.

    `measured` has bytes by the names of `budget_lines`, and "KV" for all cache groups together;
    raises ConfigError for another name.  What has no measurement shows "-".
    """
    lines = dict(budget_lines(fit))
    first = [name for name in ("weights", "draft weights") if name in lines]
    planned = {name: lines.pop(name) for name in first} | {"KV": fit.kv_bytes}
    planned |= {name: size for name, size in lines.items() if not name.startswith("KV ")}
    unknown = sorted(set(measured) - set(planned))
    if unknown:
        raise ConfigError.about(
            "measured",
            expected=f"names among {sorted(planned)}",
            got=unknown,
            remedy="use these names",
        )
    rows = [f"  {'':<16}{'planned':>12}{'measured':>12}"]
    for name, size in planned.items():
        seen = gib(measured[name]) if name in measured else "-"
        rows.append(f"  {name:<16}{gib(size):>12}{seen:>12}")
    return "\n".join(rows)
