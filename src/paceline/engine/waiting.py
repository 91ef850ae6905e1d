"""WaitingQueue: who waits for a row of the request table, and whose turn it is.

Clients take turns, by start-time fair queueing (Goyal, Vin, Cheng 1996): on a clock of costs, a
request starts when the one before it of the same client has cost its tokens, divided by the
client's weight; the earliest start is next.  A client that asks for little thus passes the rest of
one that asks for much, and one that has asked for nothing saves nothing up.

    costs     a, a, a of client A: 10 each; then b of client B: 10
    starts    a 0, a 10, a 20; b arrives while the first a runs, at 0
    order     a, b, a, a
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from paceline.engine.request import Request

_FEW = 64  # skipped entries that are kept whatever waits


class _Line:
    """Requests by (priority, arrival); every change costs O(log n) at most, on average.

    A request that leaves from the middle (an abort) is skipped when it comes to the front, so that
    leaving costs the same wherever it stands.
    """

    def __init__(self) -> None:
        self._order: list[tuple[int, int]] = []  # a heap; of those that left, too
        self.requests: dict[int, Request] = {}  # by arrival; others only read

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def first(self) -> Request | None:
        while self._order and self._order[0][1] not in self.requests:
            heappop(self._order)
        return self.requests[self._order[0][1]] if self._order else None

    def add(self, request: Request) -> None:
        self.requests[request.arrival] = request
        heappush(self._order, _key(request))

    def remove(self, request: Request) -> bool:
        """False for one that is not in it."""
        if self.requests.pop(request.arrival, None) is None:
            return False
        if len(self._order) > 2 * len(self.requests) + _FEW:
            self._order = [_key(each) for each in self.requests.values()]
            heapify(self._order)
        return True


def _key(request: Request) -> tuple[int, int]:
    return request.share.priority, request.arrival


@dataclass(slots=True, eq=False)
class _Client:
    """The requests of one client that have not run yet."""

    start: float  # of its next one, by the clock of costs
    line: _Line = field(default_factory=_Line)


class WaitingQueue:
    """Owns the order of waiting requests.

    One that has run and was preempted goes before all that have not.  One whose leader still
    computes the prompt that both share stands aside until it is released: nobody looks at it
    meanwhile.
    """

    def __init__(self) -> None:
        self._again = _Line()  # preempted ones
        self._clients: dict[str, _Client] = {}
        self._turns: list[tuple[float, int, str]] = []  # a heap of (start, of a tie, client)
        self._now = 0.0  # start of the last one taken
        self._num_turns = 0
        self._num_waiting = 0
        self._num_lined = 0  # of these, in the lines of clients
        self._aside: dict[Request, dict[int, Request]] = {}  # by leader, then arrival

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Request]:
        """Those not aside, by arrival."""
        lines = [self._again, *(client.line for client in self._clients.values())]
        found = {arrival: each for line in lines for arrival, each in line.requests.items()}
        return (found[arrival] for arrival in sorted(found))

    @property
    def first(self) -> Request | None:
        """Of those not aside, whose turn it is."""
        if self._again:
            return self._again.first
        while self._turns:
            start, _, name = self._turns[0]
            client = self._clients.get(name)
            if client is not None and client.line and client.start == start:
                return client.line.first
            heappop(self._turns)
        return None

    def add(self, request: Request) -> None:
        """A request waits: behind others of its client, or before all if it has run."""
        self._num_waiting += 1
        self._line_up(request)

    def add_aside(self, request: Request, leader: Request) -> None:
        """A request waits until `leader` is released."""
        self._num_waiting += 1
        self._aside.setdefault(leader, {})[request.arrival] = request

    def release(self, leader: Request) -> None:
        """Those aside for `leader` wait like all others."""
        for request in self._aside.pop(leader, {}).values():
            self._line_up(request)

    def take(self, request: Request) -> None:
        """A request's turn has come; its client's next waits for its cost."""
        client = self._clients.get(request.share.client)
        if not request.num_joins and client is not None and request.arrival in client.line.requests:
            self._now = max(self._now, client.start)
            client.start += request.max_len / request.share.weight
            self._note(request.share.client, client)
        self.remove(request)

    def remove(self, request: Request) -> None:
        """A request waits no longer.  Raises KeyError when it did not."""
        client = self._clients.get(request.share.client)
        if client is not None and client.line.remove(request):
            self._num_lined -= 1
            self._forget_idle()
        elif not self._again.remove(request):
            assert request.leader is not None, f"{request.request_id} does not wait"
            del self._aside[request.leader][request.arrival]
        self._num_waiting -= 1

    def _line_up(self, request: Request) -> None:
        if request.num_joins:
            self._again.add(request)
            return
        name = request.share.client
        client = self._clients.setdefault(name, _Client(start=self._now))
        if not client.line:
            client.start = max(client.start, self._now)
            self._note(name, client)
        client.line.add(request)
        self._num_lined += 1

    def _note(self, name: str, client: _Client) -> None:
        self._num_turns += 1
        heappush(self._turns, (client.start, self._num_turns, name))

    def _forget_idle(self) -> None:
        """Clients that wait for nothing and owe nothing are as good as new ones; when nobody waits,
        nobody owes anything."""
        if self._num_lined == 0:
            self._clients, self._turns, self._now = {}, [], 0.0
        elif len(self._clients) > 2 * self._num_lined + _FEW:
            self._clients = {
                name: client
                for name, client in self._clients.items()
                if client.line or client.start > self._now
            }
