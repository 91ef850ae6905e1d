"""Capacity: how the KV budget is split between the pools of cache groups, and what they hold."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.model.cache_groups import CacheGroupSpec
from paceline.core.model.lookback import most_visible
from paceline.plan.memory.footprint import GroupBudget, request_pages, standing_pages

PLANNING_LEN = 8192  # tokens; pools are balanced for requests of at most this length


@dataclass(frozen=True, slots=True, kw_only=True)
class Concurrency:
    """How many requests of one context length run at the same time."""

    context_len: int
    requests: int
    by_bytes: int  # what the bytes of all pools would hold, were they split for this length
    full_first: str | None  # the pool that ends it below that; None where none does


def planned_len(max_len: int) -> int:
    """Tokens of the requests for which the pools are balanced.  max_len: of the longest."""
    return min(max_len, PLANNING_LEN)


def split_kv(
    specs: Sequence[CacheGroupSpec],
    kv_bytes: int,
    element: int,
    *,
    step_tokens: int,
    max_len: int,
) -> tuple[GroupBudget, ...]:
    """Divide the KV budget: standing pages in every group; then as many requests of the planned
    length in each, so that groups fill up together, but in none less than one longest request.

    kv_bytes: at least what stands and one longest request take.
    """
    standing = [standing_pages(spec, step_tokens) for spec in specs]
    longest = [request_pages(spec, max_len) for spec in specs]
    shares = [request_pages(spec, planned_len(max_len)) for spec in specs]
    sizes = [spec.page_bytes(element) for spec in specs]
    room = kv_bytes - sum(map(_product, standing, sizes))
    pages = _shared_pages(room, longest, shares, sizes)
    return tuple(
        GroupBudget(
            name=spec.name,
            window=most_visible(spec.window),
            num_layers=len(spec.layer_ids),
            page_size=spec.page_size,
            page_bytes=size,
            num_pages=base + count,
            bytes=(base + count) * size,
            state_every=spec.state_every,
            encoder_len=spec.encoder_len,
        )
        for spec, size, base, count in zip(specs, sizes, standing, pages, strict=True)
    )


def kv_tokens(groups: Sequence[GroupBudget]) -> int:
    """Tokens of the smallest group that keeps every token, or of the smallest that holds any; 0:
    none does, or nothing fits."""
    held = [(group.window, group.tokens) for group in groups if group.tokens is not None]
    keepers = [tokens for window, tokens in held if window is None]
    return min(keepers or [tokens for _, tokens in held], default=0)


def concurrency(
    specs: tuple[CacheGroupSpec, ...],
    groups: tuple[GroupBudget, ...],
    max_model_len: int,
    *,
    reach: int,
    step_tokens: int,
    max_num_seqs: int,
) -> tuple[Concurrency, ...]:
    """Requests of several lengths, up to the longest.  reach: tokens a round may write behind."""
    if not groups:
        return ()
    lengths = [n for n in (1024, 4096, 16384, 65536) if n < max_model_len] + [max_model_len]
    standing = [standing_pages(spec, step_tokens) for spec in specs]
    room = [group.num_pages - base for group, base in zip(groups, standing, strict=True)]
    sizes = [group.page_bytes for group in groups]
    rows = []
    for length in lengths:
        needed = [request_pages(spec, length + reach) for spec in specs]
        held = [pages // need for pages, need in zip(room, needed, strict=True)]
        by_bytes = sum(map(_product, room, sizes)) // sum(map(_product, needed, sizes))
        first = held.index(min(held))
        is_short = held[first] < min(by_bytes, max_num_seqs)
        rows.append(
            Concurrency(
                context_len=length,
                requests=min(held[first], max_num_seqs),
                by_bytes=by_bytes,
                full_first=groups[first].name if is_short else None,
            )
        )
    return tuple(rows)


def _shared_pages(
    room: int, longest: Sequence[int], shares: Sequence[int], sizes: Sequence[int]
) -> list[int]:
    """[num_groups] pages of each: in the proportion of `shares`, but at least `longest`.

    room: bytes for all.  A group that needs more than its share takes it from the others, which may
    need more than theirs then.
    """
    pages = list(longest)
    others = set(range(len(sizes)))
    while others:
        left = room - sum(longest[i] * sizes[i] for i in range(len(sizes)) if i not in others)
        per_request = sum(shares[i] * sizes[i] for i in others)
        shared = {i: left * shares[i] // per_request for i in others}
        short = {i for i in others if shared[i] < longest[i]}
        if not short:
            return [shared.get(i, pages[i]) for i in range(len(sizes))]
        others -= short
    return pages


def _product(count: int, size: int) -> int:
    return count * size
