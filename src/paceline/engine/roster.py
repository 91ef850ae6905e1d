"""Roster: the state of every unfinished request, and the rows of the request table.

    add       -> WAITING     in the order of the WaitingQueue (waiting.py)
    join      -> RUNNING     takes a row
    preempt   -> DRAINING    -> WAITING once nothing is in flight
    finish    -> FINISHED    from any state

A row returns when the last step in flight that contains it has been processed.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from heapq import heappop, heappush

from paceline.core.errors import IntegrityError, RequestError
from paceline.core.padding import PAD_ROW
from paceline.engine.request import FinishReason, Request, RequestState
from paceline.engine.waiting import WaitingQueue


class Roster:
    """Owns request states, arrival order and rows 1..max_running."""

    def __init__(self, max_running: int) -> None:
        self._max_running = max_running
        self._requests: dict[str, Request] = {}  # not finished
        self._free_rows = list(range(1, max_running + 1))  # a heap
        self._num_arrived = 0
        self.waiting = WaitingQueue()  # others only read
        self.running: list[Request] = []  # by arrival; others only read
        self.num_draining = 0
        self.num_needy = 0  # whose steps may have to wait for the host

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def has_free_row(self) -> bool:
        return bool(self._free_rows)

    def get(self, request_id: str) -> Request | None:
        """An unfinished request, or None."""
        return self._requests.get(request_id)

    def add(self, request: Request, *, leader: Request | None = None) -> None:
        """Queue a request; RequestError when its id is in use.

        leader: waits until this one is released, or ends.
        """
        if request.request_id in self._requests:
            raise RequestError.about(
                "request_id",
                expected="new",
                got=f"'{request.request_id}', which is still running",
                remedy="give every request its own id",
            )
        self._num_arrived += 1
        request.arrival = self._num_arrived
        self._requests[request.request_id] = request
        self.num_needy += bool(request.host_needs)
        if leader is None:
            self.waiting.add(request)
        else:
            self.waiting.add_aside(request, leader)

    def release(self, leader: Request) -> None:
        """Who waits for `leader` waits for it no longer."""
        self.waiting.release(leader)

    def join(self, request: Request, prefix_len: int) -> int:
        """A waiting request runs from `prefix_len` tokens on; returns its row."""
        self.waiting.take(request)
        insort(self.running, request, key=_arrival)
        row = heappop(self._free_rows)
        request.row = row
        request.state = RequestState.RUNNING
        request.join_len = request.num_known
        request.is_followed = True
        request.kv_known = prefix_len
        request.score_from = request.num_scored
        if request.pooled is not None:
            request.pooled.clear()
        if not request.num_joins:
            request.num_cached = prefix_len
        request.num_joins += 1
        return row

    def preempt(self, request: Request) -> None:
        """A running request waits again, once its in-flight outputs have arrived."""
        self._stop_running(request)
        request.state = RequestState.DRAINING
        request.num_preemptions += 1
        self.num_draining += 1
        self.settle(request)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """A request ends; its row returns once nothing of it is in flight."""
        if request.state is RequestState.RUNNING:
            self._stop_running(request)
        elif request.state is RequestState.WAITING:
            self.waiting.remove(request)
        else:
            self.num_draining -= 1
        request.state = RequestState.FINISHED
        request.finish = reason
        del self._requests[request.request_id]
        self.num_needy -= bool(request.host_needs)
        self.waiting.release(request)
        self.settle(request)

    def settle(self, request: Request) -> None:
        """With nothing in flight, an ended or preempted request gives its row back."""
        if request.in_flight or request.state is RequestState.RUNNING:
            return
        if request.row is not None:
            heappush(self._free_rows, request.row)
            request.row = None
        if request.state is RequestState.DRAINING:
            self.num_draining -= 1
            request.state = RequestState.WAITING
            self.waiting.add(request)

    def check_integrity(self, in_flight: Iterable[Request]) -> None:
        """Raise IntegrityError unless rows, states and steps in flight agree.

        in_flight: one entry per row of each launched step not yet processed.
        """
        flights = list(in_flight)
        counted = {id(r): r for r in [*self._requests.values(), *flights]}.values()
        holders = [r for r in counted if r.in_flight or r.state is RequestState.RUNNING]
        rows = [PAD_ROW if r.row is None else r.row for r in holders] + self._free_rows
        states = [r.state for r in self._requests.values()]
        for name, expected, got in (
            ("rows", list(range(1, self._max_running + 1)), sorted(rows)),
            ("running requests", states.count(RequestState.RUNNING), len(self.running)),
            ("waiting requests", states.count(RequestState.WAITING), len(self.waiting)),
            ("draining requests", states.count(RequestState.DRAINING), self.num_draining),
            ("rows in flight", len(flights), sum(r.in_flight for r in counted)),
            (
                "requests that need the host",
                sum(bool(r.host_needs) for r in self._requests.values()),
                self.num_needy,
            ),
        ):
            if expected != got:
                raise IntegrityError.about(
                    f"{name} of the scheduler",
                    expected=expected,
                    got=got,
                    remedy="find the transition that changed one side only",
                )

    def _stop_running(self, request: Request) -> None:
        index = bisect_left(self.running, request.arrival, key=_arrival)
        assert self.running[index] is request, f"{request.request_id} does not run"
        del self.running[index]


def _arrival(request: Request) -> int:
    return request.arrival
