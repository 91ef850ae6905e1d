"""The scheduler's decisions with a drafter, one at a time, around the fake device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import pytest
from numpy.typing import NDArray
from scheduler_world import output_ids
from test_scheduler import Loop, anything, extends

from paceline.core.draft_shape import DraftShape
from paceline.core.errors import CapacityError
from paceline.core.modes import MaskKind
from paceline.core.step import GivenDrafts, Step
from paceline.engine.grammar import Constraint
from paceline.engine.request import FinishReason, HostNeed, RequestState
from paceline.engine.scheduler_config import SchedulerConfig
from paceline.engine.step_plan import StepPlan

CHAIN = DraftShape(num_steps=3, topk=1, num_draft_tokens=4)
TREE = DraftShape(num_steps=4, topk=3, num_draft_tokens=6)
LONG = 40


def drafting(shape: DraftShape = CHAIN, **config) -> Loop:
    return Loop(draft=shape, **config)


def kinds(steps: list[Step]) -> set[str]:
    return {step.kind for step in steps}


@pytest.mark.parametrize(("shape", "mask"), [(CHAIN, MaskKind.CAUSAL), (TREE, MaskKind.TREE)])
def test_a_round_verifies_the_drafts_of_every_request(shape: DraftShape, mask: MaskKind) -> None:
    loop = drafting(shape)
    loop.add("a", 5, LONG)
    loop.add("b", 3, LONG)
    loop.turn()
    step = loop.turn()
    assert extends(step) == dict.fromkeys([1, 2], shape.num_draft_tokens)
    assert step is not None
    assert step.is_round
    assert (step.is_ragged, step.mask) == (False, mask)
    assert step.layout.emits == (True, True)


def test_prompts_and_rounds_alternate_and_never_mix() -> None:
    loop = drafting(chunked_prefill_size=4)
    loop.add("a", 3, LONG)
    loop.turn()
    loop.add("b", 12, LONG)
    steps = [loop.turn() for _ in range(6)]
    assert [step is not None and step.is_round for step in steps] == [True, False] * 3
    assert [len(extends(step)) for step in steps] == [1] * 6
    loop.run()
    assert output_ids(loop.requests["b"]) == tuple(loop.expected("b"))


def test_steady_rounds_repeat_an_equal_layout_without_deltas() -> None:
    loop = drafting(reserve_ahead=256, num_pages=201)
    for name in "abc":
        loop.add(name, 5, LONG)
    loop.turn()
    first = loop.turn()
    steps = [loop.turn() for _ in range(4)]
    assert first is not None
    for step in steps:
        assert step is not None
        assert step.layout == first.layout
        assert step.deltas == ()


def test_the_bound_of_a_prefix_tightens_when_outputs_arrive() -> None:
    loop = drafting()
    request = loop.add("h", 5, LONG)
    loop.turn()  # the prompt
    first, second = loop.launch(), loop.launch()
    assert first is not None
    assert second is not None
    assert first.prefix_lens_bound == (5,)
    assert second.prefix_lens_bound == (5 + CHAIN.max_path,)
    assert (request.kv_least, request.kv_bound) == (7, 5 + 2 * CHAIN.max_path)
    loop.process()  # of the prompt
    loop.process()  # of the first round
    known = request.num_known - 1
    assert request.kv_known == known < 5 + CHAIN.max_path
    assert (request.kv_least, request.kv_bound) == (known + 1, known + CHAIN.max_path)


def test_without_drafts_in_any_request_plain_decoding_runs() -> None:
    loop = drafting()
    loop.add("a", 5, LONG, speculative=False)
    loop.add("b", 5, LONG, speculative=False)
    steps = loop.run()
    assert kinds(steps) == {"ragged step", "decode step"}
    assert all(step.mask is MaskKind.CAUSAL and not step.is_round for step in steps)
    assert loop.requests["a"].acceptance.rounds == 0


def test_a_request_without_drafts_takes_part_in_the_rounds_of_others() -> None:
    loop = drafting()
    plain = loop.add("a", 5, 12, speculative=False)
    drafted = loop.add("b", 5, 12)
    loop.turn()
    assert extends(loop.turn()) == {1: 4, 2: 4}
    assert plain.is_exact
    assert not drafted.is_exact
    loop.run()
    assert output_ids(plain) == tuple(loop.expected("a"))
    assert plain.acceptance.rounds == 0
    assert drafted.acceptance.rounds > 0


@pytest.mark.parametrize("most", [0, 1, 2])
def test_more_requests_than_may_draft_decode_plainly_until_few_are_left(most: int) -> None:
    """And back, where more than one may draft: the texts are those of plain decoding, in both
    directions of the switch."""
    loop = drafting(max_drafting=most, mix_prefill_and_decode=False)
    loop.add("long", 5, LONG)
    loop.turn()
    assert extends(loop.turn()) == {1: 4 if most else 1}  # alone
    for name in ("short", "shorter")[:most]:
        loop.add(name, 5, 6)
    steps = [step for step in loop.run() if step is not None]
    decodes = [step for step in steps if not step.is_ragged]
    crowded = [step for step in decodes if len(extends(step)) > most]
    assert crowded
    assert not any(step.is_round for step in crowded)
    after = decodes[decodes.index(crowded[-1]) + 1 :]
    assert any(step.is_round for step in after) == (most > 1)
    assert any(step.observed for step in crowded + after) == (most > 1)
    for name in ("long", "short", "shorter")[: most + 1]:
        assert output_ids(loop.requests[name]) == tuple(loop.expected(name))


def test_no_round_begins_that_could_emit_nothing() -> None:
    loop = drafting()
    loop.add("a", 5, max_tokens=2)
    assert extends(loop.turn()) == {1: 5}
    assert extends(loop.turn()) == {1: 4}  # emits the second token, whatever is accepted
    assert loop.turn() is None
    assert not loop.scheduler.has_work


def test_a_round_follows_one_that_may_have_been_the_last() -> None:
    loop = drafting()
    loop.add("a", 5, max_tokens=4)
    loop.turn()
    assert loop.turn() is not None  # emits 1 to 3
    assert loop.launch() is not None  # at least 1 is known by then, of 3


def test_a_backend_that_plans_on_the_host_waits_for_the_round_in_flight() -> None:
    loop = drafting(host_needs=frozenset({HostNeed.EXACT_LENGTHS}))
    loop.add("a", 5, LONG)
    loop.turn()
    assert loop.turn() is not None  # a prompt's outputs are no surprise
    assert loop.turn() is None
    assert loop.turn() is not None
    loop.run()
    assert output_ids(loop.requests["a"]) == tuple(loop.expected("a"))
    assert loop.requests["a"].acceptance.fallbacks == {HostNeed.EXACT_LENGTHS.value}


def test_a_request_waits_for_outputs_rather_than_preempting_anybody() -> None:
    """Its bound wants a page that its true length, known soon, may not want."""
    loop = drafting(num_pages=8, caching=False)
    loop.add("a", 8, LONG // 8)
    waiting = loop.add("b", 8, LONG // 8)
    loop.turn()
    assert extends(loop.turn()) == {1: 4, 2: 4}
    assert extends(loop.turn()) == {1: 4}
    assert waiting.state is RequestState.RUNNING
    loop.run()
    assert output_ids(waiting) == tuple(loop.expected("b"))


def test_capacity_counts_what_a_round_writes_behind_the_end() -> None:
    loop = drafting(num_pages=8)  # 28 tokens
    with pytest.raises(
        CapacityError, match=r"\(26 tokens\) must be at most \[7\] .*, got \[8\]; lower max_tokens"
    ):
        loop.add("a", 20, max_tokens=6)
    loop.add("b", 20, max_tokens=5)
    loop.run()
    assert output_ids(loop.requests["b"]) == tuple(loop.expected("b"))


def test_a_round_holds_all_whatever_the_budget_of_prompts() -> None:
    loop = drafting(max_batched_tokens=4, max_running=4)
    for name in "abc":
        loop.add(name, 2, LONG)
    steps = loop.run()
    assert max(step.layout.num_tokens for step in steps if not step.is_round) <= 4
    assert max(step.layout.num_tokens for step in steps if step.is_round) == 12


def test_only_rounds_that_must_wait_are_a_fallback() -> None:
    limits = {"max_running": 1, "max_batched_tokens": 8, "chunked_prefill_size": 8}
    limits |= {"max_join_tokens": 8}
    assert (
        SchedulerConfig(**limits, host_needs=frozenset({HostNeed.EXACT_LENGTHS})).fallback is None
    )
    assert SchedulerConfig(**limits, draft=CHAIN).fallback is None
    event = SchedulerConfig(
        **limits, draft=CHAIN, host_needs=frozenset({HostNeed.EXACT_LENGTHS})
    ).fallback
    assert event is not None
    assert event.reason == HostNeed.EXACT_LENGTHS


@pytest.mark.parametrize("end", ["abort", "finish_on_host", "preempt"])
def test_outputs_of_a_round_in_flight_change_nothing_behind_an_end(end: str) -> None:
    loop = drafting()
    request = loop.add("a", 5, LONG)
    for _ in range(4):
        loop.turn()
    loop.launch()
    kept = output_ids(request)
    if end == "abort":
        assert loop.scheduler.abort("a")
    elif end == "finish_on_host":
        assert loop.scheduler.finish_on_host("a", len(kept) - 1)
        kept = kept[:-1]
    else:
        loop.scheduler._preempt(request, StepPlan(32))
        assert request.state is RequestState.DRAINING
        loop.run()
        assert output_ids(request) == tuple(loop.expected("a"))
        return
    rounds = request.acceptance.rounds
    while loop.in_flight:
        assert loop.process() == []
    assert output_ids(request) == kept
    assert request.acceptance.rounds == rounds
    assert request.finish in (FinishReason.ABORT, FinishReason.STOP)
    assert not loop.scheduler.has_work


def test_the_counts_of_a_request_are_those_of_its_rounds() -> None:
    loop = drafting()
    request = loop.add("a", 5, LONG)
    emitted: list[int] = []
    while loop.scheduler.has_work:
        step = loop.launch()
        while len(loop.in_flight) > (step is not None):
            is_round = loop.in_flight[0][0].is_round
            updates = loop.process()
            emitted += [len(u.new_token_ids) for u in updates if is_round]
    counts = request.acceptance
    assert counts.rounds == len(emitted)
    assert counts.drafted == 3 * len(emitted)
    assert counts.mean_tokens_per_round == sum(emitted) / len(emitted)
    assert counts.accepted == [sum(m > depth for m in emitted) for depth in (1, 2, 3)]
    assert set(emitted) == {1, 2, 3, 4}


def test_all_tokens_of_a_round_but_the_last_are_drafts() -> None:
    loop = drafting()
    loop.add("a", 5, LONG)
    plain = loop.add("b", 5, LONG, speculative=False)
    while loop.scheduler.has_work:
        loop.launch()
        is_round = loop.in_flight[0][0].is_round
        for update in loop.process():
            drafts = is_round and update.request is not plain
            assert update.num_drafted == (len(update.new_token_ids) - 1 if drafts else 0)


def test_who_stops_drafting_decodes_plainly_from_the_next_step_on() -> None:
    loop = drafting()
    loop.add("a", 5, LONG)
    assert kinds([loop.turn(), loop.turn()]) == {"ragged step", "round"}
    loop.scheduler.limit_drafting(0)
    while loop.in_flight:
        loop.process()
    assert kinds(loop.run()) == {"decode step"}
    assert output_ids(loop.requests["a"]) == tuple(loop.expected("a"))


def test_who_has_a_grammar_takes_no_drafts_that_the_host_does_not_know() -> None:
    loop = drafting()
    loop.add("a", 5, LONG)
    bound = loop.add("b", 5, LONG, constraint=anything())
    rounds = [step for step in loop.run() if step.is_round and step.masks is not None]
    assert rounds
    for step in rounds:
        roots = [index * CHAIN.num_draft_tokens for index in range(len(step.layout.rows))]
        index = step.layout.rows.index(2)
        assert [mask.row for mask in step.masks or ()] == [roots[index]]
        assert step.given == (GivenDrafts(index, (), ()),)
        assert step.tells_drafts == (index,)
    assert bound.acceptance.rounds == 0
    assert bound.acceptance.fallbacks == {HostNeed.GRAMMAR.value}
    assert loop.requests["a"].acceptance.rounds > 0
    for name in "ab":
        assert output_ids(loop.requests[name]) == tuple(loop.expected(name))


@dataclass
class Script:
    """A grammar that leaves no choice but at every third token, where it takes any."""

    tokens: Sequence[int]
    at: int = 0

    is_done = False

    def fork(self) -> Self:
        return type(self)(self.tokens, self.at)

    def fill(self, words: NDArray[np.int32]) -> None:
        if self.at % 3 == 2:
            words[:] = -1
        else:
            token = self.tokens[self.at]
            words.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)

    def accept(self, token: int) -> None:
        assert token == self.tokens[self.at]
        self.at += 1


@pytest.mark.parametrize("shape", [CHAIN, TREE])
def test_what_a_grammar_forces_is_given_to_a_round_with_masks_along_it(shape: DraftShape) -> None:
    plain = Loop()
    plain.add("b", 5, 20)
    plain.run()
    script = Script(plain.expected("b"))
    loop = drafting(shape)
    loop.add("a", 5, 20)
    bound = loop.add(
        "b", 5, 20, constraint=Constraint(script, vocab_size=64, stop_ids=(), min_tokens=0)
    )
    rounds = [step for step in loop.run() if step.is_round and step.masks is not None]
    for step in rounds:
        [given] = step.given
        first = given.index * shape.num_draft_tokens
        places = range(first, first + 1 + len(given.token_ids))
        assert [mask.row for mask in step.masks or ()] == list(places)
        assert step.tells_drafts == (() if given.token_ids else (given.index,))
    assert bound.acceptance.forced == sum(bound.acceptance.accepted) > 6
    assert loop.requests["a"].acceptance.forced == 0
    for name in "ab":
        assert output_ids(loop.requests[name]) == tuple(loop.expected(name))


def test_a_round_gives_no_more_drafts_than_it_has_masks_for() -> None:
    plain = Loop()
    for name in "abcd":
        plain.add(name, 5, 20)
    plain.run()
    loop = drafting()
    for name in "abcd":
        script = Script(plain.expected(name))
        kept = Constraint(script, vocab_size=64, stop_ids=(), min_tokens=0)
        loop.add(name, 5, 20, constraint=kept)
    steps = loop.run()
    most = max(len(step.masks or ()) for step in steps)
    assert most == 4 + CHAIN.num_draft_tokens - 1
    for name in "abcd":
        assert output_ids(loop.requests[name]) == tuple(loop.expected(name))


def scripted(names: str, *, max_running: int = 4, num_pages: int = 65) -> Loop:
    """Forms that are forced at the same steps, two tokens of three."""
    plain = Loop(max_running=max_running, num_pages=num_pages)
    for name in names:
        plain.add(name, 2, 12)
    plain.run()
    loop = drafting(max_running=max_running, num_pages=num_pages)
    for name in names:
        script = Script(plain.expected(name))
        kept = Constraint(script, vocab_size=64, stop_ids=(), min_tokens=0)
        loop.add(name, 2, 12, constraint=kept)
    return loop


def test_masks_that_do_not_reach_for_all_are_dealt_in_turn() -> None:
    loop = scripted("abcd")
    steps = loop.run()
    given = [sum(bool(each.token_ids) for each in step.given) for step in steps if step.is_round]
    assert max(given) == 3  # one each, before anybody has two
    first, *_, last = sorted(request.acceptance.drafted for request in loop.requests.values())
    assert last - first <= 1
    for name in "abcd":
        assert output_ids(loop.requests[name]) == tuple(loop.expected(name))


@pytest.mark.parametrize(
    ("names", "is_forced", "has_rounds"),
    [
        ("abcdefghijklmnop", True, False),  # 3 masks to spare: for less than a quarter
        ("abcdefghijkl", True, True),  # 7
        ("abcdefghijkl", False, False),  # nothing to give
        ("abcdefghi", False, True),  # 10: each is told of drafts, and could be given one
    ],
)
def test_forms_alone_take_a_round_where_enough_of_them_can_be_given_drafts(
    names: str, is_forced: bool, has_rounds: bool
) -> None:
    if is_forced:
        loop = scripted(names, max_running=16, num_pages=257)
    else:
        loop = drafting(max_running=16, num_pages=257)
        for name in names:
            loop.add(name, 2, 12, constraint=anything())
    steps = loop.run()
    full = [step for step in steps if len(step.layout.rows) == len(names) and not step.is_ragged]
    assert full
    assert any(step.is_round for step in full) == has_rounds
    for name in names:
        assert output_ids(loop.requests[name]) == tuple(loop.expected(name))


def test_forms_go_along_in_rounds_that_another_takes() -> None:
    loop = drafting(max_running=16, num_pages=257)
    loop.add("a", 2, LONG)
    for name in "bcdefghijklmnop":
        loop.add(name, 2, 12, constraint=anything())
    steps = [step for step in loop.run() if not step.is_ragged and 1 in step.layout.rows]
    assert max(len(step.layout.rows) for step in steps) == 16
    assert all(step.is_round for step in steps)


@pytest.mark.parametrize("option", ["a request's", "the engine's"])
def test_who_drafts_no_more_is_given_nothing(option: str) -> None:
    plain = Loop()
    plain.add("b", 5, 12)
    plain.run()
    kept = Constraint(Script(plain.expected("b")), vocab_size=64, stop_ids=(), min_tokens=0)
    loop = drafting()
    if option == "the engine's":
        loop.scheduler.limit_drafting(0)
    bound = loop.add("b", 5, 12, constraint=kept, speculative=option == "the engine's")
    assert not [step for step in loop.run() if step.is_round]
    assert bound.acceptance.forced == 0
    assert output_ids(bound) == tuple(loop.expected("b"))


def test_drafts_of_the_host_wait_for_the_last_token() -> None:
    loop = drafting(host_needs=frozenset({HostNeed.HOST_DRAFTS}))
    loop.add("a", 5, LONG)
    assert [loop.turn() is not None for _ in range(6)] == [True, False] * 3
    loop.run()
    assert loop.requests["a"].acceptance.fallbacks == {HostNeed.HOST_DRAFTS.value}
