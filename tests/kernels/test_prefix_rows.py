"""prefix_rows: rows of many prefixes out of a paged cache, against a walk through its pages."""

import pytest
import torch
from torch import Tensor

from paceline.core.errors import KernelArgumentError
from paceline.kernels.prefix_rows import prefix_rows

PAGE, WIDTH, PAGES = 4, 20, 12


def run_triton(cache, page_table, starts, *, first: int, num_rows: int) -> Tensor:
    from paceline.kernels._triton.prefix_rows import launch_prefix_rows

    out = torch.full((num_rows + 1, WIDTH), float("nan"), dtype=cache.dtype)
    launch_prefix_rows(cache, page_table, starts, first, out[:num_rows])
    assert out[num_rows].isnan().all()  # nothing is written behind the last row
    return out[:num_rows]


RUNS = pytest.mark.parametrize("run", [prefix_rows, run_triton], ids=["op", "triton"])


def make(prefix_lens: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """(one layer's pages of a pool, NaN where no prefix is; a page table in no order)."""
    pages = max(PAGES, 1 + 3 * len(prefix_lens))
    pool = torch.full((pages, 2, PAGE, 1, WIDTH), float("nan"))
    table = 1 + torch.randperm(pages - 1, generator=torch.Generator().manual_seed(1))
    table = table[: 3 * len(prefix_lens)].view(-1, 3).int()
    cache = pool[:, 1]
    for row, length in enumerate(prefix_lens):
        for position in range(length):
            value = 100.0 * row + position
            cache[table[row, position // PAGE], position % PAGE] = value
    return cache, table


@RUNS
@pytest.mark.parametrize(
    ("first", "end"), [(0, 1), (0, 12), (1, 4), (3, 9), (11, 12)], ids=lambda at: str(at)
)
def test_each_request_has_what_its_prefix_has_there(run, first: int, end: int) -> None:
    """One has nothing at all, one is exhausted before, one within; rows behind the last are 0."""
    assert_found(run, (5, 0, 12), first, end)


@RUNS
@pytest.mark.parametrize("reqs", [64, 66])  # the end of the last is one more
def test_more_requests_than_are_looked_at_together(run, reqs: int) -> None:
    assert_found(run, (1,) * (reqs - 2) + (5, 2), 0, 12)


def assert_found(run, lens: tuple[int, ...], first: int, end: int) -> None:
    cache, table = make(lens)
    counts = [max(0, min(length, end) - first) for length in lens]
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    found = run(cache, table, starts, first=first, num_rows=sum(counts) + 3)
    wanted = [100.0 * row + first + at for row, count in enumerate(counts) for at in range(count)]
    assert found[:, 0].tolist() == [*wanted, 0.0, 0.0, 0.0]
    assert (found == found[:, :1]).all()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"cache": torch.zeros(2, PAGE, 2, WIDTH)}, r"^cache must be \[num_pages, page_size, 1"),
        ({"page_table": torch.zeros(2, 3)}, r"^page_table must be contiguous int32 \[2, 3\]"),
        ({"starts": torch.zeros(2).int()}, r"^starts must be contiguous int32 \[3\]"),
    ],
)
def test_what_does_not_fit_is_refused(change, text: str) -> None:
    fine = {"cache": torch.zeros(2, PAGE, 1, WIDTH), "page_table": torch.zeros(2, 3).int()}
    asked = {**fine, "starts": torch.zeros(3).int()} | change
    with pytest.raises(KernelArgumentError, match=text):
        prefix_rows(**asked, first=0, num_rows=4)
