"""Which kernels of paged_extend the suite reaches on a GPU: where a launch is chosen by sizes, some
case has them.  Nothing is computed here, and no number is made."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.core.modes import MaskKind
from paceline.kernels.paged_attention import (
    PagedCache,
    PagedCall,
    PagedRows,
    Weighing,
    paged_extend,
    split_workspace,
)
from paceline.kernels.paged_attention.splits import SHORT_ROWS
from paceline.proof.suite.case import Case
from paceline.proof.suite.cases import cases
from paceline.proof.suite.modes import ForwardMode
from paceline.runner.extents import PaddedSize

pytest.importorskip("triton")

PROMPTS = [
    case
    for case in cases()
    if case.method == "dense"
    and case.mode in (ForwardMode.EXTEND, ForwardMode.MIXED)
    and case.mask(case.batches[0]) is MaskKind.CAUSAL
]
Launches = Callable[[Case, PaddedSize], str]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """What one layer of a case launches on an H200 for a step of a size."""
    from paceline.kernels._triton import paged_extend as kernels
    from paceline.kernels._triton import ragged_attention, ragged_groups
    from paceline.kernels.paged_attention import splits

    found: list[str] = []

    def groups(call: PagedCall, *, above: int, leads: bool) -> None:
        keys = ragged_groups._usual_tiles(call.rows.max_extend_len).block_keys
        found.append(f"groups of {keys} keys")

    def start(*args: Any, follows: bool = False, **options: Any) -> None:
        is_split = args[-1] > 1
        found.append(("decodes" if follows else "others") + " in splits" * is_split)

    monkeypatch.setattr(splits, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(ragged_attention, "is_hopper", lambda device: True)
    monkeypatch.setattr(kernels, "require_runnable", lambda *given, **named: None)
    monkeypatch.setattr(kernels, "_start", start)
    monkeypatch.setattr(ragged_groups, "launch_paged_groups", groups)

    def of(case: Case, size: PaddedSize) -> str:
        found.clear()
        heads = (case.num_heads, case.num_kv_heads)
        workspace = split_workspace(
            size.reqs, {heads}, v_head_dim=case.v_head_dim, device=torch.device("cpu")
        )
        paged_extend(call_of(case, size), workspace)
        return " and ".join(found)

    return of


def call_of(case: Case, size: PaddedSize) -> PagedCall:
    """The first layer's, of tensors that hold nothing."""
    dtype: torch.dtype = getattr(torch, case.dtype)
    q = torch.empty(size.tokens, case.num_heads, case.head_dim, dtype=dtype)
    out = torch.empty(size.tokens, case.num_heads, case.v_head_dim, dtype=dtype)
    pages = (2, case.page_size, case.num_kv_heads)
    kv_dtype = getattr(torch, case.kv_dtype or case.dtype)
    k, v = (torch.empty(*pages, n, dtype=kv_dtype) for n in (case.head_dim, case.v_head_dim))
    scales = (torch.ones(1),) * 2 if case.kv_dtype else (None, None)
    ints = torch.zeros(size.reqs + 1, dtype=torch.int32)
    table = torch.zeros(size.reqs, -(-case.max_kv_len // case.page_size), dtype=torch.int32)
    rows = PagedRows(table, ints[1:], ints[1:], ints, size.max_extend_len)
    sinks = torch.empty(case.num_heads) if case.sinks else None
    weighing = Weighing(1.0, soft_cap=case.soft_cap, sinks=sinks)
    lse = torch.empty(size.tokens, case.num_heads)
    return PagedCall(q, PagedCache(k, v, *scales), rows, weighing, out, lse)


def eager(case: Case) -> list[PaddedSize]:
    """Of the batches as they are."""
    return [
        PaddedSize(batch.num_reqs, batch.num_tokens, max(batch.extend_lens))
        for batch in case.batches
    ]


def graph(case: Case) -> list[PaddedSize]:
    """Of the one graph that all batches replay."""
    return [PaddedSize.ragged(case.captured_reqs, case.captured_tokens)]


@pytest.mark.parametrize("sizes", [eager, graph])
def test_cases_reach_groups_of_warps_alone_and_beside_decodes(
    launches: Launches, sizes: Callable[[Case], list[PaddedSize]]
) -> None:
    """Decodes without splits are those of many requests."""
    found = {launches(case, size) for case in PROMPTS for size in sizes(case)}
    beside = {f"{who} and decodes in splits" for who in ("groups of 64 keys", "others")}
    assert {"groups of 64 keys", "others", "others and decodes", *beside} <= found


@pytest.mark.parametrize("sizes", [eager, graph])
def test_quick_cases_reach_groups_of_warps_beside_decodes(
    launches: Launches, sizes: Callable[[Case], list[PaddedSize]]
) -> None:
    quick = [case for case in PROMPTS if case.is_quick]
    found = {launches(case, size) for case in quick for size in sizes(case)}
    assert "groups of 64 keys and decodes in splits" in found


@pytest.mark.parametrize("sizes", [eager, graph])
def test_a_cache_of_8_bits_is_read_by_each(
    launches: Launches, sizes: Callable[[Case], list[PaddedSize]]
) -> None:
    codes = [case for case in PROMPTS if case.kv_dtype is not None]
    found = {launches(case, size) for case in codes for size in sizes(case)}
    assert {"groups of 64 keys and decodes in splits", "others in splits"} <= found


def test_eager_steps_reach_them_with_other_lengths_too(launches: Launches) -> None:
    """The first batch, and the one that is a page longer."""
    reached = [case for case in PROMPTS if "groups" in launches(case, eager(case)[0])]
    assert {case.mode for case in reached} == {ForwardMode.EXTEND, ForwardMode.MIXED}
    for case in reached:
        assert "groups" in launches(case, eager(case)[2])


def test_some_graph_has_the_tiles_of_long_prompts(launches: Launches) -> None:
    found = {launches(case, *graph(case)) for case in PROMPTS}
    assert any(each.startswith("groups of 128 keys") for each in found)


def test_requests_of_as_many_rows_as_a_small_tile_and_of_more_stand_beside_decodes(
    launches: Launches,
) -> None:
    mixed = [case for case in PROMPTS if case.mode is ForwardMode.MIXED]
    reached = [case for case in mixed if "groups of 64 keys and" in launches(case, *graph(case))]
    assert reached
    for case in reached:
        most = SHORT_ROWS * case.num_kv_heads // case.num_heads  # tokens, of a small tile
        assert {1, most, most + 1} <= set(case.batches[0].extend_lens)
