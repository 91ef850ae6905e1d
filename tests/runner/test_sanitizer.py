"""The sanitizer: a step that reads dead bytes is named, with buffer, backend and line."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import faulty_backends as faulty
import pytest
import torch
from faulty_backends import WrappedBackend
from host_planned_backend import HostPlannedBackend
from hypothesis import given, settings
from hypothesis import strategies as st
from in_turn import in_turn
from tiny_runner import CONTEXT, Driver, TinyModel, random_prompts, with_logprobs
from torch import Tensor

from paceline.attention.contract import LayerCache
from paceline.core.errors import SanitizerError
from paceline.core.request.sampling_params import SamplingParams
from paceline.kernels.reordered_weight import reordered_linear
from paceline.runner import build
from paceline.runner.recording.recorded import RecordedGraph
from paceline.runner.sanitizer.dead_slots import SlotUse, chosen_pages, slot_uses
from paceline.runner.sanitizer.journal import listen, span_of
from paceline.runner.sanitizer.live_rows import LiveRow
from paceline.runner.sanitizer.poison import (
    LARGE,
    Poisoned,
    bits_of,
    float_bits,
    poison_bits,
)
from paceline.runner.streams import DeferredStream

ROWS = (2, 5, 7)
PAGES_PER_ROW = CONTEXT // 4
PAGE_OF_ROW_8 = random.Random(0).sample(range(1, 241), 240)[7 * PAGES_PER_ROW]  # see Driver
SOURCE = Path(faulty.__file__).read_text().splitlines()


@pytest.fixture(autouse=True)
def few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few graph sizes on a CPU too, so that 3 requests are padded."""
    monkeypatch.setitem(build._EVERY_SIZE, "cpu", 1)


class OnlyWindowed(faulty.ReadsSlot):
    """Reads a slot of windowed layers."""

    def extra(self, layer: LayerCache, plan: faulty.WrappedPlan, out: Tensor) -> Tensor | None:
        return None if layer.spec.window is None else super().extra(layer, plan, out)


def run(driver: Driver, *, lengths: tuple[int, ...] = (5, 11, 3)) -> dict[int, list[int]]:
    """Prefill, then decode in changing company, eager first and replayed after."""
    prompts = random_prompts(lengths)
    driver.prefill(dict(zip(ROWS, prompts, strict=True)))
    driver.decode(ROWS, 3)
    driver.decode(ROWS[1:2], 2)
    driver.decode((7, 2), 3)
    return driver.tokens


def report_of(tiny: TinyModel, backend: WrappedBackend, **settings: object) -> str:
    """What the sanitizer says of the first decode step: 3 rows, padded to 4 of at most 8."""
    driver = Driver(tiny, backend=backend, **{"graph_max_reqs": 4} | settings)
    driver.prefill(dict(zip(ROWS, random_prompts((5, 11, 3)), strict=True)))
    with pytest.raises(SanitizerError) as caught:
        driver.decode(ROWS)
    return str(caught.value)


def line_of(text: str) -> str:
    """`file:line` of the only line of the faulty backends that holds `text`."""
    (number,) = [number for number, line in enumerate(SOURCE, 1) if text in line]
    return f"faulty_backends.py:{number}"


# --- a right backend ------------------------------------------------------------------------------


@pytest.mark.parametrize("graph_max_reqs", [8, None], ids=["graphs", "eager"])
@pytest.mark.parametrize("graph_max_tokens", [0, 64], ids=["ragged-eager", "ragged-graphs"])
def test_a_right_backend_computes_what_it_does_without(
    tiny_gemma: TinyModel, graph_max_reqs: int | None, graph_max_tokens: int
) -> None:
    plain, checked = (
        run(
            Driver(
                tiny_gemma,
                graph_max_reqs=graph_max_reqs,
                graph_max_tokens=graph_max_tokens,
                sanitize=sanitize,
            )
        )
        for sanitize in (False, True)
    )
    assert checked == plain


