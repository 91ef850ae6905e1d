"""The Triton kernel of commit against the definition, which tests/runner/test_commit.py proves."""

from collections.abc import Iterator

import pytest
import torch
from step_cases import SMALL, StepShape, make_commit, moved

from paceline.core.errors import KernelArgumentError
from paceline.core.step import FinishCode
from paceline.kernels.commit import (
    _COMMIT,
    CommittedRows,
    _commit_cuda,
    commit,
    commit_reference,
)


@pytest.fixture
def cuda_path() -> Iterator[None]:
    """The operator launches its kernel for CPU tensors too."""
    with torch.library._scoped_library("paceline", "IMPL") as library:
        library.impl("commit", _commit_cuda, "CPU")
        yield


@pytest.mark.usefixtures("cuda_path")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shape", SMALL, ids=lambda shape: shape.name)
def test_the_kernel_commits_what_the_reference_does(shape: StepShape, seed: int) -> None:
    rows, ends, step, results = make_commit(shape, seed=seed)
    wanted_rows, wanted_results = CommittedRows(*moved(rows, "cpu")), results.clone()
    commit_reference(wanted_rows, ends, step, wanted_results)
    _COMMIT(*rows, *ends, *step, results)
    assert torch.equal(results, wanted_results)
    for name, mine, theirs in zip(CommittedRows._fields, rows, wanted_rows, strict=True):
        assert torch.equal(mine, theirs), name


@pytest.mark.usefixtures("cuda_path")
def test_what_lies_behind_the_stop_ids_of_a_row_stops_nobody() -> None:
    """There is the next row, and its limit comes first."""
    rows, ends, step, results = make_commit(SMALL[1], seed=0)
    ends.max_len.copy_(torch.arange(50, 50 + len(ends.max_len)))
    behind = ends.max_len[(step.row_ids + 1).clamp(max=len(ends.max_len) - 1)]
    step = step._replace(token_ids=behind, finite=torch.ones_like(step.finite))
    _COMMIT(*rows, *ends, *step, results)
    assert results[:, 0].any()
    assert not (results[:, 2] == FinishCode.STOP_TOKEN).any()


def test_the_cases_hold_every_finish_code_and_rows_that_emit_nothing() -> None:
    """Otherwise the comparison above would show little."""
    codes: set[int] = set()
    for shape in SMALL:
        for seed in range(4):
            rows, ends, step, results = make_commit(shape, seed=seed)
            commit_reference(rows, ends, step, results)
            codes |= set(results[:, 2].tolist())
            assert set(results[:, 0].tolist()) <= {0, 1}
    assert codes == {int(code) for code in FinishCode}


def test_the_launcher_takes_the_reference_on_a_cpu() -> None:
    rows, ends, step, results = make_commit(SMALL[1], seed=0)
    wanted_rows, wanted_results = CommittedRows(*moved(rows, "cpu")), results.clone()
    commit_reference(wanted_rows, ends, step, wanted_results)
    commit(rows, ends, step, results)
    assert torch.equal(results, wanted_results)
    assert all(map(torch.equal, rows, wanted_rows))


def test_bad_argument_is_named_with_what_was_expected() -> None:
    rows, ends, step, results = make_commit(SMALL[1], seed=0)
    with pytest.raises(
        KernelArgumentError, match=r"token_ids must be int64 \[7\], got int32 \[7\]"
    ):
        commit(rows, ends, step._replace(token_ids=step.token_ids.int()), results)
    with pytest.raises(KernelArgumentError, match=r"results must be int32 \[7, 3\], got int32 \[6"):
        commit(rows, ends, step, results[:6])
