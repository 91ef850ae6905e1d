"""Graphs: which are captured, when, under which key; and that replay is the same step as eager."""

from collections import Counter
from collections.abc import Callable
from copy import copy

import pytest
import torch
from host_planned_backend import HostPlannedBackend
from tiny_runner import CONTEXT, Driver, TinyModel, random_prompts, with_logprobs

from covers import Cell, cell_name, pairwise
from paceline.cache.pool import KVPool
from paceline.core.draft_shape import DraftShape
from paceline.core.errors import GraphGuardError, IntegrityError
from paceline.core.events import Event, EventLog
from paceline.core.modes import POOLS, MaskKind
from paceline.core.request.sampling_params import SamplerTier, SamplingParams
from paceline.core.step import FinishCode, RowLogprobs
from paceline.runner.build import largest_round
from paceline.runner.extents import PaddedSize
from paceline.runner.recording.graph_sizes import GraphSizes
from paceline.runner.recording.graphs import CapturePolicy, Graph, GraphKey, GraphStore
from paceline.runner.recording.guard import Guard
from paceline.runner.runner_config import RunnerConfig
from paceline.runner.streams import DeferredStream

LENGTHS = (5, 11, 3, 8, 17, 4, 9, 6)


def key(padded_reqs: int, **changes: object) -> GraphKey:
    fields: dict[str, object] = {
        "extend_len": 1,
        "ragged_tokens": None,
        "mask": MaskKind.CAUSAL,
        "backend": "torch",
        "sampler": SamplerTier.GREEDY,
        "logprobs": False,
        "taps": (),
    }
    return GraphKey(padded_reqs=padded_reqs, **(fields | changes))  # type: ignore[arg-type]


def start(driver: Driver, rows: range = range(1, 9)) -> dict[int, list[int]]:
    prompts = random_prompts(LENGTHS)
    chosen = {row: prompts[row - 1] for row in rows}
    driver.prefill(chosen)
    return chosen


# --- sizes, keys, the store -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_reqs", "sizes"),
    [
        (1, (1,)),
        (5, (1, 2, 3, 4, 5)),
        (8, (1, 2, 3, 4, 6, 8)),
        (16, (1, 2, 3, 4, 6, 8, 12, 16)),
        (40, (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40)),
        (41, (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 41)),
        (
            200,
            (1, 2, 3, 4, 6, 8, 12, *range(16, 64, 8), *range(64, 128, 16), 128, 160, 192, 200),
        ),
    ],
)
def test_graph_sizes_ascend_to_the_largest(max_reqs: int, sizes: tuple[int, ...]) -> None:
    assert GraphSizes.up_to(max_reqs).sizes == sizes


@pytest.mark.parametrize("max_reqs", [1, 7, 16, 50])
def test_padding_is_the_smallest_size_that_holds_the_requests(max_reqs: int) -> None:
    sizes = GraphSizes.up_to(max_reqs)
    for reqs in range(1, max_reqs + 1):
        least = min(size for size in sizes.sizes if size >= reqs)
        assert sizes.pad(reqs, 3) == PaddedSize.uniform(least, 3)
    assert sizes.pad(max_reqs + 1, 1) is None


class SizedFactory:
    """Makes graphs that hold 10 bytes per function and never replay."""

    needs_warm_up = False

    def __init__(self, *, shares_memory: bool = False) -> None:
        self.shares_memory = shares_memory
        self.captured = 0
        self.checked: list[bool] = []

    def make(self, *, checked: bool) -> Graph:
        self.checked.append(checked)
        factory = self

        class Sized:
            def capture(self, function: Callable[[], None]) -> None:
                factory.captured += 1

            def replay(self) -> None:
                raise AssertionError("not replayed here")

        return Sized()

    def bytes_held(self) -> int:
        return 10 * self.captured


