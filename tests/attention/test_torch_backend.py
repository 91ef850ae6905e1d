"""The torch backend equals a walk over the keys in float64, and the comparison is sharp."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import Case, build, walk
from attention_runs import TOLERANCE, assert_is_the_walk, difference, run

from covers import Cell, cell_name, pairwise
from paceline.attention.backends.torch_backend import TorchBackend
from paceline.attention.contract import Part
from paceline.core.modes import MaskKind
from paceline.kernels.merge_partials import merge_partials_reference

AXES: dict[str, tuple[Any, ...]] = {
    "mask": (MaskKind.CAUSAL, MaskKind.TREE, MaskKind.FULL),
    "part": tuple(Part),
    "page_and_window": tuple(  # no window; then one below, at and above the page size
        (size, window)
        for size in (1, 3, 16)
        for window in (None, size - 1, size, size + 1)
        if window != 0
    ),
    "soft_cap": (None, 0.5),
    "heads": ((3, 3), (4, 2), (7, 1), (6, 1)),
    "v_head_dim": (8, 5),
    "dtype": tuple(TOLERANCE),
    "is_fp8": (False, True),
    "has_sinks": (False, True),
    "prefix_lens": ((0, 7, 18), (3, 1, 16), (15, 17, 2)),
    "extend_lens": ((1, 1, 1), (1, 2, 5), (5, 5, 5)),
}


def check(case: Case) -> None:
    """The backend against the walk."""
    built = build(case)
    assert_is_the_walk(built, *run(TorchBackend(), built), tolerance=TOLERANCE[case.dtype])


@pytest.mark.parametrize("cell", pairwise(AXES), ids=cell_name)
def test_a_step_of_any_kind_equals_the_walk(cell: Cell) -> None:
    chosen = dict(cell)
    if chosen["part"] is Part.STEP:
        chosen["is_fp8"] = False  # refused: see capability
        if chosen["mask"] is MaskKind.TREE:
            chosen["extend_lens"] = (5, 5, 5)  # as an engine's are
    (heads, kv_heads), (page_size, window) = chosen.pop("heads"), chosen.pop("page_and_window")
    case = Case(heads=heads, kv_heads=kv_heads, page_size=page_size, window=window, **chosen)
    check(case)


@pytest.mark.parametrize("window", [2, 3, 4, 5, 6])
def test_windows_around_the_length_of_a_prompt_from_its_start(window: int) -> None:
    check(Case(prefix_lens=(0, 0, 0), extend_lens=(4, 5, 3), window=window))


def test_a_request_without_a_prefix_has_nothing_to_merge() -> None:
    out, lse = run(TorchBackend(), build(Case(part=Part.PREFIX)))
    assert lse is not None
    assert not out[:1].any()
    assert (lse[:1] == -math.inf).all()


def test_a_row_whose_window_ends_before_the_step_sees_no_prefix() -> None:
    case = Case(part=Part.PREFIX, prefix_lens=(9,), extend_lens=(5,), window=3)
    out, lse = run(TorchBackend(), build(case))
    assert lse is not None
    assert lse.isinf().any(1).tolist() == [False, False, True, True, True]
    assert not out[2:].any()
    assert torch.equal(out.isnan(), torch.zeros_like(out, dtype=torch.bool))


@pytest.mark.parametrize("extend", [1, 2, 5])
@pytest.mark.parametrize("soft_cap", [None, 0.5], ids=["plain", "capped"])
def test_padded_rows_do_not_change_live_rows(extend: int, soft_cap: float | None) -> None:
    """Padded rows read page 0, which holds NaN here; nobody sees what they get."""
    case = Case(extend_lens=(extend,) * 3, soft_cap=soft_cap)
    alone, _ = run(TorchBackend(), build(case))
    padded, _ = run(TorchBackend(), build(replace(case, padded_reqs=4)))
    assert torch.equal(alone, padded)


@pytest.mark.parametrize("soft_cap", [None, 0.5], ids=["plain", "capped"])
@pytest.mark.parametrize("extends", [(1, 1, 1), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("what", ["k", "v"])
def test_numbers_that_are_not_finite_stay_visible(
    what: str, extends: tuple[int, ...], soft_cap: float | None
) -> None:
    """A NaN a row reads must reach the sampler, which fails the request by name."""
    built = build(Case(extend_lens=extends, soft_cap=soft_cap))
    first = extends[0]  # the second request's first row
    page = built.view.groups[0].page_table[1, 0]
    cache = built.layer.k_cache if what == "k" else built.layer.v_cache
    cache[page, 0] = float("nan")
    out, _ = run(TorchBackend(), built)
    assert out[first].isnan().all()
    neighbours = torch.cat((out[:first], out[2 * first :]))
    assert neighbours.isfinite().all()


def test_the_data_are_sharp_about_the_place_of_a_key() -> None:
    """Two neighbouring keys exchanged change what a row sees: the walk is no set of values."""
    built = build(Case(window=4))
    right, _ = walk(built)
    shifted, _ = walk(built, change=lambda keys: [max(0, key - 1) for key in keys])
    assert difference(right, shifted) > 1.0


def test_a_block_is_seen_whole_by_the_plan_of_a_view() -> None:
    """Rows of a causal step with ends behind all of it see what the full mask shows."""
    full = build(Case(mask=MaskKind.FULL, extend_lens=(1, 2, 5)))
    ends = full.view.kv_lens.index_select(0, full.view.req_ids)
    view = replace(full.view, mask=MaskKind.BLOCK, visible_end=ends)
    wanted, _ = run(TorchBackend(), full)
    seen, _ = run(TorchBackend(), replace(full, view=view))
    assert torch.equal(seen, wanted)
    alone = replace(view, visible_end=(view.kv_lens - view.extend_lens)[view.req_ids] + 1)
    first, _ = run(TorchBackend(), replace(full, view=alone))
    assert not torch.equal(first, wanted)


@pytest.mark.parametrize("mask", [MaskKind.CAUSAL, MaskKind.TREE, MaskKind.FULL])
@pytest.mark.parametrize("window", [None, 4])
def test_both_parts_merged_are_the_whole(mask: MaskKind, window: int | None) -> None:
    case = Case(mask=mask, window=window, extend_lens=(5, 5, 5), has_sinks=True, soft_cap=0.5)
    built = build(case)
    parts = []
    for part in (Part.PREFIX, Part.STEP):
        out, lse = run(TorchBackend(), replace(built, case=replace(case, part=part)))
        assert lse is not None
        parts += [out, lse]
    merged, lse = merge_partials_reference(*parts, sinks=built.layer.sinks)
    assert_is_the_walk(built, merged, lse, tolerance=TOLERANCE[case.dtype])
