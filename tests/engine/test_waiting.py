"""Clients that wait take turns; of one client the order of arrival holds."""

from itertools import count

import pytest

from paceline.core.request.sampling_params import SamplingParams
from paceline.engine.request import Request, Share
from paceline.engine.waiting import WaitingQueue

ARRIVALS = count(1)


def make(client: str = "", *, tokens: int = 10, priority: int = 0, weight: float = 1.0) -> Request:
    request = Request.make(
        f"{client}{next(ARRIVALS)}",
        [5],
        SamplingParams(max_tokens=tokens - 1),
        context_len=10_000,
        share=Share(client=client, weight=weight, priority=priority),
    )
    request.arrival = next(ARRIVALS)
    return request


def add(queue: WaitingQueue, *requests: Request) -> None:
    for request in requests:
        queue.add(request)


def take(queue: WaitingQueue, number: int) -> list[Request]:
    taken = []
    for _ in range(number):
        taken.append(queue.first)
        queue.take(taken[-1])
    return taken


def clients(requests: list[Request]) -> str:
    return "".join(request.share.client for request in requests)


def test_of_one_client_who_comes_first_is_first() -> None:
    queue, requests = WaitingQueue(), [make(tokens=size) for size in (50, 2, 7, 90)]
    add(queue, *requests)
    queue.remove(requests[2])
    assert (len(queue), list(queue)) == (3, [requests[0], requests[1], requests[3]])
    assert take(queue, 3) == [requests[0], requests[1], requests[3]]
    assert (len(queue), queue.first) == (0, None)


def test_who_asks_for_little_passes_the_rest_of_who_asks_for_much() -> None:
    queue = WaitingQueue()
    add(queue, *(make("a") for _ in range(800)))
    take(queue, 16)
    add(queue, make("b", tokens=4))
    assert clients(take(queue, 3)) == "baa"


def test_turns_are_by_tokens_and_weight() -> None:
    queue = WaitingQueue()
    add(queue, *(make("a") for _ in range(40)), *(make("b", tokens=20) for _ in range(40)))
    assert clients(take(queue, 30)).count("a") == 20
    queue = WaitingQueue()
    add(queue, *(make("a") for _ in range(40)), *(make("b", weight=3.0) for _ in range(40)))
    assert clients(take(queue, 40)).count("b") == 30


def test_who_asked_for_nothing_saves_nothing_up() -> None:
    queue = WaitingQueue()
    add(queue, make("b"), *(make("a") for _ in range(60)))
    take(queue, 40)
    add(queue, *(make("b") for _ in range(20)))
    assert clients(take(queue, 20)).count("b") in (10, 11)


def test_a_priority_counts_among_the_requests_of_its_client_alone() -> None:
    queue = WaitingQueue()
    first, urgent, other = make("a"), make("a", priority=-1), make("b", priority=5)
    add(queue, first, urgent, other, make("a"))
    assert take(queue, 3) == [urgent, other, first]


def test_who_has_run_goes_before_all_others_and_costs_no_turn_again() -> None:
    queue = WaitingQueue()
    add(queue, make("a"), make("b"))
    (ran,) = take(queue, 1)
    ran.num_joins = 1
    queue.add(ran)
    assert (queue.first, len(queue)) == (ran, 2)
    assert clients(take(queue, 2)) == "ab"


def test_who_stands_aside_takes_its_turn_once_released() -> None:
    queue, leader = WaitingQueue(), make("a")
    leader.params = SamplingParams(seed=1)
    sibling, gone = leader.sibling(1), leader.sibling(2)
    for each in (sibling, gone):
        each.arrival = next(ARRIVALS)
        queue.add_aside(each, leader)
    queue.remove(gone)
    assert (queue.first, len(queue)) == (None, 1)
    queue.release(leader)
    assert take(queue, 1) == [sibling]


@pytest.mark.parametrize("num_others", [0, 1_100])
def test_clients_that_are_gone_are_forgotten(num_others: int) -> None:
    queue = WaitingQueue()
    add(queue, *(make("much") for _ in range(num_others)))
    for index in range(1_000):
        add(queue, make(str(index)))
        take(queue, 2 if num_others else 1)
    assert len(queue._clients) < 400
    assert len(queue._turns) < 400