def test_one_size_of_each_program_is_checked_for_host_reads() -> None:
    factory = SizedFactory()
    store = GraphStore(factory, reserve_factor=3, notify=EventLog())
    for each in (key(8), key(4), key(4, logprobs=True), key(2, logprobs=True), key(2)):
        store.capture(each, lambda: None)
    assert factory.checked == [True, False, True, False, False]
    for reqs, tokens in ((1, 16), (1, 32), (4, 32)):  # of ragged rows the kernels differ
        store.capture(key(reqs, extend_len=None, ragged_tokens=tokens), lambda: None)
    assert factory.checked[5:] == [True, False, False]


def test_a_key_is_wanted_at_its_second_use() -> None:
    store = GraphStore(SizedFactory(), reserve_factor=3, notify=EventLog())
    store.capture(key(8), lambda: None)
    assert not store.wants(key(4))
    assert not store.wants(key(2))
    assert store.wants(key(4))
    assert store.wants(key(2))


def test_rounds_larger_than_are_served_get_no_graph() -> None:
    events = EventLog()
    store = GraphStore(SizedFactory(), reserve_factor=None, notify=events, largest_round=2)
    two, three, four = (key(reqs, extend_len=4, is_round=True) for reqs in (2, 3, 4))
    for each, wanted in ((two, True), (three, False), (key(3), True)):
        assert [store.wants(each), store.wants(each)] == [False, wanted]
    assert not store.wants(four)
    assert store.owed() is None
    assert not events.counts()


@pytest.mark.parametrize(("max_drafting", "most"), [(None, None), (3, 4), (64, None)])
def test_the_largest_round_is_one_of_padded_requests(
    max_drafting: int | None, most: int | None
) -> None:
    limits = RunnerConfig(
        **dict.fromkeys(("max_batched_tokens", "context_len", "max_join_tokens"), 64),
        **dict.fromkeys(("max_running", "graph_max_reqs"), 8),
        num_pages=(9,),
        sizes=GraphSizes((1, 2, 4, 8), ()),
        draft=DraftShape(num_steps=2, topk=1, num_draft_tokens=3),
        max_drafting=max_drafting,
    )
    assert largest_round(limits, "cpu") == most


def test_the_largest_graph_sizes_the_reserve() -> None:
    store = GraphStore(SizedFactory(), reserve_factor=3, notify=EventLog())
    assert store.bytes_reserved == 0
    store.capture(key(8), lambda: None)
    assert (store.bytes_used, store.bytes_reserved) == (10, 30)


def test_what_takes_of_the_reserve_is_not_owed_before_its_use() -> None:
    store = GraphStore(SizedFactory(shares_memory=True), reserve_factor=3, notify=EventLog())
    store.capture(key(8), lambda: None)
    assert not store.wants(key(16))
    assert store.owed() is None
    assert not store.wants(key(4))
    assert store.owed() == key(4)


def test_a_short_reserve_keeps_a_key_eager_and_says_so() -> None:
    events = EventLog()
    store = GraphStore(SizedFactory(), reserve_factor=1, notify=events)
    store.capture(key(8), lambda: None)
    for _ in range(3):
        assert not store.wants(key(4))
    event = Event(
        "graph_reserve_short",
        "decode step x 4, 4 tokens, stays eager: needs about 5 bytes, 0 of 10 left",
    )
    assert events.counts() == {event: 2}
    assert store.find(key(4)) is None


def test_a_graph_that_shares_the_storage_of_larger_ones_needs_no_reserve() -> None:
    events = EventLog()
    store = GraphStore(SizedFactory(shares_memory=True), reserve_factor=1, notify=events)
    ragged = {"extend_len": None}
    store.capture(key(1, ragged_tokens=64, **ragged), lambda: None)
    store.capture(key(8), lambda: None)
    fits = [
        key(4),
        key(2, ragged_tokens=32, **ragged),
        key(8, ragged_tokens=64, **ragged),
        key(16, ragged_tokens=64, ends=POOLS, **ragged),  # rows are vectors
    ]
    assert [store.wants(k) for k in fits] == [False] * 4
    assert [store.wants(k) for k in fits] == [True] * 4
    assert not events.counts()
    larger = [
        key(16),  # more rows
        key(8, ragged_tokens=96, **ragged),
        key(8, ragged_tokens=96, ends=POOLS, **ragged),
        key(4, sampler=SamplerTier.PLUG_INS),
        key(4, logprobs=True),
    ]
    assert [store.wants(k) for k in larger + larger] == [False] * 10
    assert sum(events.counts().values()) == 5


