"""pool_rows: one row of each request, whatever its length, and of padding zeros."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline.core.errors import KernelArgumentError
from paceline.core.modes import Pooling
from paceline.kernels._triton.pool_rows import launch_pool_rows
from paceline.kernels.pool_rows import pool_rows

Run = Callable[[Tensor, Tensor, Pooling, Tensor], None]


def run_triton(hidden: Tensor, cu_seqlens_q: Tensor, pooling: Pooling, out: Tensor) -> None:
    launch_pool_rows(hidden, cu_seqlens_q, pooling.value, out)


RUNS = pytest.mark.parametrize("run", [pool_rows, run_triton], ids=["op", "triton"])


def pooled(run: Run, hidden: Tensor, lens: list[int], pooling: Pooling) -> Tensor:
    cu = torch.tensor([0, *lens]).cumsum(0).int()
    out = torch.full((len(lens), hidden.shape[1]), torch.nan)
    run(hidden, cu, pooling, out)
    return out


@RUNS
def test_the_worked_example_holds(run: Run) -> None:
    hidden = torch.tensor([[1.0, 4.0], [3.0, 0.0], [5.0, 5.0]])
    found = {pooling: pooled(run, hidden, [2, 1, 0], pooling).tolist() for pooling in Pooling}
    assert found == {
        Pooling.LAST: [[3, 0], [5, 5], [0, 0]],
        Pooling.CLS: [[1, 4], [5, 5], [0, 0]],
        Pooling.MEAN: [[2, 2], [5, 5], [0, 0]],
    }


@RUNS
@pytest.mark.parametrize("pooling", Pooling)
def test_rows_behind_the_last_request_are_nobodys(run: Run, pooling: Pooling) -> None:
    hidden = torch.tensor([[1.0, 4.0], [1.0, 4.0], [torch.nan, torch.nan]])
    out = torch.full((2, 2), torch.nan)
    run(hidden, torch.tensor([0, 2, 2], dtype=torch.int32), pooling, out)
    assert out.tolist() == [[1, 4], [0, 0]]


@RUNS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pooling", Pooling)
def test_each_request_is_pooled_as_alone_in_float64(
    run: Run, dtype: torch.dtype, pooling: Pooling
) -> None:
    lens = [1, 170, 0, 33, 2]
    hidden = torch.randn(sum(lens), 200, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = pooled(run, hidden, lens, pooling)
    for row, part in zip(found, hidden.split(lens), strict=True):
        if not len(part):
            assert not row.any()
            continue
        wide = part.double()
        wanted = {
            Pooling.LAST: wide[-1],
            Pooling.CLS: wide[0],
            Pooling.MEAN: wide.mean(0),
        }[pooling]
        assert torch.allclose(row.double(), wanted, rtol=1e-6, atol=1e-6)


@RUNS
@pytest.mark.parametrize("pooling", Pooling)
def test_a_request_that_is_not_finite_leaves_its_neighbours_alone(
    run: Run, pooling: Pooling
) -> None:
    hidden = torch.ones(9, 8)
    hidden[3:6] = torch.nan
    found = pooled(run, hidden, [3, 3, 3], pooling)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], torch.ones(2, 8))


def test_what_does_not_fit_is_refused() -> None:
    hidden, cu = torch.ones(4, 8), torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(KernelArgumentError, match=r"^out must be float32 \[1, 8\], got float64"):
        pool_rows(hidden, cu, Pooling.MEAN, torch.ones(1, 8, dtype=torch.float64))
    with pytest.raises(KernelArgumentError, match=r"^hidden must be contiguous rows"):
        pool_rows(torch.ones(8, 4).T, cu, Pooling.MEAN, torch.ones(1, 8))
