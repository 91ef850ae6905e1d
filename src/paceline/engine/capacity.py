"""Capacity: what the cache groups of a budget hold."""

from dataclasses import dataclass

from paceline.core.model_config import CacheGroupSpec
from paceline.engine.footprint import GroupBudget, request_pages, standing_pages


@dataclass(frozen=True, slots=True, kw_only=True)
class Concurrency:
    """How many requests of one context length run at the same time."""

    context_len: int
    requests: int


def kv_tokens(groups: tuple[GroupBudget, ...]) -> int:
    """Tokens of the smallest group that keeps every token, or of the smallest group."""
    keepers = [group.tokens for group in groups if group.window is None]
    return min(keepers or [group.tokens for group in groups], default=0)


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
    rows = []
    for length in lengths:
        held = [
            (group.num_pages - standing_pages(spec, step_tokens))
            // request_pages(spec, length + reach)
            for spec, group in zip(specs, groups, strict=True)
        ]
        rows.append(Concurrency(context_len=length, requests=min(*held, max_num_seqs)))
    return tuple(rows)
