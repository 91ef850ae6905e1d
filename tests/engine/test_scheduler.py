"""The scheduler's decisions, one at a time, around the fake device."""

from collections import deque

import pytest
from scheduler_world import FakeDevice, group_specs, output_ids, run_alone, state_spec

from cache_probe import cached_len
from paceline.cache.manager import CacheManager
from paceline.cache.page_keys import NO_KEYS, PageKeys
from paceline.core.errors import CapacityError, ConfigError, IntegrityError, RequestError
from paceline.core.request.sampling_params import SamplerTier, SamplingParams
from paceline.core.step import (
    FinishCode,
    JoinDelta,
    PageDelta,
    RowLogprobs,
    Step,
    StepLayout,
    StepOutputs,
)
from paceline.engine.grammar import Constraint
from paceline.engine.request import FinishReason, HostNeed, Request, RequestState
from paceline.engine.scheduler import RequestUpdate, Scheduler
from paceline.engine.scheduler_config import SchedulerConfig
from paceline.engine.step_plan import StepPlan

CONTEXT_LEN = 64
PAGE_SIZE = 4


class Loop:
    """The overlapped loop: outputs arrive one turn late."""

    def __init__(
        self,
        *,
        windows: tuple[int | None, ...] = (None,),
        state_every: int | None = None,
        num_pages: int = 65,
        caching: bool = True,
        **config,
    ):
        limits = {
            "max_running": 4,
            "max_batched_tokens": 32,
            "chunked_prefill_size": 16,
            "max_join_tokens": 1024,
            "reserve_ahead": 0,
            "admission_margin": 0,
        } | config
        specs = group_specs(windows, PAGE_SIZE)
        if state_every is not None:
            specs.append(state_spec(PAGE_SIZE, state_every))
        made = SchedulerConfig(**limits)
        self.cache = CacheManager(
            specs,
            [num_pages] * len(specs),
            max_extend_len=max(made.chunked_prefill_size, made.draft.reach),
            enable_prefix_cache=caching,
        )
        self.scheduler = Scheduler(made, self.cache)
        exact = HostNeed.EXACT_LENGTHS in made.host_needs or not made.draft.has_drafts
        self.device = FakeDevice(specs, [num_pages] * len(specs), shape=made.draft, exact=exact)
        self.requests: dict[str, Request] = {}
        self.in_flight: deque[tuple[Step, StepOutputs]] = deque()
        self.epoch = 0

    def add(
        self,
        name: str,
        num_prompt: int,
        max_tokens: int | None = 8,
        *,
        keys: PageKeys = NO_KEYS,
        constraint: Constraint | None = None,
        **params,
    ) -> Request:
        params.setdefault("temperature", 0.0)
        prompt = [ord(name[0]) % 50] * num_prompt
        request = Request.make(
            name,
            prompt,
            SamplingParams(max_tokens=max_tokens, **params),
            context_len=CONTEXT_LEN,
            keys=keys,
            constraint=constraint,
        )
        self.scheduler.add(request)
        self.requests[name] = request
        return request

    def launch(self) -> Step | None:
        self.epoch += 1
        step = self.scheduler.schedule(self.epoch)
        if step is not None:
            keys = {r.row: r.keys for r in self.requests.values() if r.row is not None}
            self.in_flight.append((step, self.device.execute(step, keys)))
        return step

    def process(self) -> list[RequestUpdate]:
        step, outputs = self.in_flight.popleft()
        updates = self.scheduler.process(step, outputs)
        self.device.retire(step.epoch)
        self.scheduler.check_integrity()
        return updates

    def turn(self) -> Step | None:
        step = self.launch()
        while len(self.in_flight) > (step is not None):
            self.process()
        return step

    def run(self) -> list[Step]:
        steps = []
        while self.scheduler.has_work:
            step = self.turn()
            steps += [step] if step is not None else []
        return steps

    def expected(self, name: str) -> list[int]:
        request = self.requests[name]
        return run_alone(
            request.prompt_ids, request.params, max_len=request.max_len, keys=request.keys
        )[0]


def extends(step: Step | None) -> dict[int, int]:
    """row -> tokens of a step."""
    assert step is not None
    return dict(zip(step.layout.rows, step.layout.extend_lens, strict=True))


