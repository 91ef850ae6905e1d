"""What the serving path does costs what changed, not what there is.

Work is counted in operations of the interpreter, and in comparisons of requests, which a list makes
without it.  Each is done with `FEW` things around and with 8 times as many.
"""

import gc
import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from scheduler_world import FakeDevice, group_specs
from test_engine_turns import PAGE_SIZE, Launched, Letters

from paceline.cache.manager import CacheManager
from paceline.cache.page_keys import NO_KEYS, PageKeys
from paceline.cache.prefix_tree import PrefixTree
from paceline.core.errors import IntegrityError
from paceline.core.request.sampling_params import SamplingParams
from paceline.core.step import Step
from paceline.engine.engine import Engine
from paceline.engine.loop import overlapped_turn
from paceline.engine.request import Request
from paceline.engine.scheduler import Scheduler
from paceline.engine.scheduler_config import SchedulerConfig

FEW, MANY = 60, 480
CONTEXT_LEN = 64
ONE = SamplingParams(temperature=0.0, seed=-1, max_tokens=1)


@pytest.fixture(autouse=True)
def books_are_checked() -> None:
    """Here engines run as users run them."""


class ComparedRequest(Request):
    """Counts with whom it is compared."""

    num_compared = 0

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        ComparedRequest.num_compared += 1
        return self is other


def work(action: Callable[[], object]) -> int:
    """Operations and comparisons of an action."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before, others = ComparedRequest.num_compared, sys.gettrace()
    gc.disable()  # a collection would run, and count, what other tests left to be finalised
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(others)
        gc.enable()
    return count + ComparedRequest.num_compared - before


class World:
    """An engine around the fake device, with room for `num_pages` pages in its cache."""

    def __init__(self, num_pages: int, *, sanitize: bool = False) -> None:
        specs = group_specs((None,), PAGE_SIZE)
        config = SchedulerConfig(
            max_running=4,
            max_batched_tokens=64,
            chunked_prefill_size=8,
            max_join_tokens=1024,
            reserve_ahead=0,
            admission_margin=0,
        )
        self.cache = CacheManager(specs, [num_pages + 1], max_extend_len=8)
        self.scheduler = Scheduler(config, self.cache)
        self.device = FakeDevice(specs, [num_pages + 1])
        self.engine = Engine(
            self.scheduler,
            self,
            Letters(),
            turn=overlapped_turn,
            context_len=CONTEXT_LEN,
            sanitize=sanitize,
        )
        self.keys: dict[int, PageKeys] = dict.fromkeys(range(5), NO_KEYS)

    def launch(self, step: Step) -> Launched:
        """As FakeRunner does, without the device's own work being counted."""
        trace = sys.gettrace()
        sys.settrace(None)
        self.device.retire(step.epoch - 2)
        launched = Launched(step, self.device.execute(step, self.keys))
        sys.settrace(trace)
        return launched

    def fill(self, num_pages: int) -> None:
        """That many cached pages, of prompts of their own."""
        for index in range(num_pages):
            self.engine.add(f"filler-{index}", [index % 50, index // 50, 7, 7, 7], ONE)
            self.run()
        (group,) = self.cache.stats().groups
        assert group.cached == num_pages

    def run(self) -> None:
        while self.engine.has_work:
            self.engine.step()


def request(name: str, prompt: list[int], **params: Any) -> ComparedRequest:
    made = ComparedRequest.make(
        name, prompt, SamplingParams(temperature=0.0, seed=-1, **params), context_len=CONTEXT_LEN
    )
    assert isinstance(made, ComparedRequest)
    return made


def queue_and_abort(num: int) -> float:
    """Work per request, aborted in any order."""
    scheduler = World(16).scheduler
    requests = [request(f"r{index}", [5] * 9) for index in range(num)]
    names = [each.request_id for each in requests]
    random.Random(0).shuffle(names)

    def act() -> None:
        for each in requests:
            scheduler.add(each)
        for name in names:
            assert scheduler.abort(name)

    found = work(act) / num
    assert scheduler.num_waiting == 0
    return found


def turn_behind(num: int) -> float:
    """Work of a turn while `num` siblings wait for their leader's prompt."""
    world = World(64)
    leader = request("leader", [5] * 40, max_tokens=2)
    world.scheduler.add(leader)
    for index in range(num):
        world.scheduler.add(leader.sibling(index + 1))
    assert world.scheduler.num_waiting == num + 1
    world.engine.step()
    return work(world.engine.step)


def evict_one(num: int) -> float:
    """Work of evicting a page of a full tree, its path used many times before."""
    tree = filled(num)
    return work(lambda: tree.evict(0, 1))


def use_one(num: int) -> float:
    """Work of locking a page of a tree, and of giving it back, over and over."""
    tree = filled(num)
    (node,) = tree.walk([0, 0], NO_KEYS, max_pages=1)

    def act() -> None:
        tree.lock(node, 0)
        tree.unlock(node, 0)

    return max(work(act) for _ in range(400))


def filled(num: int) -> PrefixTree:
    """A tree of `num` unlocked pages, some of them used often."""
    tree = PrefixTree(2, [True])
    root = tree.root(NO_KEYS)
    for index in range(num):
        node = tree.child(root, (index, index))
        tree.put(node, 0, index + 1)
        tree.unlock(node, 0)
    for index in range(3 * num):
        (node,) = tree.walk([index % 7] * 2, NO_KEYS, max_pages=1)
        tree.lock(node, 0)
        tree.unlock(node, 0)
    return tree


def last_turn(num: int) -> float:
    """Work of the turn in which an engine with `num` cached pages runs empty."""
    world = World(num + 16)
    world.fill(num)
    world.engine.add("last", [49, 49, 49], ONE)
    turns = []
    while world.engine.has_work:
        turns.append(work(world.engine.step))
    return max(turns[-2:])


def whole_request(num: int) -> float:
    """Work of all turns of a request in a full cache of `num` pages: it evicts to run."""
    world = World(num)
    world.fill(num - 1)
    world.engine.add("last", [49] * 20, ONE)
    found = work(world.run)
    assert world.cache.stats().evicted_pages
    return found


@pytest.mark.parametrize(
    "measure", [queue_and_abort, turn_behind, evict_one, use_one, last_turn, whole_request]
)
def test_work_does_not_grow_with_what_is_there(measure: Callable[[int], float]) -> None:
    few, many = measure(FEW), measure(MANY)
    print(f"{measure.__name__}: {few:.0f} operations among {FEW}, {many:.0f} among {MANY}")
    assert many <= 1.25 * few + 50


def test_the_books_are_looked_at_only_under_the_sanitizer() -> None:
    for sanitize in (False, True):
        world = World(16, sanitize=sanitize)
        world.engine.add("a", [5] * 9, ONE)
        world.engine.step()
        world.scheduler._roster._free_rows.pop()
        if sanitize:
            with pytest.raises(IntegrityError, match="rows of the scheduler"):
                world.run()
        else:
            world.run()


def test_a_first_token_leaves_before_its_prompt_is_put_into_the_prefix_tree() -> None:
    world = World(16)
    tracker = world.engine.add("long", [5] * 8, SamplingParams(temperature=0.0, seed=-1))
    while not tracker.num_tokens:
        world.engine.step()
    tree = world.cache._tree
    assert not list(tree.nodes())
    world.engine.step()
    assert sum(node.parent is not None for node in tree.nodes()) == 8 // PAGE_SIZE
