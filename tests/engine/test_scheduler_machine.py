"""A Hypothesis state machine over scheduler, cache groups and prefix tree.

Each example draws a small world (page size, windows, pools too small for the load, chunking, delay)
and then acts: add, step, abort, host finish, drain.  Whatever happens, every finished request must
have said what the model says alone, and the books must balance after every action.
"""

from collections import Counter, deque
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from scheduler_world import (
    FakeDevice,
    encoder_spec,
    group_specs,
    output_ids,
    run_alone,
    state_spec,
)
from test_scheduler import anything

from cache_probe import num_shared_pages
from paceline.cache.manager import CacheManager
from paceline.cache.overlay_slots import OverlaySlots
from paceline.cache.page_keys import PageKeys, media_of
from paceline.core.draft_shape import NO_DRAFTS
from paceline.core.errors import CapacityError
from paceline.core.model.cache_groups import CacheGroupSpec
from paceline.core.model.config import CacheKind
from paceline.core.modes import MaskKind
from paceline.core.request.blocks import Blocks
from paceline.core.request.input_rows import EncoderInput, InputRows
from paceline.core.request.sampling_params import SamplingParams
from paceline.core.step import FinishCode, JoinDelta
from paceline.engine.request import FinishReason, HostNeed, Request, RequestState
from paceline.engine.scheduler import Scheduler
from paceline.engine.scheduler_config import SchedulerConfig

CONTEXT_LEN = 48
REASONS = {
    FinishCode.STOP_TOKEN: FinishReason.STOP,
    FinishCode.LENGTH: FinishReason.LENGTH,
    FinishCode.NON_FINITE: FinishReason.ERROR,
}
BLOCKS = ((0, 2), (2, 5), (6, 11))
NEVER_POISONED = -1  # a seed that is no number of tokens
LEAST = {"actions": 25_000, "evictions": 500, "preemptions": 200, "aborts while sharing": 200}
LEAST |= {"scored prompts": 500, "siblings": 500, "states kept": 500, "states found": 200}
LEAST |= {"media": 500, "overlay steps": 500, "without rows": 2_500}
LEAST |= {"encoders": 500, "encoder waits": 50, "steps that see ahead": 300}
ENCODERS = [(), (5,), (), (7, 7), (1,)]  # rows at most, of each group
SHARES = [0.25, pytest.param(1.0, marks=pytest.mark.slow)]  # of all examples

WORLD = {
    "page_size": st.sampled_from([1, 2, 4]),
    "windows": st.sampled_from(
        [(None,), (None,), (None, 5), (None, 9), (6,), (None, 1, 7), (), ()]
    ),  # (): no layer keeps rows, but for a drafter's
    "pages": st.integers(0, 8),
    "max_running": st.integers(2, 6),
    "chunk": st.sampled_from([3, 4, 8, 16]),
    "budget": st.sampled_from([6, 8, 24]),
    "delay": st.sampled_from([1, 1, 1, 0, 2]),
    "mix": st.sampled_from([True, True, False]),
    "caching": st.sampled_from([True, True, True, False]),
    "ahead": st.sampled_from([0, 6]),
    "tight": st.sampled_from([False, False, True]),
    "pages_of_states": st.sampled_from(
        [(), (), (), (1,), (2,), (3,), (2, 2)]
    ),  # apart; of each group
    "spare_slots": st.integers(0, 6),
    "overlay": st.sampled_from([40, 24, 17]),
}