def test_steady_decode_repeats_an_equal_layout_without_deltas():
    loop = Loop(reserve_ahead=256, num_pages=201)
    for name in "abc":
        loop.add(name, 5, max_tokens=40)
    loop.turn()
    loop.turn()
    steps = [loop.turn() for _ in range(30)]
    assert {step.layout for step in steps} == {
        StepLayout(rows=(1, 2, 3), extend_lens=(1, 1, 1), emits=(True, True, True))
    }
    assert {step.kind for step in steps} == {"decode step"}
    assert not any(step.deltas for step in steps)  # admission reserved for all that follows
    assert [s.prefix_lens_bound[0] for s in steps] == list(range(6, 36))


def test_a_prompt_is_computed_in_chunks_and_only_the_last_one_emits():
    loop = Loop()
    loop.add("a", 37)
    steps = [loop.turn() for _ in range(4)]
    assert [s.layout.extend_lens for s in steps] == [(16,), (16,), (5,), (1,)]
    assert [s.layout.emits for s in steps] == [(False,), (False,), (True,), (True,)]
    assert [s.prefix_lens_bound for s in steps] == [(0,), (16,), (32,), (37,)]
    assert [s.kv_lens_bound for s in steps] == [(16,), (32,), (37,), (38,)]
    assert [s.kind for s in steps] == ["ragged step"] * 3 + ["decode step"]


def test_decode_rows_come_before_chunks_before_new_requests():
    loop = Loop(max_batched_tokens=18)
    loop.add("a", 4)
    loop.turn()
    loop.add("b", 40)
    step = loop.turn()
    assert extends(step) == {1: 1, 2: 16}
    assert step.is_ragged
    loop.add("c", 10)
    assert extends(loop.turn()) == {1: 1, 2: 16, 3: 1}


def test_without_mixing_steps_alternate_between_prompts_and_decoding():
    loop = Loop(mix_prefill_and_decode=False)
    loop.add("a", 4)
    loop.turn()
    loop.add("b", 40)
    kinds = [loop.turn().kind for _ in range(6)]
    assert kinds == ["decode step", "ragged step"] * 3


def test_arrival_order_is_kept_when_the_head_of_the_queue_does_not_fit():
    loop = Loop(num_pages=16)
    loop.add("a", 30)
    loop.turn()
    loop.add("b", 40)
    loop.add("c", 4)
    loop.turn()
    assert loop.requests["c"].state is RequestState.WAITING
    loop.run()
    assert output_ids(loop.requests["c"]) == tuple(loop.expected("c"))


def test_a_join_carries_the_prompt_its_hit_and_its_pages():
    loop = Loop()
    loop.add("a", 10)
    loop.run()
    loop.add("aa", 10)
    step = loop.turn()
    join, pages = step.deltas
    assert isinstance(join, JoinDelta)
    assert isinstance(pages, PageDelta)
    assert (join.row, join.prefix_len, join.prompt_len, join.max_len) == (1, 8, 10, 18)
    assert join.token_ids == loop.requests["aa"].prompt_ids
    assert (pages.row, pages.group, pages.start, len(pages.page_ids)) == (1, 0, 0, 3)
    assert extends(step) == {1: 2}
    assert loop.requests["aa"].num_cached == 8


