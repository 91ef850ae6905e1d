"""Crowds: how many admitted requests found the same long prefix in the cache.

A host's hint that a step may read pages once for several rows; which rows and how many pages, the
device finds in their page tables.
"""

from collections import Counter
from collections.abc import Sequence

from paceline.cache.prefix_tree import Node
from paceline.core.sharing import MIN_SHARED_KEYS, MIN_SHARERS


class Crowds:
    """Counts requests by the page with which their hit is long enough."""

    def __init__(self, page_size: int) -> None:
        self._depth = -(-MIN_SHARED_KEYS // page_size)  # pages
        self._held: Counter[Node] = Counter()
        self.num_crowds = 0  # prefixes with MIN_SHARERS requests or more; others only read

    def join(self, path: Sequence[Node]) -> Node | None:
        """Count a request that hit `path`; returns what it leaves with."""
        if len(path) < self._depth:
            return None
        node = path[self._depth - 1]
        self._held[node] += 1
        self.num_crowds += self._held[node] == MIN_SHARERS
        return node

    def leave(self, node: Node | None) -> None:
        """Count a request no longer.  node: what `join` returned for it."""
        if node is None:
            return
        self.num_crowds -= self._held[node] == MIN_SHARERS
        self._held[node] -= 1
        if not self._held[node]:
            del self._held[node]