def test_a_sanitized_step_leaves_every_byte_as_a_plain_one(tiny_gemma: TinyModel) -> None:
    plain, checked = (Driver(tiny_gemma, sanitize=sanitize) for sanitize in (False, True))
    for driver in (plain, checked):
        run(driver)
    for name, tensor in plain.parts.table.named_tensors().items():
        assert torch.equal(tensor, checked.parts.table.named_tensors()[name]), name
    for ours, theirs in zip(plain.parts.layers, checked.parts.layers, strict=True):
        assert torch.equal(ours.k_cache, theirs.k_cache)
        assert torch.equal(ours.v_cache, theirs.v_cache)


def test_sampled_steps_with_logprobs_and_penalties_are_independent_of_dead_bytes(
    tiny: TinyModel,
) -> None:
    params = (
        SamplingParams(temperature=0.9, top_p=0.8, seed=3, repetition_penalty=1.3),
        SamplingParams(temperature=0.7, frequency_penalty=0.5, presence_penalty=0.2, seed=4),
        with_logprobs(3),
    )
    tokens = []
    for sanitize in (False, True):
        driver = Driver(tiny, sanitize=sanitize)
        for row, prompt, wanted in zip(ROWS, random_prompts((5, 11, 3)), params, strict=True):
            driver.join(row, prompt, wanted)
        driver.collect(driver.launch_prefill(dict(zip(ROWS, (5, 11, 3), strict=True))))
        driver.decode(ROWS, 4)
        tokens.append(driver.tokens)
    assert tokens[0] == tokens[1]


def test_frozen_rows_and_chunks_of_prompts_are_no_finding(tiny: TinyModel) -> None:
    driver = Driver(tiny, graph_max_tokens=32)
    prompts = random_prompts((9, 4))
    driver.join(1, prompts[0])
    driver.join(2, prompts[1], max_len=6)
    driver.collect(driver.launch_prefill({1: 5}, emits=False))
    driver.collect(driver.launch_prefill({1: 4, 2: 4}))
    driver.decode_overlapped([(1, 2)] * 5)
    assert driver.finish[2] != 0
    assert len(driver.tokens[1]) == 6


def test_a_backend_that_plans_on_the_host_plans_before_each_run(tiny: TinyModel) -> None:
    backend = HostPlannedBackend()
    driver = Driver(tiny, backend=backend)
    run(driver)
    assert driver.tokens == run(Driver(tiny))


def test_counters_that_last_are_no_finding(tiny: TinyModel) -> None:
    run(Driver(tiny, backend=faulty.KeepsCounter()))


def test_masked_slots_are_finite_for_a_backend_that_multiplies_them_by_0(tiny: TinyModel) -> None:
    run(Driver(tiny, backend=faulty.SaysSo()))
    report = report_of(tiny, faulty.MultipliesByZero())
    assert "kv.0.v: " in report
    assert "loads_dead_slots" in report


def test_nothing_is_kept_without_a_sanitizer(tiny: TinyModel) -> None:
    driver = Driver(tiny, sanitize=False)
    run(driver)
    assert not driver.runner._captured


# --- what is reported -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """A faulty backend, what its report must name, and the code whose line it must give."""

    make: Callable[[], WrappedBackend]
    names: str
    code: str


FAULTS = {
    "tail": Fault(
        faulty.ReadsTail,
        "step.kv_lens[{padded}:], behind the padded step: with poison there the step changes",
        "return behind.to(out.dtype)",
    ),
    "padded-row": Fault(
        faulty.ReadsPaddedRow,
        "kv.0.v: page 0, as padded rows read it",
        "out, lse = self._inner.forward(",
    ),
    "behind-end": Fault(
        lambda: faulty.ReadsSlot(0), "kv.0.v: slots behind kv_len", "layer.v_cache.flatten(0, 1)"
    ),
    "free-page": Fault(
        lambda: faulty.ReadsFreePage(PAGE_OF_ROW_8),
        "kv.0.k: free pages and those of other requests",
        "return layer.k_cache[self._page].mean()",
    ),
    "free-page-written": Fault(
        lambda: faulty.WritesFreePage(PAGE_OF_ROW_8),
        "the step overwrites kv.0.k: free pages and those of other requests",
        "layer.k_cache[self._page].fill_(1.0)",
    ),
    "stale-buffer": Fault(
        faulty.ReadsStaleScratch, "backend.scratch: with poison there", "stale = plan.scratch"
    ),
    "poison-that-raises": Fault(
        faulty.IndexesWithPoison,
        "backend.scratch: with poison there the step raises IndexError: ",
        "index = plan.scratch[:1].long()",
    ),
}