# --- what the runner captures ---------------------------------------------------------------------


def test_boot_captures_the_largest_decode_graph_and_no_other(
    tiny: TinyModel, counts: Counter[str]
) -> None:
    driver = Driver(tiny, sanitize=False)
    assert counts["capture"] == 1
    assert set(driver.runner._graphs.graphs) == {key(8)}  # type: ignore[union-attr]


def test_the_largest_key_replays_from_its_first_use(tiny: TinyModel, counts: Counter[str]) -> None:
    driver = Driver(tiny, sanitize=False)
    start(driver)
    assert counts["replay"] == 0  # ragged prefill is eager
    driver.decode(range(1, 9))
    assert (counts["capture"], counts["replay"]) == (1, 1)


def test_another_key_is_eager_first_and_captured_on_its_second_use(
    tiny: TinyModel, counts: Counter[str]
) -> None:
    driver = Driver(tiny, sanitize=False)
    start(driver, range(1, 4))
    driver.decode([1, 2, 3])
    assert (counts["capture"], counts["replay"]) == (1, 0)
    driver.decode([1, 2, 3])
    assert (counts["capture"], counts["replay"]) == (2, 1)
    driver.decode([1, 2, 3], steps=3)
    assert (counts["capture"], counts["replay"]) == (2, 4)


def test_enforce_eager_captures_nothing(tiny: TinyModel, counts: Counter[str]) -> None:
    driver = Driver(tiny, graph_max_reqs=None)
    prompts = start(driver)
    driver.decode(range(1, 9), steps=4)
    assert counts["capture"] == counts["replay"] == 0
    assert driver.tokens[1] == tiny.greedy(prompts[1], 5)


def test_a_batch_beyond_the_largest_graph_is_eager(tiny: TinyModel, counts: Counter[str]) -> None:
    driver = Driver(tiny, graph_max_reqs=2, sanitize=False)
    prompts = start(driver, range(1, 4))
    driver.decode([1, 2, 3], steps=4)
    assert (counts["capture"], counts["replay"]) == (1, 0)
    driver.decode([1, 2])
    assert counts["replay"] == 1
    assert driver.tokens[2] == tiny.greedy(prompts[2], 6)


def test_with_a_short_reserve_the_runner_goes_on_eagerly(
    tiny: TinyModel, counts: Counter[str]
) -> None:
    driver = Driver(tiny, recorded_bytes=1000, sanitize=False)
    prompts = start(driver, range(1, 3))
    driver.decode([1, 2], steps=5)
    assert (counts["capture"], counts["replay"]) == (2, 0)  # the largest, and this one, both once
    assert driver.runner.graphs_captured == 0
    assert driver.runner.named_bytes()["graphs"] == 0
    details = [event.detail for event in driver.events.counts()]
    assert details[1] == (
        "decode step x 2, 2 tokens, stays eager: bytes of a recorded graph's intermediates must be "
        "at most 1000, got 1244 and more; run the step without a graph"
    )
    assert {event.reason for event in driver.events.counts()} == {"graph_reserve_short"}
    assert driver.tokens[2] == tiny.greedy(prompts[2], 6)


def test_nothing_is_captured_before_the_use_at_which_it_pays(
    tiny: TinyModel, counts: Counter[str]
) -> None:
    driver = Driver(tiny, capture_policy=CapturePolicy(at_boot=False, on_use=3), sanitize=False)
    prompts = start(driver)
    assert counts["capture"] == 0
    driver.decode(range(1, 9), steps=2)
    assert (counts["capture"], counts["replay"]) == (0, 0)
    driver.decode(range(1, 9), steps=2)
    assert (counts["capture"], counts["replay"]) == (1, 2)
    assert driver.tokens[2] == tiny.greedy(prompts[2], 5)


