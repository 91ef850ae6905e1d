"""The CSR layout equals lists built request by request, whatever the buffers held before."""

from dataclasses import dataclass

import pytest
import torch
from attention_cases import Case, build
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.attention.contract import Limits
from paceline.attention.layouts.csr import CsrBuffers, csr_lens, derive_indices, make_csr_buffers
from paceline.attention.layouts.page_table import page_table_plan
from paceline.core.modes import MaskKind
from paceline.runner.recording.recorded import RecordedGraph

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
        st.lists(st.integers(0, width * page_size), min_size=1, max_size=MAX_REQS).map(tuple)
    )
    ids = draw(st.permutations(range(1, MAX_REQS * width + 1)))
    pages, used = [], 0
    for kv_len in kv_lens:
        num = -(-kv_len // page_size)
        pages.append(tuple(ids[used : used + num]))
        used += num
    return Workload(kv_lens, tuple(pages), page_size, width)


def make_buffers(*widths: int) -> CsrBuffers:
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
            page_size=1,
        )
    )


def table_of(work: Workload) -> Tensor:
    table = torch.full((len(work.kv_lens), work.width), 99, dtype=torch.int32)  # stale entries
    for row, pages in enumerate(work.pages):
        table[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
    return table


def derive(work: Workload, buffers: CsrBuffers, group: int = 0) -> None:
    """Stage a workload's lengths as a host plan does, then derive its page ids."""
    reqs, lens = len(work.kv_lens), csr_lens(work.kv_lens, work.page_size)
    buffers.kv_indptr[: reqs + 1].copy_(lens.kv_indptr)
    buffers.last_page_len[:reqs].copy_(lens.last_page_len)
    derive_indices(
        buffers.kv_indptr[: reqs + 1],
        table_of(work),
        buffers.page_range,
        buffers.kv_indices[group],
    )


def check(work: Workload, buffers: CsrBuffers, group: int = 0) -> None:
    reqs = len(work.kv_lens)
    indptr, indices, last = [0], [], []
    for kv_len, pages in zip(work.kv_lens, work.pages, strict=True):
        indices.extend(pages)
        indptr.append(len(indices))
        last.append(kv_len - work.page_size * (len(pages) - 1) if pages else 0)
    assert buffers.kv_indptr[: reqs + 1].tolist() == indptr
    tail = [0] * (reqs * work.width - len(indices))
    assert buffers.kv_indices[group][: reqs * work.width].tolist() == indices + tail
    assert buffers.last_page_len[:reqs].tolist() == last
    assert all(1 <= n <= work.page_size for n, pages in zip(last, work.pages, strict=True) if pages)


@settings(max_examples=100, deadline=None)
@given(work=workloads())
def test_csr_equals_lists_built_request_by_request(work: Workload) -> None:
    buffers = make_buffers(work.width)
    derive(work, buffers)
    check(work, buffers)


@settings(max_examples=60, deadline=None)
@given(work=workloads())
def test_stale_buffers_do_not_matter(work: Workload) -> None:
    buffers = make_buffers(work.width)
    buffers.kv_indices[0].fill_(-9)
    derive(work, buffers)
    check(work, buffers)


def test_a_longer_earlier_step_leaves_nothing_behind() -> None:
    buffers = make_buffers(4)
    pages = tuple(tuple(range(1 + 4 * row, 5 + 4 * row)) for row in range(MAX_REQS))
    long = Workload((12,) * MAX_REQS, pages, 3, 4)
    derive(long, buffers)
    check(long, buffers)
    short = Workload((1, 4), ((9,), (2, 1)), 3, 4)
    derive(short, buffers)
    check(short, buffers)


def test_the_worked_example_holds() -> None:
    """Page size 4, table width 3: request 0 has 9 tokens, request 1 has 4."""
    buffers = make_buffers(3)
    derive(Workload((9, 4), ((7, 2, 5), (9,)), 4, 3), buffers)
    assert buffers.kv_indptr[:3].tolist() == [0, 3, 4]
    assert buffers.kv_indices[0][:6].tolist() == [7, 2, 5, 9, 0, 0]
    assert buffers.last_page_len[:2].tolist() == [1, 4]


def test_each_group_has_a_list_of_its_own_width() -> None:
    buffers = make_buffers(2, 5)
    assert [each.numel() for each in buffers.kv_indices] == [MAX_REQS * 2 + 1, MAX_REQS * 5 + 1]
    assert buffers.page_range.tolist() == [0, 1, 2, 3, 4]
    first = Workload((3,), ((4, 8),), 2, 2)
    second = Workload((4,), ((1, 3),), 2, 5)
    derive(first, buffers, group=0)
    derive(second, buffers, group=1)
    check(second, buffers, group=1)
    assert buffers.kv_indices[0][:2].tolist() == [4, 8]


def test_host_lists_are_int32_on_the_cpu() -> None:
    lens = csr_lens((5, 0, 8), 4)
    for found in (lens.kv_indptr, lens.last_page_len):
        assert found.dtype is torch.int32
        assert found.device.type == "cpu"


@pytest.mark.parametrize("kv_len", [1, 3, 4, 5, 8])
def test_pages_and_last_page_make_the_length(kv_len: int) -> None:
    lens = csr_lens((kv_len,), 4)
    assert (int(lens.kv_indptr[1]) - 1) * 4 + int(lens.last_page_len[0]) == kv_len


def test_a_recorded_derivation_follows_offsets_and_pages() -> None:
    """Device-only, static shapes: a replay derives from what was planned and staged last."""
    buffers = make_buffers(3)
    old, new = Workload((9, 4), ((7, 2, 5), (9,)), 4, 3), Workload((2, 8), ((3,), (8, 1)), 4, 3)
    derive(old, buffers)
    table = table_of(old)
    graph = RecordedGraph(poison=True)
    graph.capture(
        lambda: derive_indices(
            buffers.kv_indptr[:3], table, buffers.page_range, buffers.kv_indices[0]
        )
    )
    table.copy_(table_of(new))
    lens = csr_lens(new.kv_lens, new.page_size)
    buffers.kv_indptr[:3].copy_(lens.kv_indptr)
    buffers.last_page_len[:2].copy_(lens.last_page_len)
    graph.replay()
    check(new, buffers)


def test_the_page_table_layout_is_the_view_itself() -> None:
    """Nothing is copied: a plan made before a derivation sees what it writes."""
    view = build(Case(mask=MaskKind.TREE, extend_lens=(5, 2, 5))).view
    plan = page_table_plan(view)
    for name in ("cu_seqlens_q", "prefix_lens", "extend_lens", "kv_lens", "tree_mask"):
        assert getattr(plan, name) is getattr(view, name)
    assert plan.page_tables == tuple(group.page_table for group in view.groups)
    bound = view.kv_len_bound
    assert (plan.mask, plan.max_extend_len, plan.kv_len_bound) == (MaskKind.TREE, 5, bound)
