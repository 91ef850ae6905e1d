"""The books of the cache: totals, and that pools, prefix tree and requests count the same pages."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.cache.encoders import EncoderHolding
from paceline.cache.groups import CacheGroup, Holding
from paceline.cache.pages import PoolCounts
from paceline.cache.prefix_tree import Node, PrefixTree
from paceline.cache.states import StateHolding
from paceline.core.errors import IntegrityError

Held = Holding | StateHolding | EncoderHolding  # of one request in one group


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """Totals since the start, and the books of every group now."""

    names: tuple[str, ...]  # [num_groups]
    groups: tuple[PoolCounts, ...]  # [num_groups]
    queried_tokens: int  # of admitted requests
    hit_tokens: int  # of these, found in the cache
    evicted_pages: int


def check_books(
    tree: PrefixTree,
    groups: Sequence[CacheGroup],
    holdings: Sequence[Sequence[Held]],
) -> None:
    """Raise IntegrityError unless pools, tree and requests tell the same story.

    holdings: of every admitted request, [num_groups].
    """
    tree.check_integrity()
    nodes = list(tree.nodes())
    for index, group in enumerate(groups):
        group.pool.check_integrity()
        counts = group.pool.counts()
        stored = sum(node.pages[index] is not None for node in nodes)
        _compare(group, "cached pages", counts.cached, stored)
        private = 0
        locks: Counter[Node] = Counter(group.pending_locks())
        for held in (of_request[index] for of_request in holdings):
            private += held.num_private
            locks.update(held.locked)
        _compare(group, "owned pages", counts.owned, private)
        for node in nodes:
            _compare(group, "locks of a page", node.locks[index], locks[node])


def _compare(group: CacheGroup, name: str, pool: int, others: int) -> None:
    if pool != others:
        raise IntegrityError.about(
            f"{name} of cache group '{group.name}'",
            expected=f"{others} by requests and tree",
            got=pool,
            remedy="find the call that changed one side only",
        )
