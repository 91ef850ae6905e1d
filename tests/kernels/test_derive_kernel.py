"""The Triton kernel of derive against the definition, which tests/runner/test_derive.py proves."""

from collections.abc import Iterator

import pytest
import torch
from step_cases import SMALL, StepShape, derived, make_derived, make_facts, make_rows

from paceline.core.errors import KernelArgumentError
from paceline.core.step import FinishCode
from paceline.kernels.derive import _DERIVE, DerivedStep, RequestRows, _derive_cuda, derive


def differences(actual: DerivedStep, wanted: DerivedStep) -> list[str]:
    """Names of the fields that differ."""
    return [
        name
        for name, mine, theirs in zip(DerivedStep._fields, actual, wanted, strict=True)
        if not all(
            torch.equal(one, other)
            for one, other in zip(
                mine if isinstance(mine, list) else [mine],
                theirs if isinstance(theirs, list) else [theirs],
                strict=True,
            )
        )
    ]


@pytest.fixture
def cuda_path() -> Iterator[None]:
    """The operator launches its kernel for CPU tensors too."""
    with torch.library._scoped_library("paceline", "IMPL") as library:
        library.impl("derive", _derive_cuda, "CPU")
        yield


@pytest.mark.usefixtures("cuda_path")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", SMALL, ids=lambda shape: shape.name)
def test_the_kernel_derives_what_the_reference_does(shape: StepShape, seed: int) -> None:
    facts, rows = make_facts(shape, seed=seed), make_rows(shape, seed=seed)
    actual = make_derived(shape)
    _DERIVE(facts, *rows, *actual, shape.page_sizes, max(shape.strides))
    assert differences(actual, derived(shape, facts, rows)) == []


def test_requests_tokens_and_pages_past_one_block_are_reached() -> None:
    """More requests than are summed at once, tokens and pages of several programs."""
    from paceline.kernels._triton.derive import launch_derive

    crowd = StepShape("crowd", (1,) * 21, max_tokens=5, num_rows=30)
    long = StepShape("long", (1025, 2), page_sizes=(256,), max_tokens=1100)
    wide = StepShape("wide", (1,), page_sizes=(16, 1))
    for shape in (crowd, long, wide):
        facts, rows = make_facts(shape, seed=1), make_rows(shape, seed=1)
        actual, sizes = make_derived(shape), shape.page_sizes
        longest = max(shape.strides)
        launch_derive(facts, rows, actual, page_sizes=sizes, max_extend_len=longest, block=8)
        assert differences(actual, derived(shape, facts, rows)) == []


def test_the_cases_hold_frozen_rows_and_slots_past_32_bits() -> None:
    """Otherwise the comparisons above would show little."""
    shape = SMALL[3]
    facts, rows = make_facts(shape, seed=0), make_rows(shape, seed=0)
    finish = rows.finish[facts[: len(shape.extend_lens), 0].long()]
    assert (finish != FinishCode.RUNNING).any()
    assert (finish == FinishCode.RUNNING).any()
    assert derived(shape, facts, rows).out_cache_locs[0].max() > 2**32


def on_cpu(shape: StepShape, facts: torch.Tensor, rows: RequestRows) -> DerivedStep:
    """The step by the launcher."""
    out, longest = make_derived(shape), max(shape.strides)
    offsets = torch.arange(sum(shape.strides), dtype=torch.int32)
    sizes = {"page_sizes": shape.page_sizes, "max_extend_len": longest}
    derive(facts, rows, out, offsets=offsets, **sizes)
    return out


def test_the_launcher_takes_the_reference_on_a_cpu() -> None:
    for shape in SMALL:
        facts, rows = make_facts(shape, seed=0), make_rows(shape, seed=0)
        assert differences(on_cpu(shape, facts, rows), derived(shape, facts, rows)) == []


def test_bad_argument_is_named_with_what_was_expected() -> None:
    shape = SMALL[2]
    facts, rows = make_facts(shape, seed=0), make_rows(shape, seed=0)
    tables = [rows.page_tables[0], rows.page_tables[1].long()]
    text = r" must be int32 \[rows, columns\] with a contiguous last dimension, got int"
    for name, bad_facts, bad_rows in (
        ("facts", facts.long(), rows),
        ("token_ids", facts, rows._replace(token_ids=rows.token_ids.T)),
        (r"page_tables\[1\]", facts, rows._replace(page_tables=tables)),
    ):
        with pytest.raises(KernelArgumentError, match=name + text):
            on_cpu(shape, bad_facts, bad_rows)