def test_what_the_next_use_would_capture_is_captured_when_idle(
    tiny: TinyModel, counts: Counter[str]
) -> None:
    policy = CapturePolicy(at_boot=False, on_use=3, when_idle=True)
    driver = Driver(tiny, capture_policy=policy, sanitize=False)
    prompts = start(driver, range(1, 3))
    driver.decode([1, 2], steps=1)
    assert not driver.runner.capture_owed(), "the next use would be eager"
    driver.decode([1, 2], steps=1)
    assert driver.runner.capture_owed()
    assert not driver.runner.capture_owed(), "one key was used"
    driver.decode([1, 2], steps=3)
    assert (counts["capture"], counts["replay"]) == (1, 3)
    assert driver.tokens[2] == tiny.greedy(prompts[2], 6)
    patient = CapturePolicy(at_boot=False, on_use=2)
    other = Driver(tiny, capture_policy=patient, sanitize=False)
    start(other, range(1, 3))
    other.decode([1, 2], steps=1)
    assert not other.runner.capture_owed(), "the policy waits for a use"


def test_recorded_graphs_hold_what_the_largest_holds(tiny: TinyModel) -> None:
    driver = Driver(tiny, sanitize=False)
    largest = driver.runner.named_bytes()["graphs"]
    start(driver)
    for rows in (range(1, 3), range(1, 5), range(1, 7)):
        driver.decode(rows, steps=2)
    assert driver.runner.graphs_captured == 4
    assert driver.runner.named_bytes()["graphs"] == largest > 0


# --- replay is the same step ----------------------------------------------------------------------


DECODES = {"family": ("llama", "gemma3"), "page_size": (1, 3, 16), "graph_max_reqs": (None, 8)}


@pytest.mark.parametrize("cell", pairwise(DECODES), ids=cell_name)
def test_greedy_tokens_are_those_of_transformers(
    tiny: TinyModel, tiny_gemma: TinyModel, cell: Cell
) -> None:
    options = dict(cell)
    model = tiny if options.pop("family") == "llama" else tiny_gemma
    driver = Driver(model, **options)
    prompts = start(driver, range(1, 4))
    driver.decode([1, 2, 3], steps=19)
    for row, prompt in prompts.items():
        assert driver.tokens[row] == model.greedy(prompt, 20)


