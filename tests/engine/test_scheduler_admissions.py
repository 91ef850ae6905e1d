"""What a request takes from the cache when it joins, and what it must compute itself."""

import pytest
from scheduler_world import output_ids
from test_scheduler import CONTEXT_LEN, Loop, extends

from paceline.cache.page_keys import PageKeys
from paceline.core.errors import CapacityError
from paceline.core.request.blocks import Blocks
from paceline.core.request.sampling_params import SamplingParams
from paceline.engine.request import Request, RequestState
from paceline.engine.roster import Roster
from paceline.engine.step_plan import StepPlan


def test_a_request_takes_nothing_from_another_tenants() -> None:
    loop = Loop()
    for name, salt, cached in (("a1", "x", 0), ("a2", "y", 0), ("a3", "x", 16), ("a4", None, 0)):
        request = loop.add(name, 20, keys=PageKeys(salt))
        loop.run()
        assert request.num_cached == cached
        assert list(output_ids(request)) == loop.expected(name)


def test_a_prompt_that_is_scored_is_computed_whole() -> None:
    loop = Loop()
    loop.add("a1", 20)
    loop.run()
    request = loop.add("a2", 20, prompt_logprobs=0)
    (span,) = loop.launch().prompt_spans
    assert (span.start, request.num_cached) == (0, 0)
    loop.run()
    assert request.num_scored == 19


def test_a_request_preempted_within_its_prompt_scores_the_rest_alone() -> None:
    """`b` fills what `a` leaves of the pool; `a` grows before the prompt of `b` is computed."""
    loop = Loop(num_pages=9, chunked_prefill_size=4)
    loop.add("a", 8, max_tokens=16)
    loop.turn()
    loop.turn()
    request = loop.add("b", 20, max_tokens=2, prompt_logprobs=0)
    loop.run()
    assert request.num_preemptions == 1
    assert request.num_joins == 2
    assert request.num_scored == 19


def test_cached_tokens_are_those_of_the_first_admission() -> None:
    """What it finds when it joins again is its own."""
    roster = Roster(2)
    request = Request.make("a", [5] * 12, SamplingParams(), context_len=CONTEXT_LEN)
    roster.add(request)
    roster.join(request, 4)
    roster.preempt(request)
    roster.join(request, 8)
    assert (request.num_cached, request.kv_known, request.num_joins) == (4, 8, 2)


def test_spans_count_the_rows_before_them_that_score_nothing() -> None:
    loop = Loop()
    loop.add("a", 7)
    loop.add("b", 5, prompt_logprobs=0)
    step = loop.launch()
    assert extends(step) == {1: 7, 2: 5}
    (span,) = step.prompt_spans
    assert (span.index, span.start, span.length) == (1, 7, 4)


@pytest.mark.parametrize("max_tokens", [60, 1000, None])
def test_whatever_is_asked_generation_ends_with_the_context(max_tokens: int | None) -> None:
    loop = Loop()
    request = loop.add("a", 10, max_tokens=max_tokens)
    assert request.max_len == CONTEXT_LEN
    loop.run()
    assert (request.num_known, request.finish) == (CONTEXT_LEN, "length")


@pytest.mark.parametrize("turns", [0, 1])
def test_who_waits_for_a_leader_that_ends_waits_no_longer(turns: int) -> None:
    loop = Loop()
    leader = loop.add("a", 40, seed=-1)
    sibling, gone = leader.sibling(1), leader.sibling(2)
    for each in (sibling, gone):
        loop.scheduler.add(each)
        loop.requests[each.request_id] = each
    for _ in range(turns):
        loop.turn()
    assert loop.scheduler.abort(gone.request_id)
    assert loop.scheduler.num_waiting == 2 - turns
    assert loop.scheduler.abort("a")
    loop.run()
    assert list(output_ids(sibling)) == loop.expected(sibling.request_id)


@pytest.mark.parametrize("num_prompt", [16, 17])  # whose last chunk is one token
def test_who_waits_for_a_leader_joins_behind_its_first_token(num_prompt: int) -> None:
    loop = Loop()
    leader = loop.add("a", num_prompt, max_tokens=30, seed=-1)
    sibling = leader.sibling(1)
    loop.scheduler.add(sibling)
    loop.requests[sibling.request_id] = sibling
    while leader.num_known < num_prompt + 3:
        loop.turn()
    assert loop.scheduler.num_waiting == 0


def test_a_preempted_request_comes_before_those_that_arrived_after_it() -> None:
    loop = Loop(num_pages=9, max_running=2)
    loop.add("a", 8, max_tokens=24)
    second = loop.add("b", 12, max_tokens=20)
    third = loop.add("c", 4, max_tokens=2)
    while not second.num_preemptions:
        loop.turn()
    while second.state is not RequestState.WAITING:
        loop.turn()
    assert list(loop.scheduler._roster.waiting) == [second, third]


def test_a_request_that_is_preempted_leaves_the_step_it_was_planned_for() -> None:
    """The chunk of `a` takes pages that `b`, whose token is planned already, must give."""
    loop = Loop(windows=(32,), num_pages=12, chunked_prefill_size=8)
    loop.add("a", 44, max_tokens=4)
    second = loop.add("b", 4, max_tokens=20)
    while not second.num_preemptions:
        row = second.row
        step = loop.launch()
        while len(loop.in_flight) > 1:
            loop.process()
    assert step is None or row not in step.layout.rows
    loop.run()
    for name, request in loop.requests.items():
        assert list(output_ids(request)) == loop.expected(name)


def test_a_block_waits_for_a_step_that_holds_it_and_nobody_overtakes() -> None:
    loop = Loop(max_batched_tokens=12, chunked_prefill_size=8)
    blocks = Blocks(((1, 9),))
    loop.add("a", 8, max_tokens=9)
    loop.add("b", 9, keys=PageKeys(blocks=blocks))
    loop.add("c", 2)
    assert extends(loop.turn()) == {1: 8}
    assert extends(loop.turn()) == {1: 1, 2: 1, 3: 2}
    assert extends(loop.turn()) == {1: 1, 2: 8, 3: 1}


def test_a_block_longer_than_a_step_beside_all_decodes_is_refused() -> None:
    loop = Loop(max_batched_tokens=12, chunked_prefill_size=12, max_running=4)
    with pytest.raises(CapacityError, match="prompt_blocks of request 'b' must be of at most 9 "):
        loop.add("b", 12, keys=PageKeys(blocks=Blocks(((1, 11),))))
    loop.add("c", 12, keys=PageKeys(blocks=Blocks(((1, 10),))))


def test_what_leaves_a_plan_gives_its_tokens_back() -> None:
    loop = Loop()
    first, second = loop.add("a", 7), loop.add("b", 5)
    loop.turn()
    plan = StepPlan(32)
    plan.add(first, first.kv_bound, 1, ())
    plan.add(second, second.kv_bound, 5, ())
    plan.remove(second)
    assert (plan.budget, list(plan.rows)) == (31, [first])
