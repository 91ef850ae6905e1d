"""The engine around the fake device: who is told what, and what stays in its books."""

from collections import defaultdict
from typing import NamedTuple

import pytest
from scheduler_world import FakeDevice, group_specs

from paceline.cache.manager import CacheManager
from paceline.cache.page_keys import PageKeys
from paceline.core.errors import CapacityError, IntegrityError, PacelineError
from paceline.core.request.sampling_params import SamplingParams
from paceline.core.step import RowLogprobs, Step, StepOutputs
from paceline.engine.answers.outputs import CompletionOutput, RequestOutput
from paceline.engine.answers.tracker import Tracker
from paceline.engine.engine import Engine
from paceline.engine.loop import overlapped_turn
from paceline.engine.request import FinishReason, Request, RequestState
from paceline.engine.scheduler import RequestUpdate, Scheduler
from paceline.engine.scheduler_config import SchedulerConfig

PAGE_SIZE = 4
SAMPLED = SamplingParams(seed=-1, max_tokens=12)


class Letters:
    """Token 0 is "A", token 1 is "B", ..."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(65 + token) for token in token_ids)

    def piece(self, token_id: int, *, skip_special_tokens: bool = True) -> str:
        return chr(65 + token_id)


class Launched(NamedTuple):
    step: Step
    outputs: StepOutputs

    def wait(self) -> StepOutputs:
        return self.outputs


class FakeRunner:
    """Launches on a fake device; `failure` is raised instead, once it is set."""

    def __init__(self, num_pages: int) -> None:
        self._device = FakeDevice(group_specs((None,), PAGE_SIZE), [num_pages])
        self.failure: BaseException | None = None
        self.num_rows = 0  # of all steps

    def launch(self, step: Step) -> Launched:
        if self.failure is not None:
            raise self.failure
        self._device.retire(step.epoch - 2)
        self.num_rows += step.layout.num_reqs
        return Launched(step, self._device.execute(step, defaultdict(PageKeys)))

    def capture_owed(self) -> bool:
        """No graphs."""
        return False


def make_engine(*, num_pages: int = 65) -> tuple[Engine, FakeRunner]:
    config = SchedulerConfig(
        max_running=4,
        max_batched_tokens=32,
        chunked_prefill_size=16,
        max_join_tokens=1024,
        reserve_ahead=0,
        admission_margin=0,
    )
    cache = CacheManager(group_specs((None,), PAGE_SIZE), [num_pages], max_extend_len=16)
    runner = FakeRunner(num_pages)
    scheduler = Scheduler(config, cache)
    engine = Engine(scheduler, runner, Letters(), turn=overlapped_turn, context_len=64)
    return engine, runner


def run(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def assert_idle(engine: Engine) -> None:
    (pool,) = engine.scheduler.cache.stats().groups
    assert (pool.owned, pool.queued) == (0, 0)
    assert not engine._trackers
    assert engine.scheduler.num_running == engine.scheduler.num_waiting == 0


@pytest.mark.parametrize("turns", [0, 1, 4])
def test_an_abort_ends_every_completion_at_once(turns: int) -> None:
    engine, runner = make_engine()
    tracker = engine.add("a", [5] * 9, SamplingParams(seed=-1, max_tokens=40, n=3))
    for _ in range(turns):
        engine.step()
    assert engine.abort("a")
    assert not engine.abort("a")
    assert engine.scheduler.num_running == engine.scheduler.num_waiting == 0
    before = runner.num_rows
    run(engine)
    assert runner.num_rows == before
    assert [each.finish_reason for each in tracker.snapshot().outputs] == ["abort"] * 3
    assert_idle(engine)


def test_finished_requests_leave_the_books_and_their_name_is_free() -> None:
    engine, _ = make_engine()
    for _ in range(2):
        tracker = engine.add("a", [5] * 9, SamplingParams(seed=-1, max_tokens=4, n=2))
        run(engine)
        assert tracker.is_finished
        assert not engine.abort("a")
        assert_idle(engine)


def test_what_the_last_request_held_is_taken_back_when_nothing_is_to_be_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, _ = make_engine()
    engine.add("a", [5] * 9, SamplingParams(seed=-1, max_tokens=4))
    with monkeypatch.context() as patch:  # who checks the books takes it back
        patch.setattr(engine.scheduler, "check_integrity", lambda: None)
        run(engine)
    (group,) = engine.scheduler.cache._groups
    assert group.pool.counts().owned > 0, "its last token did not wait for that"
    assert not engine.idle()
    assert group.pool.counts().owned == 0
    assert_idle(engine)


def test_a_refused_completion_takes_those_before_it_back() -> None:
    engine, _ = make_engine()
    engine.add("a#2", [5], SAMPLED)
    with pytest.raises(PacelineError, match="request_id must be new, got 'a#2'"):
        engine.add("a", [6], SamplingParams(seed=-1, n=3))
    assert engine.scheduler.num_waiting == 1
    engine.abort("a#2")
    small, _ = make_engine(num_pages=3)
    with pytest.raises(CapacityError):
        small.add("a", [5] * 30, SAMPLED)
    assert_idle(small)


def test_a_stop_string_ends_its_completion_in_the_scheduler_while_others_go_on() -> None:
    engine, runner = make_engine()
    params = SamplingParams(seed=-1, max_tokens=30)
    whole = engine.add("a", [5] * 9, params)
    run(engine)
    text, rows = whole.snapshot().outputs[0].text, runner.num_rows
    stop = text[2:4]
    assert text.index(stop) == 2
    cut = engine.add("b", [5] * 9, SamplingParams(seed=-1, max_tokens=30, stop=stop))
    run(engine)
    output = cut.snapshot().outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == (text[:2], "stop", stop)
    assert len(output.token_ids) == 4
    assert runner.num_rows - rows < 8  # not the 30 steps of the whole
    assert_idle(engine)


@pytest.mark.parametrize("failure", [RuntimeError("gone"), KeyboardInterrupt()])
def test_an_engine_that_broke_within_a_turn_refuses_to_go_on(failure: BaseException) -> None:
    engine, runner = make_engine()
    engine.add("a", [5], SAMPLED)
    engine.step()
    runner.failure = failure
    with pytest.raises(type(failure)):
        engine.step()
    runner.failure = None
    for ask in (engine.step, lambda: engine.add("b", [5], SAMPLED)):
        with pytest.raises(PacelineError, match=r"engine must be whole, got broken by .*build"):
            ask()
    engine.drain()


def test_an_engine_whose_books_broke_while_it_was_idle_refuses_to_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, _ = make_engine()
    engine.add("a", [5] * 9, SamplingParams(seed=-1, max_tokens=4))
    run(engine)

    def fail() -> None:
        raise IntegrityError("a page went astray")

    monkeypatch.setattr(engine.scheduler.cache, "offer_written", fail)
    with pytest.raises(IntegrityError, match="astray"):
        engine.idle()
    monkeypatch.undo()
    with pytest.raises(PacelineError, match=r"engine must be whole, got broken by .*astray"):
        engine.step()


def make_tracker(**params: object) -> tuple[Tracker, list[Request]]:
    first = Request.make("a", [5, 6, 7, 8], SamplingParams(seed=1, **params), context_len=64)
    requests = [first, *(first.sibling(index) for index in range(1, first.params.n))]
    return Tracker(requests, prompt=None, tokenizer=None), requests


def scores(*values: float) -> tuple[RowLogprobs, ...]:
    return tuple(RowLogprobs(chosen=value, top_ids=(), top_values=()) for value in values)


def test_times_are_of_the_first_and_of_the_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.0, 13.0, 17.0])
    monkeypatch.setattr("paceline.engine.answers.tracker.time.perf_counter", lambda: next(clock))
    tracker, (request,) = make_tracker()
    for token, finish in ((1, None), (2, None), (3, FinishReason.LENGTH)):
        tracker.apply(RequestUpdate(request, (token,), (), finish))
    metrics = tracker.snapshot().metrics
    assert (metrics.ttft_s, metrics.latency_s, metrics.decode_tok_s) == (2.0, 7.0, 2 / 5)


def test_counts_are_of_all_completions() -> None:
    tracker, requests = make_tracker(n=3)
    for count, request in enumerate(requests, start=1):
        request.num_preemptions = count
        tracker.apply(RequestUpdate(request, (1, 2), (), FinishReason.LENGTH))
    metrics = tracker.snapshot().metrics
    assert (metrics.preemptions, metrics.output_tokens, metrics.prompt_tokens) == (6, 6, 4)


def test_scores_of_a_prompt_belong_to_its_tokens_and_come_beside_first_growths() -> None:
    """In chunks: of two tokens, then of the last."""
    tracker, (first, second) = make_tracker(n=2, prompt_logprobs=0)
    tracker.apply(RequestUpdate(first, (), (), None, scores(-1.0, -2.0)))
    tracker.apply(RequestUpdate(first, (9,), (), None, scores(-3.0)))
    wanted = [None, (6, -1.0), (7, -2.0), (8, -3.0)]
    grown = tracker.growth(CompletionOutput, RequestOutput)
    found = [None if row is None else (row.token_id, row.chosen) for row in grown.prompt_logprobs]
    assert found == wanted
    tracker.apply(RequestUpdate(first, (9,), (), None))
    assert tracker.growth(CompletionOutput, RequestOutput).prompt_logprobs is None
    tracker.apply(RequestUpdate(second, (9,), (), None))
    assert len(tracker.growth(CompletionOutput, RequestOutput).prompt_logprobs) == 4


def test_a_completion_that_a_stop_string_ended_leaves_the_steps_of_its_siblings() -> None:
    """The fake model gives both the same text; `b` has the stop string of the first alone."""
    engine, runner = make_engine()
    whole = engine.add("a", [5] * 9, SamplingParams(seed=-1, max_tokens=30))
    run(engine)
    stop = whole.snapshot().outputs[0].text[2:4]
    both = engine.add("b", [5] * 9, SamplingParams(seed=-1, max_tokens=30, stop=stop, n=2))
    before = runner.num_rows
    while not both._completions[0].is_finished:
        engine.step()
    first, second = both.requests
    assert (first.state, second.state) == (RequestState.FINISHED, RequestState.RUNNING)
    run(engine)
    assert [each.finish_reason for each in both.snapshot().outputs] == ["stop", "stop"]
    assert runner.num_rows - before < 20
    assert_idle(engine)
