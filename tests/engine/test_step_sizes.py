"""Steps with prompts fill the sizes they are padded to, and nobody is served out of order."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from scheduler_world import group_specs, output_ids
from test_scheduler import Loop, extends

from paceline.cache.manager import CacheManager
from paceline.cache.page_keys import PageKeys
from paceline.core.modes import MaskKind
from paceline.core.request.blocks import Blocks
from paceline.core.request.sampling_params import SamplingParams
from paceline.core.step import FinishCode, JoinDelta, Step, StepOutputs
from paceline.engine.request import Request
from paceline.engine.scheduler import Scheduler
from paceline.engine.scheduler_config import SchedulerConfig
from paceline.engine.step_plan import left_over
from paceline.runner.recording.graph_sizes import GraphSizes

SIZES = (16, 24, 32, 48, 64)


@pytest.mark.parametrize(
    ("decoding", "prompts", "left"),
    [
        (4, 20, 0),  # 24: as it is
        (4, 25, 5),  # 29: 24 and 5
        (4, 40, 12),  # 44: 32 and 12
        (14, 9, 0),  # 23: 16 would be 2 and leave 7
        (22, 14, 4),  # 36: 32 and 4
        (4, 58, 0),  # 62: 64 is as good as full
        (4, 57, 13),  # 61: 48 and 13
        (0, 10, 0),  # below the smallest
        (4, 100, 0),  # beyond the largest: not padded
    ],
)
def test_a_step_ends_on_the_size_below_unless_it_leaves_more_than_it_computes(
    decoding: int, prompts: int, left: int
) -> None:
    assert left_over(SIZES, decoding=decoding, prompts=prompts) == left


def test_the_last_prompts_leave_their_tokens_and_take_them_up_first() -> None:
    loop = Loop(max_batched_tokens=64, chunked_prefill_size=64, padded_tokens=SIZES)
    loop.add("a", 4, max_tokens=20)
    loop.turn()
    loop.add("b", 20)
    loop.add("c", 14)
    assert extends(loop.turn()) == {1: 1, 2: 20, 3: 11}  # 32 of 35
    loop.add("d", 30)
    step = loop.turn()
    assert extends(step) == {1: 1, 2: 1, 3: 3, 4: 27}
    assert step.layout.emits == (True, True, True, False)
    loop.run()
    for name, request in loop.requests.items():
        assert list(output_ids(request)) == loop.expected(name)


def test_what_is_left_begins_with_a_whole_block() -> None:
    """35 tokens would be 32 and 3: a block of the last 6 is left, one of all tokens not cut."""
    for span, computed in (((28, 34), 28), ((0, 34), 34)):
        loop = Loop(max_batched_tokens=64, chunked_prefill_size=64, padded_tokens=SIZES)
        loop.add("a", 4, max_tokens=20)
        loop.turn()
        loop.add("b", 34, keys=PageKeys(blocks=Blocks((span,))))
        step = loop.turn()
        assert extends(step) == {1: 1, 2: computed}
        assert (step.mask is MaskKind.BLOCK) == (computed == 34)


def test_a_prompt_alone_is_computed_at_once() -> None:
    loop = Loop(max_batched_tokens=64, chunked_prefill_size=64, padded_tokens=SIZES)
    loop.add("a", 36)
    assert extends(loop.turn()) == {1: 36}


def test_rows_of_one_token_have_nothing_to_leave() -> None:
    """Three prompts of which the cache has all but the last token."""
    loop = Loop(max_batched_tokens=64, padded_tokens=(2, 8))
    loop.add("a", 9, max_tokens=1)
    loop.run()
    for _ in range(3):
        loop.add(f"a{_}", 9)
    assert extends(loop.turn()) == {1: 1, 2: 1, 3: 1}


def test_a_device_that_waits_begins_while_others_are_admitted() -> None:
    """Of 40 prompts with 32 of them, or as many as have 1,024 tokens; once a step is in flight, all
    join."""
    room = {"max_running": 90, "max_batched_tokens": 8192, "chunked_prefill_size": 8192}
    for length, first in ((40, 32), (30, 35), (20, 40)):
        loop = Loop(**room, max_join_tokens=8192, num_pages=2000)
        for index in range(40):
            loop.add(f"{index}", length, max_tokens=4)
        assert len(extends(loop.turn())) == first
        for index in range(40):
            loop.add(f"late {index}", length, max_tokens=4)
        assert len(extends(loop.turn())) == 80  # the first decode
        loop.run()
        assert len(loop.requests) == 80
        for name, request in loop.requests.items():
            assert list(output_ids(request)) == loop.expected(name)


def test_a_step_of_whole_prompts_begins_with_all_that_it_holds() -> None:
    """Whoever adds them launches the first while others are read (`Requests.run_filling`)."""
    room = {"max_running": 90, "max_batched_tokens": 8192, "chunked_prefill_size": 8192}
    loop = Loop(**room, max_join_tokens=8192, num_pages=2000, whole_prompts=True)
    for index in range(40):
        loop.add(f"{index}", 40, max_tokens=1)
    assert len(extends(loop.turn())) == 40


@dataclass
class Traffic:
    """The mix of requests at once: what steps held, what they were padded to, and when."""

    sizes: GraphSizes
    tokens: int = 0  # of padded steps with prompts
    padded: int = 0
    all_padded: int = 0  # of all steps
    num_steps: int = 0
    order: list[str] = field(default_factory=list)  # of first tokens
    first: list[int] = field(default_factory=list)  # tokens of all steps up to each
    rows: dict[int, list[int]] = field(default_factory=dict)  # row -> tokens known, at most

    def run(self, scheduler: Scheduler, requests: Sequence[Request]) -> None:
        """The overlapped loop, on a device that says nothing."""
        for request in requests:
            scheduler.add(request)
        in_flight = None
        while scheduler.has_work:
            self.num_steps += 1
            step = scheduler.schedule(self.num_steps)
            for update in scheduler.process(*in_flight) if in_flight is not None else ():
                if update.request.num_known == update.request.prompt_len + 1:
                    self.order.append(update.request.request_id)
                    self.first.append(self.all_padded)
            in_flight = None if step is None else (step, self.execute(step))

    def execute(self, step: Step) -> StepOutputs:
        self.note(step)
        for delta in step.deltas:
            if isinstance(delta, JoinDelta):
                self.rows[delta.row] = [len(delta.token_ids), delta.max_len]
        tokens, codes = [], []
        for row, emits in zip(step.layout.rows, step.layout.emits, strict=True):
            known, most = self.rows[row]
            speaks = emits and known < most
            self.rows[row][0] += speaks
            tokens.append((7,) if speaks else ())
            codes.append(FinishCode.LENGTH if speaks and known + 1 == most else FinishCode.RUNNING)
        return StepOutputs(
            epoch=step.epoch, token_ids=tuple(tokens), finish=tuple(codes), logprobs=None
        )

    def note(self, step: Step) -> None:
        num_reqs, num_tokens = step.layout.num_reqs, step.layout.num_tokens
        if not step.is_ragged:
            size = self.sizes.pad(num_reqs, 1)
        else:
            size = self.sizes.pad_ragged(num_reqs, num_tokens)
            self.tokens += 0 if size is None else num_tokens
            self.padded += 0 if size is None else size.tokens
        self.all_padded += num_tokens if size is None else size.tokens


def traffic(*, fills: bool, max_running: int, num_requests: int) -> Traffic:
    """Prompts of 16 to 2,048 tokens (mean about 490), outputs of 16 to 1,024 (mean about 240)."""
    rng = random.Random(0)

    def draw(mean: int, most: int) -> int:
        return max(16, min(most, round(rng.lognormvariate(math.log(mean) - 0.4, 0.9))))

    sizes = GraphSizes.up_to(max_running, max_tokens=1024)
    config = SchedulerConfig(
        max_running=max_running,
        max_batched_tokens=8192,
        chunked_prefill_size=8192,
        max_join_tokens=65536,
        padded_tokens=sizes.tokens if fills else (),
    )
    cache = CacheManager(
        group_specs((None,), 16), [60_000], max_extend_len=8192, enable_prefix_cache=False
    )
    found = Traffic(sizes)
    requests = [
        Request.make(
            f"{index}",
            [1] * draw(490, 2048),
            SamplingParams(temperature=0.0, max_tokens=draw(240, 1024)),
            context_len=20_480,
        )
        for index in range(num_requests)
    ]
    found.run(Scheduler(config, cache), requests)
    return found


def test_traffic_wastes_little_of_what_it_pays_for_and_nobody_overtakes() -> None:
    """What decision 042 states, of a quarter of the requests; this file as a script: of all."""
    before = traffic(fills=False, max_running=64, num_requests=128)
    after = traffic(fills=True, max_running=64, num_requests=128)
    assert 1 - before.tokens / before.padded > 0.1
    assert 1 - after.tokens / after.padded < 0.03
    assert after.all_padded < before.all_padded
    assert sum(after.first) <= sum(before.first)  # first tokens come earlier on average
    assert after.order == before.order == sorted(after.order, key=int)


if __name__ == "__main__":
    for fills in (False, True):
        done = traffic(fills=fills, max_running=256, num_requests=512)
        print(
            f"fills={fills}: {done.tokens} tokens with prompts padded to {done.padded} "
            f"({1 - done.tokens / done.padded:.1%} wasted), {done.all_padded} in all of "
            f"{done.num_steps} turns; {sum(done.first) / len(done.first):.0f} before a first token"
        )
