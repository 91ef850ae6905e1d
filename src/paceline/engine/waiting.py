"""WaitingQueue: the requests that wait for a row, by arrival.

A request that leaves from the middle (an abort) is skipped when it comes to the front, so that
leaving costs the same wherever it stands.  One whose leader still computes the prompt that both
share stands aside until it is released: nobody looks at it meanwhile.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from paceline.engine.request import Request

_FEW = 64  # skipped entries that are kept whatever waits


class WaitingQueue:
    """Owns the order of waiting requests; every change costs O(log n) at most, on average."""

    def __init__(self) -> None:
        self._arrivals: list[int] = []  # a heap; of those that left, too
        self._ready: dict[int, Request] = {}  # by arrival
        self._aside: dict[Request, dict[int, Request]] = {}  # by leader, then arrival

    def __len__(self) -> int:
        return len(self._ready) + sum(map(len, self._aside.values()))

    def __iter__(self) -> Iterator[Request]:
        """Those not aside, by arrival."""
        return (self._ready[arrival] for arrival in sorted(self._ready))

    @property
    def first(self) -> Request | None:
        """Of those not aside, who arrived before all others."""
        while self._arrivals and self._arrivals[0] not in self._ready:
            heappop(self._arrivals)
        return self._ready[self._arrivals[0]] if self._arrivals else None

    def add(self, request: Request) -> None:
        """A request waits, at the place of its arrival."""
        self._ready[request.arrival] = request
        heappush(self._arrivals, request.arrival)

    def add_aside(self, request: Request, leader: Request) -> None:
        """A request waits until `leader` is released."""
        self._aside.setdefault(leader, {})[request.arrival] = request

    def release(self, leader: Request) -> None:
        """Those aside for `leader` wait like all others."""
        for request in self._aside.pop(leader, {}).values():
            self.add(request)

    def remove(self, request: Request) -> None:
        """A request waits no longer.  Raises KeyError when it did not."""
        if self._ready.pop(request.arrival, None) is None:
            assert request.leader is not None, f"{request.request_id} does not wait"
            del self._aside[request.leader][request.arrival]
        elif len(self._arrivals) > 2 * len(self._ready) + _FEW:
            self._arrivals = list(self._ready)
            heapify(self._arrivals)