class SchedulerMachine(RuleBasedStateMachine):
    """One engine loop around the fake device."""

    tally: Counter[str]
    shape = NO_DRAFTS
    draft_specs: tuple[CacheGroupSpec, ...] = ()
    exact_lengths = False

    @initialize(**WORLD)
    def build(
        self,
        page_size,
        windows,
        pages,
        max_running,
        chunk,
        budget,
        delay,
        mix,
        caching,
        ahead,
        tight,
        pages_of_states,
        spare_slots,
        overlay,
    ):
        pages_of_states = pages_of_states if windows else pages_of_states or (1,)
        encoders = ENCODERS[(spare_slots + 2 * pages) % len(ENCODERS)]
        self.encoder_len = max(encoders, default=0)
        states = [state_spec(page_size, pages * page_size) for pages in pages_of_states]
        encoded = [encoder_spec(page_size, most) for most in encoders]
        self.specs = [*group_specs(windows, page_size), *states, *encoded, *self.draft_specs]
        reach = self.shape.reach
        max_extend = max(chunk, reach)
        # About one long request: everything else lives from eviction, waiting and preemption.
        tokens = CONTEXT_LEN // 2 + reach + 8 * pages
        num_pages = [1 + -(-tokens // page_size) for _ in self.specs]
        if tight:  # windowed pools as small as one request alone can live with
            spans = [tokens if s.window is None else s.window - 1 + max_extend for s in self.specs]
            num_pages = [3 + -(-span // page_size) for span in spans]
        # No more than one request alone needs, up to a slot for each and some for others to find.
        is_state = [spec.kind is CacheKind.STATE for spec in self.specs]
        num_pages = [
            3 + spare_slots if state else pages
            for state, pages in zip(is_state, num_pages, strict=True)
        ]
        num_pages = [  # and rows of three encoders
            2 + -(-3 * spec.encoder_len // page_size) if spec.encoder_len else pages
            for spec, pages in zip(self.specs, num_pages, strict=True)
        ]
        self.cache = CacheManager(
            self.specs, num_pages, max_extend_len=max_extend, enable_prefix_cache=caching
        )
        config = SchedulerConfig(
            draft=self.shape,
            host_needs=frozenset({HostNeed.EXACT_LENGTHS} if self.exact_lengths else ()),
            max_running=max_running,
            max_batched_tokens=budget,
            chunked_prefill_size=chunk,
            max_join_tokens=2 * CONTEXT_LEN,
            reserve_ahead=ahead,
            admission_margin=page_size,
            mix_prefill_and_decode=mix,
            padded_tokens=(4, 6, 8, 16) if ahead else (),
        )
        self.overlay = OverlaySlots(overlay)
        self.scheduler = Scheduler(config, self.cache, self.overlay)
        exact = self.exact_lengths or not self.shape.has_drafts
        self.device = FakeDevice(self.specs, num_pages, shape=self.shape, exact=exact)
        self.delay = delay
        self.in_flight = deque()
        self.epoch = 0
        self.num_drained = 0
        self.requests: dict[str, Request] = {}
        self.unfinished: dict[str, Request] = {}  # and those that ended since `live` was asked
        self.keys: dict[str, PageKeys] = {}
        self.expected: dict[str, tuple[list[int], FinishCode]] = {}
        self.streamed: dict[str, list[int]] = {}
        self.scored: dict[str, list[float]] = {}  # prompt tokens, by their scores

    def teardown(self):
        if hasattr(self, "scheduler"):
            self.run_to_the_end()
            self.tally["evictions"] += self.cache.stats().evicted_pages
            self.tally["hit tokens"] += self.cache.stats().hit_tokens

    @rule(
        count=st.integers(1, 3),
        family=st.integers(0, 1),
        shared=st.sampled_from([0, 5, 12, 16, 20]),
        own=st.integers(0, 6),
        max_tokens=st.sampled_from([8, None, 1, 5, 12, 16, 20, 24]),
        stops=st.integers(0, 2),
        poisoned_at=st.sampled_from([None] * 12 + [20]),
        salt=st.sampled_from([None, None, None, "tenant"]),
        adapter=st.sampled_from([None, None, None, "lora"]),
        media=st.sampled_from([(), (), (2, 9), (0, 3, 6, 20)]),
        turns=st.sampled_from([2, 1, 0]),
        siblings=st.sampled_from([0, 0, 0, 1, 3]),
        scores=st.sampled_from([None, None, 0]),
    )
    def add(
        self,
        count,
        family,
        shared,
        own,
        max_tokens,
        stops,
        poisoned_at,
        salt,
        adapter,
        media,
        turns,
        siblings,
        scores,
    ):
        """A few requests that begin alike: `shared` tokens of one family, then their own."""
        for _ in range(count):
            name = f"r{len(self.requests)}"
            tail = [len(self.requests) * 7 % 50] * own
            prompt = tuple([(family * 11 + i * i) % 50 for i in range(shared)] + tail) or (family,)
            params = SamplingParams(
                max_tokens=max_tokens,
                temperature=0.0,
                stop_token_ids=tuple(range(stops)),
                seed=NEVER_POISONED if poisoned_at is None else poisoned_at,
                prompt_logprobs=scores,
                speculative=len(self.requests) % 4 != 3,
            )
            rows = self.rows_of(prompt, media)
            blocks = self.blocks_of(prompt)
            keys = PageKeys(salt, adapter, media_of(rows, blocks, prompt), blocks)
            given = self.encoder_of()
            first = Request.make(
                name,
                prompt,
                params,
                context_len=CONTEXT_LEN,
                keys=keys,
                input_rows=rows,
                constraint=anything() if len(self.requests) % 8 == 6 else None,
                encoder=given,
            )
            if given is not None:
                keys = replace(keys, salt=f"{salt}{given.media_hash}")
            for request in [first, *(first.sibling(i + 1) for i in range(siblings))]:
                self.queue(request, keys)
        for _ in range(turns):
            self.turn()
        self.after("add")

    def encoder_of(self):
        """Of two tunes and of any length that the world's encoder has; of each fifth none."""
        number = len(self.requests) % 5
        if not number or not self.encoder_len:
            return None
        num_rows = min((0, 1, 4, 7)[number - 1], self.encoder_len)
        name = f"{'t' if len(self.requests) % 3 else 'u'}{num_rows}"
        self.tally["encoders"] += 1
        rows = [(name, place) for place in range(num_rows)]
        return EncoderInput(num_rows=num_rows, media_hash=name, data=rows)

    def blocks_of(self, prompt):
        """Of every fifth request, where no state is kept: nobody's states see ahead."""
        spans = BLOCKS if len(self.requests) % 5 == 4 else ()
        fitting = tuple(span for span in spans if span[1] <= len(prompt))
        return Blocks(fitting) if fitting and not self.cache.has_states else None

    def rows_of(self, prompt, edges):
        """Of two pictures and of any length, where a prompt has tokens for it."""
        spans = zip(edges[::2], edges[1::2], strict=True)
        spans = [(start, min(stop, len(prompt))) for start, stop in spans if start < len(prompt)]
        self.tally["media"] += len(spans)
        picture = "m" if len(self.requests) % 3 else "n"
        return tuple(self.rows(start, stop - start, picture) for start, stop in spans)

    def rows(self, start, num, picture):
        name = f"{picture}{num}"
        rows = [(name, place) for place in range(num)]
        return InputRows(start=start, num_tokens=num, media_hash=name, rows=rows)

    def queue(self, request, keys):
        try:
            self.scheduler.add(request)
        except CapacityError:
            self.tally["refused"] += 1
            return
        name = request.request_id
        self.requests[name] = self.unfinished[name] = request
        self.keys[name] = keys  # as it was asked: a request may have lost its own
        self.streamed[name] = []
        self.scored[name] = []
        self.expected[name] = run_alone(
            request.prompt_ids, request.params, max_len=request.max_len, keys=keys
        )

    @precondition(lambda self: self.scheduler.has_work)
    @rule(turns=st.integers(1, 3))
    def step(self, turns):
        for _ in range(turns):
            self.turn()
            self.scheduler.check_integrity()
        self.after("step")

    @precondition(lambda self: self.live())
    @rule(pick=st.integers(0, 1000), any_state=st.booleans())
    def abort(self, pick, any_state):
        """Rather a request that shares pages with another one, or one in any state."""
        sharing = [] if any_state else self.sharing()
        names = sharing or self.live()
        name = names[pick % len(names)]
        self.tally["aborts while sharing"] += name in self.sharing()
        assert self.scheduler.abort(name)
        assert not self.scheduler.abort(name)
        self.check_ended(self.requests[name])
        self.after("abort")

    @precondition(lambda self: self.live())
    @rule(pick=st.integers(0, 1000))
    def abort_while_sharing(self, pick):
        """The same as `abort`, but not before pages are shared, where that comes soon."""
        for _ in range(6):
            if self.sharing() or not self.live():
                break
            self.turn()
        if self.live():
            self.abort(pick=pick, any_state=False)

    @precondition(lambda self: any(output_ids(self.requests[name]) for name in self.live()))
    @rule(pick=st.integers(0, 1000), cut=st.integers(0, 3))
    def finish_on_host(self, pick, cut):
        names = [name for name in self.live() if output_ids(self.requests[name])]
        request = self.requests[names[pick % len(names)]]
        keep = max(0, len(output_ids(request)) - cut)
        assert self.scheduler.finish_on_host(request.request_id, keep)
        assert len(output_ids(request)) == keep
        self.check_ended(request)
        self.after("host finish")

    @precondition(lambda self: len(self.requests) - self.num_drained >= 20)
    @rule()
    def drain(self):
        """Now and then, let everything finish."""
        self.run_to_the_end()
        self.num_drained = len(self.requests)
        self.after("drain")

    def live(self):
        asked = self.unfinished.items()
        self.unfinished = {n: r for n, r in asked if r.state is not RequestState.FINISHED}
        return list(self.unfinished)

    def sharing(self):
        running = [n for n in self.live() if self.requests[n].state is RequestState.RUNNING]
        return [name for name in running if num_shared_pages(self.cache, name)]

    def turn(self):
        """One turn of the loop: launch, then take in the outputs of `delay` steps ago."""
        self.epoch += 1
        step = self.scheduler.schedule(self.epoch)
        self.note_waits()
        if step is not None:
            joins = [delta for delta in step.deltas if isinstance(delta, JoinDelta)]
            keys = {
                r.row: self.keys[name]
                for name, r in (self.unfinished.items() if joins else ())
                if r.state is RequestState.RUNNING
            }
            self.check_blocks(step)
            outputs = self.device.execute(step, keys)
            self.in_flight.append((step, outputs))
            self.tally["states kept"] += sum(map(bool, outputs.state_lens or ()))
            if outputs.state_lens is not None:
                self.tally["states found"] += sum(delta.prefix_len > 0 for delta in joins)
            self.tally["rounds"] += step.is_round
            self.tally["joins"] += len(joins)
            self.tally["overlay steps"] += step.has_overlay
        while len(self.in_flight) > (self.delay if step is not None else 0):
            self.process()

    def note_waits(self):
        """Whether pages of an encoder's rows are all that the first in the queue lacks."""
        first = self.scheduler._roster.waiting.first
        if first is not None and first.encoder_len and self.scheduler._roster.has_free_row:
            groups = self.cache._encoders
            self.tally["encoder waits"] += not all(g.can_admit(first.encoder_len) for g in groups)

    def check_blocks(self, step):
        """No hit and no chunk ends within a block, and steps with tokens of one see ahead."""
        running = [r for r in self.unfinished.values() if r.state is RequestState.RUNNING]
        blocks = {r.row: r.keys.blocks for r in running if r.keys.blocks is not None}
        sees_ahead = False
        places = zip(step.layout.rows, step.prefix_lens_bound, step.layout.extend_lens, strict=True)
        for row, prefix, extend in places:
            if row in blocks:
                assert blocks[row].whole(prefix) == prefix
                assert step.is_round or blocks[row].whole(prefix + extend) == prefix + extend
                sees_ahead |= blocks[row].meets(prefix, prefix + extend)
        assert (step.mask is MaskKind.BLOCK) == sees_ahead
        self.tally["steps that see ahead"] += sees_ahead

    def process(self):
        step, outputs = self.in_flight.popleft()
        for update in self.scheduler.process(step, outputs):
            request = update.request
            self.streamed[request.request_id].extend(update.new_token_ids)
            assert self.streamed[request.request_id] == list(output_ids(request))
            self.scored[request.request_id] += [row.chosen for row in update.prompt_logprobs]
            if update.finish is not None:
                self.check_finished(request)
        self.device.retire(step.epoch)

    def run_to_the_end(self):
        for _ in range(500 + 100 * len(self.live())):
            if not self.scheduler.has_work:
                break
            self.turn()
        assert not self.scheduler.has_work, "requests starve"
        for group in self.cache.stats().groups:
            assert group.owned == group.queued == 0
            assert group.free + group.cached == group.total
        assert self.overlay.counts().free == self.overlay.total
        self.scheduler.check_integrity()

    def check_finished(self, request):
        output, code = self.expected[request.request_id]
        assert list(output_ids(request)) == output
        assert request.finish is REASONS[code]
        assert (request.error is None) == (code is not FinishCode.NON_FINITE)
        wanted = () if request.params.prompt_logprobs is None else request.prompt_ids[1:]
        assert self.scored[request.request_id] == list(wanted)
        self.tally["scored prompts"] += bool(wanted)
        self.tally["siblings"] += request.leader is not None
        self.tally["finished"] += 1
        self.check_rounds(request)
        self.tally["preemptions"] += request.num_preemptions

    def check_rounds(self, request):
        """Every token but those of prefill and plain steps is one of a round's."""
        told = request.acceptance
        if self.shape is None or not request.params.speculative:
            assert told.rounds == told.drafted == 0
            return
        assert told.drafted == told.rounds * (self.shape.num_draft_tokens - 1)
        assert told.rounds + sum(told.accepted) <= len(output_ids(request))
        self.tally["accepted drafts"] += sum(told.accepted)
        self.tally["round waits"] += bool(told.fallbacks)

    def check_ended(self, request):
        output, _ = self.expected[request.request_id]
        assert list(output_ids(request)) == output[: len(output_ids(request))]
        self.tally["preemptions"] += request.num_preemptions

    def after(self, action):
        self.tally["actions"] += 1
        self.tally["without rows"] += self.specs[0].kind is CacheKind.STATE
        self.tally[action] += 1
        self.scheduler.check_integrity()


def rare(machine, least, share, *, max_examples, steps):
    """Run a machine; what happened less often than a share of `least`, and how often.

    Hypothesis takes constants of all modules that are loaded, so what is drawn is not the same in
    every process: where something is rare, other examples are drawn besides, at most twice.
    """
    tally: Counter[str] = Counter()
    for number in range(3):
        draw(machine, tally, seed(number), max_examples=max_examples, steps=steps)
        found = {name: tally[name] for name in least if tally[name] < share * least[name]}
        if not found:
            break
    print(dict(tally))
    return found


def draw(machine, tally, seeded, *, max_examples, steps):
    """Add to `tally` what happens in a machine's examples."""
    run_state_machine_as_test(
        seeded(type("TalliedMachine", (machine,), {"tally": tally})),
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("share", SHARES)
def test_every_request_says_what_the_model_says_alone_whatever_happens(share):
    assert rare(SchedulerMachine, LEAST, share, max_examples=int(320 * share), steps=100) == {}
