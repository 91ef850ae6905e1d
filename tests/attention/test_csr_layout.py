"""The CSR layout equals lists built request by request, whatever the buffers held before."""

from dataclasses import dataclass

import pytest
import torch
from attention_cases import Case, build
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.attention.contract import GroupView, Limits, StepView
from paceline.attention.layouts.csr import CsrBuffers, CsrGroup, derive_csr, make_csr_buffers
from paceline.attention.layouts.page_table import page_table_plan
from paceline.core.modes import MaskKind
from paceline.runner.recorded import RecordedGraph

MAX_REQS = 6


@dataclass(frozen=True)
class Workload:
    """Lengths and the pages that hold them."""

    kv_lens: tuple[int, ...]
    pages: tuple[tuple[int, ...], ...]  # [num_reqs] of ceil(kv_len / page_size) ids
    page_size: int
    width: int  # of the page table


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    page_size = draw(st.sampled_from((1, 2, 3, 16)))
    width = draw(st.integers(1, 8))
    kv_lens = draw(
        st.lists(st.integers(1, width * page_size), min_size=1, max_size=MAX_REQS).map(tuple)
    )
    ids = draw(st.permutations(range(1, MAX_REQS * width + 1)))
    pages, used = [], 0
    for kv_len in kv_lens:
        num = -(-kv_len // page_size)
        pages.append(tuple(ids[used : used + num]))
        used += num
    return Workload(kv_lens, tuple(pages), page_size, width)


def make_buffers(*widths: int) -> tuple[CsrBuffers, ...]:
    return make_csr_buffers(
        Limits(
            device=torch.device("cpu"),
            dtype=torch.float32,
            kv_dtype=torch.float32,
            layers=(),
            max_reqs=MAX_REQS,
            max_tokens=64,
            max_pages=widths,
            windows=(None,) * len(widths),
            num_heads=1,
            num_kv_heads=1,
            head_dim=8,
            v_head_dim=8,
            page_size=1,
        )
    )


def view_of(kv_lens: tuple[int, ...], table: torch.Tensor) -> StepView:
    """A decode step with these lengths."""
    lens = torch.tensor(kv_lens, dtype=torch.int32)
    reqs = len(kv_lens)
    longs = torch.zeros(reqs, dtype=torch.int64)
    return StepView(
        row_ids=longs,
        prefix_lens=lens - 1,
        extend_lens=torch.ones_like(lens),
        kv_lens=lens,
        cu_seqlens_q=torch.arange(reqs + 1, dtype=torch.int32),
        req_ids=longs,
        positions=longs,
        input_ids=longs,
        logits_loc=longs,
        groups=(GroupView(page_table=table, out_cache_loc=longs),),
        mask=MaskKind.CAUSAL,
        tree_mask=None,
        max_extend_len=1,
        kv_len_bound=128,
    )


def derive(work: Workload, buffers: CsrBuffers) -> CsrGroup:
    table = torch.zeros(len(work.kv_lens), work.width, dtype=torch.int32)
    for row, pages in enumerate(work.pages):
        table[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
    view = view_of(work.kv_lens, table)
    return derive_csr(view, view.groups[0], buffers, page_size=work.page_size)


def check(work: Workload, found: CsrGroup) -> None:
    indptr, indices, last = [0], [], []
    for kv_len, pages in zip(work.kv_lens, work.pages, strict=True):
        indices.extend(pages)
        indptr.append(len(indices))
        last.append(kv_len - work.page_size * (len(pages) - 1))
    assert found.kv_indptr.tolist() == indptr
    tail = [0] * (len(work.kv_lens) * work.width - len(indices))
    assert found.kv_indices.tolist() == indices + tail
    assert found.last_page_len.tolist() == last
    assert all(1 <= length <= work.page_size for length in last)
    assert {found.kv_indptr.dtype, found.kv_indices.dtype, found.last_page_len.dtype} == {
        torch.int32
    }


@settings(max_examples=100, deadline=None)
@given(work=workloads())
def test_csr_equals_lists_built_request_by_request(work: Workload) -> None:
    (buffers,) = make_buffers(work.width)
    check(work, derive(work, buffers))


@settings(max_examples=60, deadline=None)
@given(work=workloads())
def test_stale_buffers_do_not_matter(work: Workload) -> None:
    (buffers,) = make_buffers(work.width)
    buffers.kv_indices.fill_(-9)
    buffers.last_page_len.fill_(-9)
    buffers.kv_indptr[1:].fill_(-9)  # the leading zero is written once
    check(work, derive(work, buffers))


def test_a_longer_earlier_step_leaves_nothing_behind() -> None:
    (buffers,) = make_buffers(4)
    pages = tuple(tuple(range(1 + 4 * row, 5 + 4 * row)) for row in range(MAX_REQS))
    long = Workload((12,) * MAX_REQS, pages, 3, 4)
    check(long, derive(long, buffers))
    short = Workload((1, 4), ((9,), (2, 1)), 3, 4)
    check(short, derive(short, buffers))


def test_the_worked_example_holds() -> None:
    """Page size 4, table width 3: request 0 has 9 tokens, request 1 has 4."""
    (buffers,) = make_buffers(3)
    found = derive(Workload((9, 4), ((7, 2, 5), (9,)), 4, 3), buffers)
    assert found.kv_indptr.tolist() == [0, 3, 4]
    assert found.kv_indices.tolist() == [7, 2, 5, 9, 0, 0]
    assert found.last_page_len.tolist() == [1, 4]


def test_each_group_has_lists_of_its_own_width() -> None:
    narrow, wide = make_buffers(2, 5)
    assert (narrow.kv_indices.numel(), wide.kv_indices.numel()) == (
        MAX_REQS * 2 + 1,
        MAX_REQS * 5 + 1,
    )
    first = Workload((3,), ((4, 8),), 2, 2)
    second = Workload((5,), ((1, 2, 3, 4, 5),), 1, 5)
    found = derive(first, narrow)
    check(second, derive(second, wide))
    check(first, found)


@pytest.mark.parametrize("reqs", [1, 4])
def test_equal_sizes_give_equal_addresses(reqs: int) -> None:
    (buffers,) = make_buffers(4)
    work = Workload((2,) * reqs, tuple((row + 1,) for row in range(reqs)), 2, 4)
    one, other = derive(work, buffers), derive(work, buffers)
    assert one.kv_indptr.data_ptr() == other.kv_indptr.data_ptr()
    assert one.kv_indices.data_ptr() == other.kv_indices.data_ptr()
    assert one.last_page_len.data_ptr() == other.last_page_len.data_ptr()


def test_a_recorded_derivation_follows_the_lengths() -> None:
    """Device-only, static shapes: a replay derives from the lengths and pages of that moment."""
    (buffers,) = make_buffers(3)
    table = torch.tensor([[7, 2, 5], [9, 0, 0]], dtype=torch.int32)
    view = view_of((9, 4), table)
    graph = RecordedGraph(poison=True)
    found: list[CsrGroup] = []
    graph.capture(lambda: found.append(derive_csr(view, view.groups[0], buffers, page_size=4)))
    table.copy_(torch.tensor([[3, 0, 0], [8, 1, 0]]))
    view.kv_lens.copy_(torch.tensor([2, 8]))
    graph.replay()
    check(Workload((2, 8), ((3,), (8, 1)), 4, 3), found[0])


def test_the_page_table_layout_is_the_view_itself() -> None:
    """Nothing is copied: a plan made before a derivation sees what it writes."""
    view = build(Case(mask=MaskKind.TREE, extend_lens=(5, 2, 5))).view
    plan = page_table_plan(view)
    for name in ("cu_seqlens_q", "prefix_lens", "extend_lens", "kv_lens", "tree_mask"):
        assert getattr(plan, name) is getattr(view, name)
    assert plan.page_tables == tuple(group.page_table for group in view.groups)
    assert (plan.mask, plan.max_extend_len, plan.kv_len_bound) == (MaskKind.TREE, 5, 64)