@pytest.mark.parametrize("live", range(1, 9))
def test_a_graph_padded_to_8_with_fewer_live_rows_equals_eager(tiny: TinyModel, live: int) -> None:
    tokens, logprobs = [], []
    for graph_max_reqs in (None, 8):
        driver = Driver(tiny, graph_max_reqs=graph_max_reqs)
        if graph_max_reqs:  # only the largest graph, whatever the batch
            driver.runner._keys._sizes = GraphSizes((8,), ())
        prompts = random_prompts(LENGTHS)
        for row in range(1, live + 1):
            driver.join(row, prompts[row - 1], with_logprobs(2))
        driver.collect(driver.launch_prefill({row: LENGTHS[row - 1] for row in range(1, live + 1)}))
        seen: list[RowLogprobs] = []
        for _ in range(4):
            outputs = driver.collect(driver.launch_decode(range(1, live + 1)))
            assert outputs.logprobs is not None
            seen.extend(row for rows in outputs.logprobs for row in rows)
        tokens.append(driver.tokens)
        logprobs.append(torch.tensor([[row.chosen, *row.top_values[:2]] for row in seen]))
    assert tokens[0] == tokens[1]
    torch.testing.assert_close(logprobs[0], logprobs[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("stream", ["inline", "deferred"])
@pytest.mark.parametrize("sizes", [(1, 2, 3, 4, 6, 8), (8,)], ids=["tight", "padded"])
def test_batches_that_shrink_and_grow_equal_each_request_alone(
    tiny: TinyModel, stream: str, sizes: tuple[int, ...]
) -> None:
    """After a longer batch every buffer has a stale tail, and rows that sit out a step must not
    move; both forms of a step see to it."""
    driver = Driver(tiny, stream=DeferredStream() if stream == "deferred" else None)
    driver.runner._keys._sizes = GraphSizes(sizes, ())
    prompts = start(driver)
    batches = [
        range(1, 9),
        [8, 2],
        [8, 2],
        [3, 1, 2],
        [5],
        [5],
        [1, 3, 2],
        range(8, 0, -1),
        [7, 6, 5, 4, 3],
        [2, 8],
        [4],
    ]
    for rows in batches:
        driver.decode(list(rows))
    for row, prompt in prompts.items():
        assert driver.tokens[row] == tiny.greedy(prompt, len(driver.tokens[row]))
    assert {len(tokens) for tokens in driver.tokens.values()} == {4, 5, 6, 8}


def test_eager_and_replay_alternate_on_the_same_rows(tiny: TinyModel) -> None:
    driver = Driver(tiny)
    prompts = start(driver, range(1, 4))
    driver.decode([1, 2, 3], steps=3)
    driver.join(4, random_prompts(LENGTHS)[3])
    step = {1: 1, 4: 5, 2: 1}  # a mixed step: eager, ragged
    driver.collect(driver.launch_prefill(step, emits=False))
    assert driver.tokens[4] == []
    driver.join(1, prompts[1])
    driver.collect(driver.launch_prefill({1: LENGTHS[0], 4: 3}))
    driver.decode([3, 4, 1], steps=3)
    assert driver.tokens[3] == tiny.greedy(prompts[3], 7)
    assert driver.tokens[4] == tiny.greedy(random_prompts(LENGTHS)[3], 4)
    assert driver.tokens[1] == tiny.greedy(prompts[1], 4)


@pytest.mark.parametrize("graph_max_reqs", [None, 8], ids=["eager", "recorded"])
def test_a_row_that_ends_while_the_next_step_is_in_flight_emits_nothing_more(
    tiny: TinyModel, graph_max_reqs: int | None
) -> None:
    """The host learns of the end one turn late; the device has made the row padding by then."""
    driver = Driver(tiny, graph_max_reqs=graph_max_reqs, stream=DeferredStream())
    prompts = dict(zip([1, 2], random_prompts([5, 9]), strict=True))
    wanted = {row: tiny.greedy(prompt, 9) for row, prompt in prompts.items()}
    end = wanted[1][3]
    first = wanted[1].index(end)
    driver.join(
        1, prompts[1], SamplingParams(temperature=0.0, max_tokens=None, stop_token_ids=(end,))
    )
    driver.join(2, prompts[2], max_len=len(prompts[2]) + 6)
    driver.collect(driver.launch_prefill({1: 5, 2: 9}))
    driver.decode_overlapped([[1, 2]] * 8)
    assert driver.tokens == {1: wanted[1][: first + 1], 2: wanted[2][:6]}
    assert driver.finish == {1: FinishCode.STOP_TOKEN, 2: FinishCode.LENGTH}


def test_the_deferred_stream_equals_the_inline_stream(tiny: TinyModel) -> None:
    tokens = []
    for stream in (None, DeferredStream()):
        driver = Driver(tiny, stream=stream)
        start(driver)
        driver.decode_overlapped([[1, 2, 3]] * 5 + [[4, 5]] * 3 + [list(range(1, 9))] * 5)
        tokens.append(driver.tokens)
    assert tokens[0] == tokens[1]


def test_the_deferred_stream_runs_nothing_before_a_wait(tiny: TinyModel) -> None:
    driver = Driver(tiny, stream=DeferredStream())
    driver.join(1, [5, 6, 7])
    launched = driver.launch_prefill({1: 3})
    assert driver.parts.table.kv_committed[1] == 0
    driver.collect(launched)
    assert driver.parts.table.kv_committed[1] == 3


def test_a_row_with_logits_that_are_not_finite_fails_alone(tiny: TinyModel) -> None:
    """Its neighbours' tokens and log-probabilities do not move by a bit."""
    embedding = tiny.ours.decoder.embedding.weight
    original = embedding[7].clone()
    seen = []
    for value in (None, float("nan"), float("inf")):
        if value is not None:
            embedding.data[7] = value
        driver = Driver(tiny)
        for row, prompt in {1: [5, 6], 2: [7, 8], 3: [9, 10, 11]}.items():
            driver.join(row, prompt, with_logprobs(1))
        outputs = driver.collect(driver.launch_prefill({1: 2, 2: 2, 3: 3}))
        driver.decode([1, 2, 3], steps=3)
        embedding.data[7] = original
        assert outputs.logprobs is not None
        seen.append((driver.tokens[1], driver.tokens[3], outputs.logprobs[0], outputs.logprobs[2]))
        if value is not None:
            assert outputs.finish[1] is FinishCode.NON_FINITE
            assert not outputs.token_ids[1]
            assert driver.tokens[2] == []
            assert driver.finish == {
                1: FinishCode.RUNNING,
                2: FinishCode.NON_FINITE,
                3: FinishCode.RUNNING,
            }
    assert seen[0] == seen[1] == seen[2]


# --- host plans -----------------------------------------------------------------------------------


@pytest.mark.parametrize("graph_max_reqs", [None, 8], ids=["eager", "recorded"])
def test_a_host_planned_backend_is_planned_before_every_run(
    tiny: TinyModel, counts: Counter[str], graph_max_reqs: int | None
) -> None:
    backend = HostPlannedBackend()
    driver = Driver(tiny, backend=backend, graph_max_reqs=graph_max_reqs, sanitize=False)
    prompts = start(driver, range(1, 4))
    driver.runner._keys._sizes = GraphSizes((8,), ())
    driver.decode([1, 2, 3], steps=6)
    padding = (2,) * 5  # prefix 1 and one token each
    decodes = [tuple(n + 1 + i for n in LENGTHS[:3]) for i in range(6)]
    padded = [lens + padding for lens in decodes]
    boot = [] if graph_max_reqs is None else [(2,) * 8]
    assert backend.plans.planned == [*boot, LENGTHS[:3], *padded]
    if graph_max_reqs is not None:
        assert (counts["capture"], counts["replay"]) == (1, 6)  # the host plans before it all
    for row, prompt in prompts.items():
        assert driver.tokens[row] == tiny.greedy(prompt, 7)


def test_a_second_use_capture_is_planned_on_the_host_too(tiny: TinyModel) -> None:
    backend = HostPlannedBackend()
    driver = Driver(tiny, backend=backend, sanitize=False)
    start(driver, range(1, 3))
    driver.decode([1, 2], steps=2)
    first, second = ((LENGTHS[0] + n, LENGTHS[1] + n) for n in (1, 2))
    assert backend.plans.planned == [(2,) * 8, LENGTHS[:2], first, (2, 2), second]


def test_a_device_planned_backend_is_one_graph(tiny: TinyModel, counts: Counter[str]) -> None:
    driver = Driver(tiny)
    assert counts["capture"] == 1
    assert driver.events.counts() == {}


# --- the guard ------------------------------------------------------------------------------------


def guard_of(driver: Driver) -> Callable[..., None]:
    return driver.runner._guard.check


def test_the_guard_refuses_more_requests_than_the_graph_holds(tiny: TinyModel) -> None:
    driver = Driver(tiny)
    start(driver, range(1, 4))
    step = driver.make_step({1: 1, 2: 1, 3: 1})
    with pytest.raises(GraphGuardError, match=r"requests must be at most 2, got 3; pad the step"):
        guard_of(driver)(key(2), step)


@pytest.mark.parametrize("extends", [{1: 1, 2: 2}, {1: 2, 2: 2}])
def test_the_guard_refuses_another_stride(tiny: TinyModel, extends: dict[int, int]) -> None:
    driver = Driver(tiny)
    start(driver, range(1, 3))
    step = driver.make_step(extends)
    got = tuple(extends.values())
    with pytest.raises(GraphGuardError) as caught:
        guard_of(driver)(key(2), step)
    assert f"extend_lens must be 1 everywhere, got {got};" in str(caught.value)


def test_the_guard_refuses_a_length_beyond_the_bound(tiny: TinyModel) -> None:
    driver = Driver(tiny)
    start(driver, range(1, 3))
    bound = CONTEXT + 2  # the context and the tokens that can be in flight behind it
    driver._known[2] = bound - 1
    guard_of(driver)(key(2), driver.make_step({1: 1, 2: 1}))
    driver._known[2] = bound
    step = driver.make_step({1: 1, 2: 1})
    with pytest.raises(GraphGuardError, match=rf"kv_lens must be at most {bound}, got {bound + 1}"):
        guard_of(driver)(key(2), step)


def test_the_guard_names_a_rebound_buffer_before_it_is_replayed(tiny: TinyModel) -> None:
    driver = Driver(tiny)
    start(driver)
    table = driver.parts.table
    table.token_ids = table.token_ids.clone()
    driver.parts.buffers.positions = driver.parts.buffers.positions.clone()
    with pytest.raises(GraphGuardError) as caught:
        driver.launch_decode(range(1, 9))
    assert str(caught.value) == (
        "padded step: buffer addresses must be those of the capture, "
        "got moved: step.positions, table.token_ids; "
        "write into the captured tensors in place, or run with --enforce-eager"
    )


def test_the_guard_sees_what_holds_a_buffer_replaced(tiny: TinyModel) -> None:
    """A program would read the other holder's tensors, a graph those it has captured."""
    driver = Driver(tiny)
    start(driver)
    table = driver.parts.table
    table.sampling = copy(table.sampling)
    with pytest.raises(GraphGuardError, match=r"moved: table\.sampling\.floats, .*\.ints;"):
        driver.launch_decode(range(1, 9))


def test_the_guard_sees_a_buffer_whose_storage_was_exchanged(tiny: TinyModel) -> None:
    driver = Driver(tiny)
    start(driver)
    positions = driver.parts.buffers.positions
    positions.set_(positions.clone())
    with pytest.raises(GraphGuardError, match=r"moved: step\.positions;"):
        driver.launch_decode(range(1, 9))


def test_a_tensor_out_of_the_guards_sight_is_refused(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Driver(tiny).parts
    hidden = torch.zeros(1)
    monkeypatch.setattr(KVPool, "named_tensors", lambda pool: {"kv.hidden": hidden})
    with pytest.raises(IntegrityError, match=r"tensor kv\.hidden of a graph must be in an attr"):
        Guard(parts, kv_len_bound=8)


def test_without_graphs_a_rebound_buffer_is_nobodys_matter(tiny: TinyModel) -> None:
    """What the guard advises when an address has moved."""
    driver = Driver(tiny, graph_max_reqs=None)
    prompts = start(driver)
    driver.parts.table.token_ids = driver.parts.table.token_ids.clone()
    driver.decode(range(1, 9), steps=2)
    assert driver.tokens[1] == tiny.greedy(prompts[1], 3)


@pytest.mark.parametrize("graph_max_reqs", [None, 8], ids=["eager", "recorded"])
def test_a_uniform_step_whose_rows_differ_in_stride_never_runs(
    tiny: TinyModel, graph_max_reqs: int | None
) -> None:
    driver = Driver(tiny, graph_max_reqs=graph_max_reqs)
    start(driver, range(1, 3))
    step = driver.make_step({1: 1, 2: 2})
    with pytest.raises(GraphGuardError, match="extend_lens must be 2 everywhere"):
        driver.runner.launch(step)


def test_no_step_is_running_when_a_capture_is_planned_on_the_host(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the turn of epoch 0, whose pinned memory a step in flight may still read."""
    backend = HostPlannedBackend()
    driver = Driver(tiny, backend=backend, sanitize=False)
    start(driver, range(1, 3))
    driver.decode([1, 2], steps=1)
    planned, stream = backend.plans.planned, driver.runner._stream
    monkeypatch.setattr(stream, "synchronize", lambda: planned.append(()))
    driver.decode([1, 2], steps=1)
    second = (LENGTHS[0] + 2, LENGTHS[1] + 2)
    assert planned[3:] == [(), (2, 2), (), (), second]
