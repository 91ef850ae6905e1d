"""EvictionOrder: which node of the prefix tree gives up its page of one group next.

A node that was just unlocked is the youngest, so nearly all of them stand in a line.  One that may
go because its last child went has an older stamp, and waits in a heap beside the line.
"""

import heapq
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

N = TypeVar("N", bound=Hashable)


class EvictionOrder(Generic[N]):
    """Nodes by the time they were last unlocked.  Every change costs O(log n) at most, on average,
    however many nodes there are."""

    def __init__(self) -> None:
        self._line: OrderedDict[N, int] = OrderedDict()  # node -> stamp, ascending
        self._heap: list[tuple[int, N]] = []  # by stamp; of nodes that left, too
        self._in_heap: dict[N, int] = {}  # node -> stamp

    def __len__(self) -> int:
        return len(self._line) + len(self._in_heap)

    def __contains__(self, node: object) -> bool:
        return node in self._line or node in self._in_heap

    def add_youngest(self, node: N, stamp: int) -> None:
        """A node, with a stamp above all others."""
        self._line[node] = stamp

    def add(self, node: N, stamp: int) -> None:
        """A node at the place of its stamp."""
        self._in_heap[node] = stamp
        heapq.heappush(self._heap, (stamp, node))

    def discard(self, node: N) -> None:
        """A node that may not go, if it was there."""
        if self._line.pop(node, None) is None:
            self._in_heap.pop(node, None)

    def pop(self) -> N | None:
        """Take out the node with the lowest stamp; None when there is none."""
        while self._heap and self._in_heap.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        first = next(iter(self._line.values()), None)
        if self._heap and (first is None or self._heap[0][0] < first):
            _, node = heapq.heappop(self._heap)
            del self._in_heap[node]
            return node
        return None if first is None else self._line.popitem(last=False)[0]
