"""The Triton kernel of commit over derived steps, against the definition."""

import pytest
import torch
from step_cases import SMALL, StepShape, make_commit, moved

from paceline.core.step import FinishCode
from paceline.kernels._triton.commit import launch_commit
from paceline.kernels.commit import CommittedRows, commit_reference


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shape", SMALL, ids=lambda shape: shape.name)
def test_the_kernel_commits_what_the_reference_does(shape: StepShape, seed: int) -> None:
    rows, ends, step, results = make_commit(shape, seed=seed)
    wanted_rows, wanted_results = CommittedRows(*moved(rows, "cpu")), results.clone()
    commit_reference(wanted_rows, ends, step, wanted_results)
    launch_commit(rows, ends, step, results)
    assert torch.equal(results, wanted_results)
    for name, mine, theirs in zip(CommittedRows._fields, rows, wanted_rows, strict=True):
        assert torch.equal(mine, theirs), name


def test_what_lies_behind_the_stop_ids_of_a_row_stops_nobody() -> None:
    """There is the next row, and its limit comes first."""
    rows, ends, step, results = make_commit(SMALL[1], seed=0)
    ends.max_len.copy_(torch.arange(50, 50 + len(ends.max_len)))
    behind = ends.max_len[(step.row_ids + 1).clamp(max=len(ends.max_len) - 1)]
    step = step._replace(token_ids=behind.unsqueeze(1), finite=torch.ones_like(step.finite))
    launch_commit(rows, ends, step, results)
    assert results[:, 0].any()
    assert not (results[:, 1] == FinishCode.STOP_TOKEN).any()


def test_the_cases_hold_every_finish_code_and_rows_that_emit_nothing() -> None:
    """Otherwise the comparison above would show little."""
    codes: set[int] = set()
    for shape in SMALL:
        for seed in range(4):
            rows, ends, step, results = make_commit(shape, seed=seed)
            commit_reference(rows, ends, step, results)
            codes |= set(results[:, 1].tolist())
            assert set(results[:, 0].tolist()) <= {0, 1}
    assert codes == {int(code) for code in FinishCode}