def test_admission_reserves_ahead_in_full_groups_and_one_chunk_in_windowed_ones():
    loop = Loop(windows=(None, 8), num_pages=201, reserve_ahead=16, chunked_prefill_size=8)
    loop.add("a", 24, max_tokens=40)
    step = loop.turn()
    held = {d.group: len(d.page_ids) for d in step.deltas if isinstance(d, PageDelta)}
    assert held == {0: (24 + 16) // PAGE_SIZE, 1: 8 // PAGE_SIZE}


def test_requests_that_join_in_one_step_are_bounded_by_their_tokens():
    loop = Loop(max_join_tokens=12, chunked_prefill_size=4)
    for name in "abc":
        loop.add(name, 6)
    loop.add("d", 20)
    joined = []
    while len(joined) < 4:
        step = loop.turn()
        tokens = [len(d.token_ids) for d in step.deltas if isinstance(d, JoinDelta)]
        assert sum(tokens) <= 12 or len(tokens) == 1
        joined += tokens
    assert joined == [6, 6, 6, 20]


def test_a_fully_cached_prompt_works_at_page_size_boundaries():
    for length in (4, 5, 8):
        loop = Loop()
        loop.add("a", length)
        loop.run()
        loop.add("aa", length)
        loop.run()
        assert loop.requests["aa"].num_cached == (length - 1) // PAGE_SIZE * PAGE_SIZE
        assert output_ids(loop.requests["aa"]) == output_ids(loop.requests["a"])


def test_no_step_runs_past_the_length_limit():
    loop = Loop()
    loop.add("a", 5, max_tokens=3)
    loop.add("b", 5, max_tokens=1)
    steps = loop.run()
    assert [len(step.layout.rows) for step in steps] == [2, 1, 1]
    assert loop.requests["a"].finish is loop.requests["b"].finish is FinishReason.LENGTH


def test_generation_ends_with_the_context():
    loop = Loop()
    loop.add("a", CONTEXT_LEN - 3, max_tokens=None)
    loop.run()
    assert loop.requests["a"].num_known == CONTEXT_LEN
    assert loop.requests["a"].finish is FinishReason.LENGTH


def test_tokens_after_a_stop_token_are_never_seen():
    loop = Loop()
    loop.add("a", 5, max_tokens=40, stop_token_ids=tuple(range(15)))
    loop.run()
    output = output_ids(loop.requests["a"])
    assert output == tuple(loop.expected("a"))
    assert len(output) < 40
    assert loop.requests["a"].finish is FinishReason.STOP


def test_a_row_is_reused_only_after_its_last_step_is_processed():
    loop = Loop(max_running=1)
    loop.add("a", 5)
    loop.turn()
    loop.launch()  # two steps of a in flight
    loop.scheduler.abort("a")
    loop.add("b", 5)
    assert loop.launch() is None
    loop.process()
    assert loop.launch() is None
    loop.process()
    assert extends(loop.launch()) == {1: 5}


def test_running_out_of_pages_preempts_the_request_that_arrived_last():
    loop = Loop(num_pages=16, caching=False)
    for name in "abc":
        loop.add(name, 10, max_tokens=12)
    steps = loop.run()
    assert [loop.requests[name].num_preemptions for name in "abc"] == [0, 0, 1]
    for name in "abc":
        assert output_ids(loop.requests[name]) == tuple(loop.expected(name))
    joins = [d for s in steps for d in s.deltas if isinstance(d, JoinDelta)]
    resumed = joins[-1]
    assert resumed.prompt_len == 10
    assert len(resumed.token_ids) > 10
    assert resumed.token_ids == tuple(loop.requests["c"].token_ids[: len(resumed.token_ids)])


def test_nobody_overtakes_a_preempted_request_that_still_drains():
    loop = Loop()
    loop.add("a", 10)
    loop.add("b", 10)
    loop.turn()
    loop.launch()
    loop.scheduler._preempt(loop.requests["b"], StepPlan(32))
    loop.add("c", 1, max_tokens=1)
    assert extends(loop.launch()) == {1: 1}
    loop.process()
    loop.process()
    assert list(extends(loop.launch()))[:2] == [1, loop.requests["b"].row]
    loop.run()
    assert output_ids(loop.requests["b"]) == tuple(loop.expected("b"))


def test_kv_still_in_flight_at_a_preemption_is_not_shared():
    loop = Loop()
    loop.add("a", 10)
    loop.add("b", 32)
    loop.launch()
    loop.launch()
    loop.process()
    b = loop.requests["b"]
    assert (b.kv_known, b.kv_bound) == (16, 32)
    loop.scheduler._preempt(b, StepPlan(32))
    assert cached_len(loop.cache, b.token_ids) == 16
    loop.run()
    assert output_ids(b) == tuple(loop.expected("b"))


def test_nobody_joins_while_a_running_request_waits_for_pages():
    loop = Loop(windows=(6,), num_pages=8)
    loop.add("a", 50)
    loop.turn()
    loop.add("b", 1)
    assert loop.turn() is None  # three pages are free, a wants four: b gets none of them
    assert loop.requests["b"].state is RequestState.WAITING
    loop.run()
    assert output_ids(loop.requests["b"]) == tuple(loop.expected("b"))


def test_a_running_request_waits_for_pages_that_are_on_their_way():
    loop = Loop(num_pages=7, caching=False)
    loop.add("a", 8, max_tokens=9)
    loop.add("b", 14, max_tokens=1)
    loop.turn()
    assert loop.turn() is None  # a wants a third page; b, which is complete, holds the rest
    loop.run()
    assert loop.requests["b"].num_preemptions == loop.requests["a"].num_preemptions == 0


def test_the_only_running_request_is_never_preempted():
    loop = Loop(num_pages=16, windows=(None, 6))
    loop.add("a", 30, max_tokens=30)
    loop.add("b", 30, max_tokens=30)
    loop.run()
    assert loop.requests["a"].num_preemptions == 0
    assert output_ids(loop.requests["b"]) == tuple(loop.expected("b"))


def test_a_long_request_runs_in_a_small_windowed_pool():
    loop = Loop(windows=(6,), num_pages=7, caching=False)
    loop.add("a", 32, max_tokens=32)
    loop.run()
    assert output_ids(loop.requests["a"]) == tuple(loop.expected("a"))


@pytest.mark.parametrize(("state_every", "found"), [(None, 36), (8, 32)])
def test_what_a_request_decoded_is_found_while_it_goes_on(state_every: int | None, found: int):
    loop = Loop(state_every=state_every)
    request = loop.add("a", 5, max_tokens=50)
    while request.num_known < 40:
        loop.turn()
    assert request.state is RequestState.RUNNING
    assert cached_len(loop.cache, request.token_ids) == found


def test_a_host_end_cuts_the_output_and_ignores_later_tokens():
    loop = Loop()
    loop.add("a", 5, max_tokens=30)
    for _ in range(9):
        loop.turn()
    assert loop.scheduler.finish_on_host("a", 3)
    loop.run()
    assert output_ids(loop.requests["a"]) == tuple(loop.expected("a")[:3])
    assert loop.requests["a"].finish is FinishReason.STOP
    assert not loop.scheduler.finish_on_host("a", 1)


def test_aborting_what_is_unknown_says_so():
    loop = Loop()
    assert not loop.scheduler.abort("nobody")
    loop.add("a", 5)
    assert loop.scheduler.abort("a")
    assert not loop.scheduler.has_work


def test_non_finite_logits_end_that_request_only_and_its_kv_is_forgotten():
    loop = Loop()
    loop.add("a", 17, seed=19)  # the fake device fails it at 19 known tokens
    loop.add("b", 17)
    loop.run()
    bad, good = loop.requests["a"], loop.requests["b"]
    assert bad.finish is FinishReason.ERROR
    assert bad.error == (
        "logits of request 'a' must be finite, got NaN or infinity; "
        "check the model's weights and dtype"
    )
    assert len(output_ids(bad)) == 2
    assert good.error is None
    assert output_ids(good) == tuple(loop.expected("b"))
    assert cached_len(loop.cache, bad.token_ids) == 0
    assert cached_len(loop.cache, good.token_ids) > 16


def test_the_sampler_and_logprobs_follow_the_rows_that_emit():
    loop = Loop()
    loop.add("a", 5)
    loop.add("b", 20, temperature=1.0, presence_penalty=1.0, logprobs=2)
    first, second = loop.turn(), loop.turn()
    assert (first.sampler, first.logprobs) == (SamplerTier.GREEDY, False)
    assert (second.sampler, second.logprobs) == (SamplerTier.BY_ROW, True)


def test_logprobs_reach_only_the_request_that_asked():
    loop = Loop()
    loop.add("a", 5, logprobs=0)
    loop.add("b", 5)
    row = RowLogprobs(chosen=-1.5, top_ids=(), top_values=())
    for _ in range(2):  # of their prompts, and of a token each
        step = loop.launch()
        outputs = StepOutputs(
            epoch=step.epoch,
            token_ids=((3,), (4,)),
            finish=(FinishCode.RUNNING, FinishCode.RUNNING),
            logprobs=((row,), (row,)),
        )
        updates = loop.scheduler.process(step, outputs)
        assert [u.logprobs for u in updates] == [(row,), ()]
        assert [u.new_token_ids for u in updates] == [(3,), (4,)]


def test_a_request_that_can_never_fit_is_refused_with_the_numbers():
    loop = Loop(num_pages=9)
    with pytest.raises(
        CapacityError,
        match=r"KV pages of request 'a' \(38 tokens\) must be at most \[8\] "
        r"\(all pages, per cache group\), got \[10\]; lower max_tokens",
    ):
        loop.add("a", 30)
    assert not loop.scheduler.has_work


def test_two_running_requests_of_one_id_are_refused():
    loop = Loop()
    loop.add("a", 5)
    with pytest.raises(RequestError, match="request_id must be new, got 'a', which is still"):
        loop.add("a", 5)


def test_outputs_out_of_order_are_refused():
    loop = Loop()
    loop.add("a", 5)
    loop.launch()
    loop.launch()
    step, outputs = loop.in_flight.pop()
    with pytest.raises(
        IntegrityError, match=r"must be 1 \(the oldest step in flight\), got step 2"
    ):
        loop.scheduler.process(step, outputs)


def test_a_lost_page_is_reported_instead_of_waiting_for_ever():
    loop = Loop(num_pages=9)
    loop.add("a", 20)
    loop.cache._groups[0].pool.reserve(8)
    with pytest.raises(IntegrityError, match="the scheduler must be able to run one of its"):
        loop.launch()
    loop = Loop(num_pages=9)
    loop.add("a", 4)
    loop.turn()
    loop.cache._groups[0].pool.reserve(7)
    with pytest.raises(IntegrityError, match="pages for the only running request 'a' must be"):
        loop.run()


def test_a_row_lost_from_the_books_is_reported():
    loop = Loop(max_running=2)
    loop.scheduler._roster._free_rows.pop()
    with pytest.raises(IntegrityError, match=r"rows of the scheduler must be \[1, 2\], got \[1\]"):
        loop.scheduler.check_integrity()


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("max_running", 0, "max_running must be at least 1, got 0; raise it"),
        ("chunked_prefill_size", 0, "chunked_prefill_size must be at least 1, got 0"),
        ("max_join_tokens", 0, "max_join_tokens must be at least 1, got 0"),
        ("max_batched_tokens", 3, "at least 4, got 3; a step must hold one token of every"),
        ("reserve_ahead", -1, "reserve_ahead must be at least 0, got -1"),
        ("admission_margin", -1, "admission_margin must be at least 0, got -1"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(name, value, text):
    good = {
        "max_running": 4,
        "max_batched_tokens": 32,
        "chunked_prefill_size": 16,
        "max_join_tokens": 64,
    }
    with pytest.raises(ConfigError, match=text):
        SchedulerConfig(**(good | {name: value}))


class Anything:
    """A grammar that allows every token."""

    is_done = False

    def __init__(self, heard=None):
        self.heard = [] if heard is None else heard

    def fork(self):
        return Anything(self.heard)

    def fill(self, words):
        words[:] = -1

    def accept(self, token):
        self.heard.append(token)


def anything(heard: list[int] | None = None) -> Constraint:
    """heard: gets the tokens that were said, but for the last."""
    return Constraint(Anything(heard), vocab_size=64, stop_ids=(), min_tokens=0)


def test_who_has_a_grammar_waits_for_its_last_token_and_others_go_on():
    loop = Loop()
    loop.add("a", 5, max_tokens=12)
    heard = []
    bound = loop.add("b", 5, max_tokens=6, constraint=anything(heard))
    steps = loop.run()
    assert [step.layout.rows for step in steps[:6]] == [(1, 2), (1,), (1, 2), (1,), (1, 2), (1,)]
    masks = [step.masks and [mask.row for mask in step.masks] for step in steps]
    assert masks[:4] == [[1], None, [1], None]
    assert [output_ids(r) for r in loop.requests.values()] == [
        tuple(loop.expected(name)) for name in "ab"
    ]
    assert heard == loop.expected("b")[:-1]
    assert bound.acceptance.fallbacks == {HostNeed.GRAMMAR.value}
    assert loop.requests["a"].acceptance.fallbacks == set()


def test_a_mask_comes_with_the_chunk_that_emits_and_no_other():
    loop = Loop()
    loop.add("a", 37, constraint=anything())
    steps = [loop.turn() for _ in range(3)]
    assert [step.masks is not None for step in steps] == [False, False, True]


def test_a_preempted_request_goes_on_with_its_mask():
    loop = Loop(num_pages=9, caching=False)
    loop.add("a", 8, max_tokens=16)
    bound = loop.add("b", 8, max_tokens=16, constraint=anything())
    loop.run()
    assert bound.num_preemptions > 0
    assert output_ids(bound) == tuple(loop.expected("b"))
