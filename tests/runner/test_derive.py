"""derive equals a derivation written out token by token, whatever the step and whatever was before.

The expectation below uses host integers only and shares no code with the device's derivation.
"""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.modes import MaskKind
from paceline.core.request.sampling_params import SamplingParams
from paceline.core.step import FinishCode, JoinDelta, PageDelta, StepLayout
from paceline.kernels.step_view import StepView
from paceline.runner.buffers import StepBuffers
from paceline.runner.derive import derive
from paceline.runner.extents import PaddedSize
from paceline.runner.staging import StagingSlot
from paceline.runner.table.request_table import RequestTable

CPU = torch.device("cpu")
MAX_RUNNING = 6
HISTORY = 40  # tokens of a row
MAX_TOKENS = MAX_RUNNING * 20
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Request:
    """One row of the table as the host knows it."""

    row: int
    prefix: int
    extend: int
    finish: FinishCode
    tokens: tuple[int, ...]  # prefix + extend of them
    pages: tuple[tuple[int, ...], ...]  # [num_groups] of page ids, distinct, never 0


@dataclass(frozen=True)
class Case:
    """A step over requests, padded to a size."""

    requests: tuple[Request, ...]
    page_sizes: tuple[int, ...]
    size: PaddedSize

    @property
    def layout(self) -> StepLayout:
        return StepLayout(
            rows=tuple(r.row for r in self.requests),
            extend_lens=tuple(r.extend for r in self.requests),
            emits=(True,) * len(self.requests),
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    page_sizes = draw(st.tuples(st.sampled_from((1, 3, 16)), st.sampled_from((1, 3, 16))))
    rows = draw(st.permutations(range(1, MAX_RUNNING + 1)))
    rows = rows[: draw(st.integers(1, MAX_RUNNING))]
    uniform = draw(st.none() | st.sampled_from((1, 2, 5)))
    requests = []
    for row in rows:
        extend = uniform or draw(st.integers(1, 20))
        prefix = draw(st.integers(0, HISTORY - 1 - extend))
        known = prefix + extend
        base = row * 1000
        requests.append(
            Request(
                row=row,
                prefix=prefix,
                extend=extend,
                finish=draw(st.sampled_from((FinishCode.RUNNING, *FinishCode))),
                tokens=tuple(base + 7 * i % 997 for i in range(known)),
                pages=tuple(
                    tuple(
                        base + page
                        for page in draw(st.permutations(range(1, 1 - (-known // page_size))))
                    )
                    for page_size in page_sizes
                ),
            )
        )
    if uniform is None:
        size = PaddedSize(
            len(requests), sum(r.extend for r in requests), max(r.extend for r in requests)
        )
    else:
        reqs = draw(st.integers(len(requests), MAX_RUNNING))
        size = PaddedSize(reqs, reqs * uniform, uniform)
    return Case(tuple(requests), page_sizes, size)


def widths(page_sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Page-table widths; the groups differ even where their page sizes agree."""
    return tuple(-(-HISTORY // size) + group for group, size in enumerate(page_sizes))


def make_table(page_sizes: tuple[int, ...]) -> RequestTable:
    return RequestTable(
        max_running=MAX_RUNNING,
        max_tokens=HISTORY,
        max_pages=widths(page_sizes),
        eos_token_ids=(2,),
        device=CPU,
    )


def make_buffers(page_sizes: tuple[int, ...]) -> StepBuffers:
    return StepBuffers(
        max_reqs=MAX_RUNNING,
        max_tokens=MAX_TOKENS,
        max_pages=widths(page_sizes),
        kv_len_bound=HISTORY,
        device=CPU,
    )


def enter(table: RequestTable, requests: tuple[Request, ...]) -> None:
    """Write requests into their rows the way a step's deltas do; then freeze the finished ones."""
    slot = StagingSlot(1 << 20, pinned=False)
    for request in requests:
        join = JoinDelta(
            row=request.row,
            token_ids=request.tokens,
            prompt_len=len(request.tokens),
            prefix_len=request.prefix,
            max_len=HISTORY,
            params=GREEDY,
        )
        pages = [
            PageDelta(row=request.row, group=group, start=0, page_ids=ids)
            for group, ids in enumerate(request.pages)
        ]
        for destination, source in table.stage([join, *pages], slot):
            destination.copy_(source)
        table.finish[request.row] = int(request.finish)


def run(case: Case, table: RequestTable, buffers: StepBuffers) -> StepView:
    ((destination, source),) = buffers.fill(
        case.layout, case.size, StagingSlot(1 << 12, pinned=False)
    )
    destination.copy_(source)
    view = buffers.view(case.size, MaskKind.CAUSAL)
    derive(buffers, table, view, case.page_sizes)
    return view


def check(case: Case, view: StepView) -> None:
    """The view against the step's meaning, one token at a time."""
    live: list[Request | None] = [
        r if r.finish is FinishCode.RUNNING else None for r in case.requests
    ]
    strides = [r.extend for r in case.requests]
    padding = case.size.reqs - len(live)
    live += [None] * padding
    strides += [case.size.max_extend_len] * padding

    prefixes = [1 if request is None else request.prefix for request in live]
    assert view.row_ids.tolist() == [0 if request is None else request.row for request in live]
    assert view.prefix_lens.tolist() == prefixes
    assert view.extend_lens.tolist() == strides
    assert view.kv_lens.tolist() == [p + e for p, e in zip(prefixes, strides, strict=True)]
    ends = [sum(strides[: i + 1]) for i in range(len(strides))]
    assert view.cu_seqlens_q.tolist() == [0, *ends]
    assert ends[-1] == case.size.tokens == view.padded_tokens
    assert view.logits_loc.tolist() == [end - 1 for end in ends]

    req_ids, positions, input_ids = [], [], []
    slots: list[list[int]] = [[] for _ in case.page_sizes]
    for index, (request, stride) in enumerate(zip(live, strides, strict=True)):
        for position in range(prefixes[index], prefixes[index] + stride):
            req_ids.append(index)
            positions.append(position)
            input_ids.append(0 if request is None else request.tokens[position])
            for group, size in enumerate(case.page_sizes):
                page = 0 if request is None else request.pages[group][position // size]
                slots[group].append(0 if request is None else page * size + position % size)
    assert view.req_ids.tolist() == req_ids
    assert view.positions.tolist() == positions
    assert view.input_ids.tolist() == input_ids
    for group, wanted in enumerate(slots):
        assert view.groups[group].out_cache_loc.tolist() == wanted
        table_rows = []
        for request in live:
            ids = () if request is None else request.pages[group]
            table_rows.append([*ids, *[0] * (widths(case.page_sizes)[group] - len(ids))])
        assert view.groups[group].page_table.tolist() == table_rows


@settings(max_examples=80, deadline=None)
@given(case=cases())
def test_derive_equals_a_walk_over_the_tokens(case: Case) -> None:
    table, buffers = make_table(case.page_sizes), make_buffers(case.page_sizes)
    enter(table, case.requests)
    check(case, run(case, table, buffers))


@settings(max_examples=40, deadline=None)
@given(case=cases())
def test_stale_contents_do_not_matter(case: Case) -> None:
    """Every buffer but the constant range is full of an earlier, longer step's remains."""
    table, buffers = make_table(case.page_sizes), make_buffers(case.page_sizes)
    enter(table, case.requests)
    for name, tensor in buffers.named_tensors().items():
        if name != "step.arange":
            tensor.fill_(-77)
    buffers.cu_seqlens_q[0] = 0  # the leading zero is written once, when the buffers are made
    check(case, run(case, table, buffers))


def test_a_longer_earlier_step_leaves_nothing_behind() -> None:
    page_sizes = (3, 16)
    table, buffers = make_table(page_sizes), make_buffers(page_sizes)

    def request(row: int, prefix: int, extend: int) -> Request:
        known = prefix + extend
        pages = tuple(
            tuple(row * 100 + page for page in range(-(-known // size))) for size in page_sizes
        )
        return Request(row, prefix, extend, FinishCode.RUNNING, tuple(range(5, 5 + known)), pages)

    long = Case(
        tuple(request(row, 19, 20) for row in range(1, 7)), page_sizes, PaddedSize(6, 120, 20)
    )
    enter(table, long.requests)
    check(long, run(long, table, buffers))
    short = Case((request(4, 2, 1),), page_sizes, PaddedSize(2, 2, 1))
    table = make_table(page_sizes)
    enter(table, short.requests)
    check(short, run(short, table, buffers))


def test_the_worked_example_holds() -> None:
    """Page size 4; row 3 decodes at length 6, row 5 prefills 3 tokens after a hit of 4."""
    table = RequestTable(max_running=5, max_tokens=16, max_pages=(4,), eos_token_ids=(), device=CPU)
    buffers = StepBuffers(max_reqs=4, max_tokens=8, max_pages=(4,), kv_len_bound=16, device=CPU)
    requests = (
        Request(3, 6, 1, FinishCode.RUNNING, tuple(range(7)), ((7, 2),)),
        Request(5, 4, 3, FinishCode.RUNNING, tuple(range(7)), ((9, 4),)),
    )
    enter(table, requests)
    view = run(Case(requests, (4,), PaddedSize(2, 4, 3)), table, buffers)
    assert view.prefix_lens.tolist() == [6, 4]
    assert view.kv_lens.tolist() == [7, 7]
    assert view.cu_seqlens_q.tolist() == [0, 1, 4]
    assert view.req_ids.tolist() == [0, 1, 1, 1]
    assert view.positions.tolist() == [6, 4, 5, 6]
    assert view.groups[0].out_cache_loc.tolist() == [2 * 4 + 2, 4 * 4 + 0, 4 * 4 + 1, 4 * 4 + 2]
    assert view.logits_loc.tolist() == [0, 3]


def test_padding_on_the_device_equals_staged_padding() -> None:
    """`pad`, which capture uses, gives the step of padded rows alone."""
    page_sizes = (3, 1)
    table, buffers = make_table(page_sizes), make_buffers(page_sizes)
    size = PaddedSize.uniform(5, 2)
    buffers.facts.fill_(3)
    buffers.pad(size)
    view = buffers.view(size, MaskKind.CAUSAL)
    derive(buffers, table, view, page_sizes)
    check(Case((), page_sizes, size), view)


def test_padding_on_the_device_is_of_this_size_alone() -> None:
    """Row 0, the stride, no emission; of a tree, every row hangs on its prefix."""
    buffers = StepBuffers(
        max_reqs=3, max_tokens=12, max_pages=(4,), max_tree_rows=4, kv_len_bound=16, device=CPU
    )
    buffers.facts.fill_(7)
    buffers.parents.fill_(7)
    buffers.pad(PaddedSize.uniform(2, 4))
    assert buffers.facts.tolist() == [[0, 4, 0], [0, 4, 0], [7, 7, 7]]
    assert buffers.parents.tolist() == [-1] * 8 + [7] * 4


@pytest.mark.parametrize("reqs", [1, 3, 6])
def test_equal_sizes_give_equal_addresses(reqs: int) -> None:
    buffers = make_buffers((3, 16))
    size = PaddedSize.uniform(reqs, 1)
    first, second = (buffers.view(size, MaskKind.CAUSAL) for _ in range(2))
    for name in ("row_ids", "prefix_lens", "kv_lens", "positions", "input_ids", "logits_loc"):
        assert getattr(first, name).data_ptr() == getattr(second, name).data_ptr()
    for one, other in zip(first.groups, second.groups, strict=True):
        assert one.page_table.data_ptr() == other.page_table.data_ptr()
        assert one.out_cache_loc.data_ptr() == other.out_cache_loc.data_ptr()
