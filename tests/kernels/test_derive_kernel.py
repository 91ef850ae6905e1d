"""The Triton kernel over the table, and the definition that tests/runner/test_derive.py proves."""

from collections.abc import Iterator

import pytest
import torch
from step_cases import SMALL, StepShape, derived, differences, make_rows, make_view, told

from paceline.core.errors import KernelArgumentError
from paceline.core.step import FinishCode
from paceline.kernels.derive import (
    _DERIVE_TABLE,
    TableRows,
    _derive_table_cuda,
    _derived,
    _groups,
    derive_rows,
)
from paceline.kernels.step_view import StepView


@pytest.fixture
def cuda_path() -> Iterator[None]:
    """The operator launches its kernel for CPU tensors too."""
    with torch.library._scoped_library("paceline", "IMPL") as library:
        library.impl("derive_table", _derive_table_cuda, "CPU")
        yield


@pytest.mark.usefixtures("cuda_path")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", SMALL, ids=lambda shape: shape.name)
def test_the_kernel_derives_what_the_reference_does(shape: StepShape, seed: int) -> None:
    rows, view = make_rows(shape, seed=seed), make_view(shape)
    written = (*_derived(view), view.input_ids, *_groups(view))
    _DERIVE_TABLE(*rows, *written, shape.page_sizes, view.max_extend_len)
    assert differences(view, derived(shape, rows)) == []


def test_requests_tokens_and_pages_past_one_block_are_reached() -> None:
    """More requests than are summed at once, tokens and pages of several programs."""
    from paceline.kernels._triton.derive import launch_derive

    crowd = StepShape("crowd", (1,) * 21, max_tokens=5, num_rows=30)
    long = StepShape("long", (1025, 2), page_sizes=(256,), max_tokens=1100)
    wide = StepShape("wide", (1,), page_sizes=(16, 1))
    for shape in (crowd, long, wide):
        rows, view = make_rows(shape, seed=1), make_view(shape)
        groups = [*zip(rows.page_tables, *_groups(view), shape.page_sizes, strict=True)]
        written, longest = (*_derived(view), view.input_ids), view.max_extend_len
        launch_derive(rows, written, groups, max_extend_len=longest, block=8)
        assert differences(view, derived(shape, rows)) == []


def test_the_cases_hold_frozen_rows_and_slots_past_32_bits() -> None:
    """Otherwise the comparisons above would show little."""
    shape = SMALL[3]
    rows = make_rows(shape, seed=0)
    finish = rows.finish[rows.facts[: len(shape.extend_lens), 0].long()]
    assert (finish != FinishCode.RUNNING).any()
    assert (finish == FinishCode.RUNNING).any()
    assert derived(shape, rows).groups[0].out_cache_loc.max() > 2**32


def test_the_operator_is_told_everything_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = SMALL[2]
    told(monkeypatch, "_DERIVE_TABLE", make_rows(shape, seed=0), make_view(shape))


def on_cpu(shape: StepShape, rows: TableRows) -> StepView:
    """The step by the launcher."""
    view, offsets = make_view(shape), torch.arange(sum(shape.strides), dtype=torch.int32)
    derive_rows(rows, view, page_sizes=shape.page_sizes, offsets=offsets)
    return view


def test_the_launcher_takes_the_reference_on_a_cpu() -> None:
    for shape in SMALL:
        rows = make_rows(shape, seed=0)
        assert differences(on_cpu(shape, rows), derived(shape, rows)) == []


def test_bad_argument_is_named_with_what_was_expected() -> None:
    shape = SMALL[2]
    rows = make_rows(shape, seed=0)
    tables = [rows.page_tables[0], rows.page_tables[1].long()]
    text = r" must be int32 \[rows, columns\] with a contiguous last dimension, got int"
    for name, bad in (
        ("facts", rows._replace(facts=rows.facts.long())),
        ("token_ids", rows._replace(token_ids=rows.token_ids.T)),
        (r"page_tables\[1\]", rows._replace(page_tables=tables)),
    ):
        with pytest.raises(KernelArgumentError, match=name + text):
            on_cpu(shape, bad)