@pytest.mark.parametrize(
    ("fault", "graph_max_reqs", "padded"), in_turn(FAULTS, {"graph": (4, 4), "eager": (None, 6)})
)
def test_a_step_that_touches_dead_bytes_is_reported_by_buffer_backend_and_line(
    tiny: TinyModel,
    replays: list[RecordedGraph],
    fault: str,
    graph_max_reqs: int | None,
    padded: int,
) -> None:
    wanted = FAULTS[fault]
    backend = wanted.make()
    report = report_of(tiny, backend, graph_max_reqs=graph_max_reqs)
    assert f"decode step of 3 requests, padded to {padded}" in report
    assert f"attention backend '{backend.name}'" in report
    assert wanted.names.format(padded=padded) in report
    assert line_of(wanted.code) in report
    assert bool(replays) == (graph_max_reqs is not None)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
def test_a_weight_in_the_order_of_a_library_has_no_bytes_to_name() -> None:
    x = torch.randn(2, 64)
    ordered = torch.ops.mkldnn._reorder_linear_weight(torch.randn(64, 64), x.shape[0])

    def step() -> None:
        reordered_linear(x, ordered, None)

    (entry,) = listen(step, WrappedBackend)
    assert entry.reads == (span_of(x),)


def test_a_deferred_stream_reports_at_the_wait(tiny: TinyModel) -> None:
    driver = Driver(tiny, backend=faulty.ReadsTail(), graph_max_reqs=4, stream=DeferredStream())
    driver.prefill(dict(zip(ROWS, random_prompts((5, 11, 3)), strict=True)))
    launched = driver.launch_decode(ROWS)
    with pytest.raises(SanitizerError, match="kv_lens"):
        launched.wait()


def test_a_slot_one_behind_the_window_is_dead_and_the_first_of_it_is_not(
    tiny_gemma: TinyModel,
) -> None:
    window = 7
    report = report_of(tiny_gemma, OnlyWindowed(-window - 1))
    assert "kv.1.v: slots behind the window" in report
    run(Driver(tiny_gemma, backend=OnlyWindowed(-window)))


def test_other_bits_for_other_padding_are_no_finding(tiny: TinyModel) -> None:
    run(Driver(tiny, backend=faulty.SharesWork(), graph_max_reqs=4))


def test_a_step_that_is_another_when_it_runs_again_is_reported(tiny: TinyModel) -> None:
    report = report_of(tiny, faulty.HasHiddenState())
    assert "must be the same when it runs again, got a run that changes the logits" in report


def test_a_finding_leaves_the_step_as_it_ran_first(tiny: TinyModel) -> None:
    """The deferred error is raised at a wait; what the host reads then is what a plain run left."""
    plain, checked = (
        Driver(tiny, backend=faulty.ReadsTail(), graph_max_reqs=4, sanitize=sanitize)
        for sanitize in (False, True)
    )
    for driver in (plain, checked):
        driver.prefill(dict(zip(ROWS, random_prompts((5, 11, 3)), strict=True)))
    plain.decode(ROWS)
    with pytest.raises(SanitizerError):
        checked.decode(ROWS)
    for name, tensor in plain.parts.table.named_tensors().items():
        assert torch.equal(tensor, checked.parts.table.named_tensors()[name]), name


# --- what is dead ---------------------------------------------------------------------------------


def live_row(index: int, row: int, prefix_len: int, kv_len: int, kept_len: int) -> LiveRow:
    return LiveRow(
        index=index,
        row=row,
        prefix_len=prefix_len,
        kv_len=kv_len,
        kept_len=kept_len,
        known_len=prefix_len + 1,
        first_emitted=prefix_len + 1,
        num_emitted=kept_len - prefix_len,
    )


def test_slots_are_what_the_worked_example_says() -> None:
    row = live_row(0, 3, 5, 7, 6)
    table = torch.tensor([[7, 2], [0, 0]], dtype=torch.int32)
    uses = slot_uses([row], table, shape=(9, 4), window=None, padding_reach=2)
    assert uses[7].tolist() == [SlotUse.LIVE] * 4
    behind = [SlotUse.REJECTED, SlotUse.BEHIND_END]
    assert uses[2].tolist() == [SlotUse.LIVE, SlotUse.WRITTEN, *behind]
    assert uses[0].tolist() == [SlotUse.PADDING] * 2 + [SlotUse.PAGE_0] * 2
    assert (uses[[1, 3, 4, 5, 6, 8]] == SlotUse.OTHER).all()


def test_a_page_that_one_row_reads_is_live_whatever_another_makes_of_it() -> None:
    """Two rows share page 3; the second has it behind its window."""
    rows = [live_row(0, 1, 3, 4, 4), live_row(1, 2, 7, 8, 8)]
    table = torch.tensor([[3, 0], [3, 5]], dtype=torch.int32)
    uses = slot_uses(rows, table, shape=(6, 4), window=4, padding_reach=0)
    assert uses[3].tolist() == [SlotUse.LIVE] * 3 + [SlotUse.WRITTEN]
    assert uses[5].tolist() == [SlotUse.LIVE] * 3 + [SlotUse.WRITTEN]


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn]),
    numbers=st.lists(st.sampled_from([-1.5, 0.0, 1.0, 2.0, 448.0]), min_size=1, max_size=6),
)
def test_poison_is_never_the_number_it_covers(dtype: torch.dtype, numbers: list[float]) -> None:
    for tensor in (
        torch.tensor(numbers).to(dtype),
        torch.tensor([int(n) for n in numbers], dtype=torch.int32),
        torch.tensor([int(n) for n in numbers], dtype=torch.int64),
        torch.tensor([n > 0 for n in numbers]),
        torch.tensor([abs(int(n)) % 256 for n in numbers], dtype=torch.uint8),
    ):
        before = bits_of(tensor).clone()
        piece = Poisoned(tensor=tensor, index=None, dead=None, poison=poison_bits(tensor))
        piece.write()
        assert (bits_of(tensor) != before).all()
        assert piece.is_intact()
        if tensor.dtype in (torch.int32, torch.int64):
            assert set(tensor.tolist()) <= {1, 2}  # in bounds wherever an index may go


def test_a_piece_covers_its_rows_and_dead_elements_alone() -> None:
    tensor = torch.zeros(4, 2)
    dead = torch.tensor([[True, False], [True, True]])
    index = torch.tensor([1, 3])
    poison = float_bits(LARGE, tensor)
    piece = Poisoned(tensor=tensor, index=index, dead=dead, poison=poison)
    piece.write()
    assert tensor.tolist() == [[0, 0], [LARGE, 0], [0, 0], [LARGE, LARGE]]
    tensor[1, 1] = 5.0
    assert piece.is_intact()
    tensor[3, 1] = 5.0
    assert not piece.is_intact()


def test_few_pages_are_those_in_use_and_beside_them() -> None:
    uses = torch.full((8, 2), SlotUse.OTHER, dtype=torch.uint8)
    uses[0] = SlotUse.PAGE_0
    uses[4] = SlotUse.LIVE
    uses[5] = torch.tensor([SlotUse.WRITTEN, SlotUse.BEHIND_END])
    assert chosen_pages(uses, 2).tolist() == [0, 5]
    assert chosen_pages(uses, 5).tolist() == [0, 1, 3, 5, 6]
    assert chosen_pages(uses, 99).tolist() == [0, 1, 2, 3, 5, 6, 7]  # a live page is never poisoned
