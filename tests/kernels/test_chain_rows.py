"""chain_rows: the token behind each row, and whose row it is after a tree, read one by one."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline.core.errors import KernelArgumentError
from paceline.kernels._triton.chain_rows import launch_chain_rows
from paceline.kernels.chain_rows import (
    _CHAIN_ROWS,
    ChainRows,
    StepRows,
    _chain_rows_cuda,
    chain_rows,
)
from paceline.runner.recording.recorded import RecordedGraph

Derive = Callable[..., None]
RUNS = pytest.mark.parametrize("derive_rows", [chain_rows, launch_chain_rows], ids=["op", "triton"])
RUBBISH = -77


def random_step(
    extend_lens: list[int], *, width: int, seed: int
) -> tuple[Tensor, Tensor, StepRows]:
    """(history, kv_committed, rows): the last request padded, some positions behind what is known.

    kv_committed is a column, as the request table's is.
    """
    generator = torch.Generator().manual_seed(seed)
    reqs, table_rows = len(extend_lens), len(extend_lens) + 3
    history = torch.randint(0, 2**31 - 1, (table_rows, width), generator=generator).int()
    row_ids = 1 + torch.randperm(table_rows - 1, generator=generator)[:reqs]
    row_ids[-1] = 0
    state = torch.randint(0, width, (table_rows, 2), generator=generator).int()
    state[0, 0] = 1
    prefix = torch.randint(0, width, (reqs,), generator=generator)
    prefix[-1] = 1
    positions = [
        int(p) + i for p, length in zip(prefix, extend_lens, strict=True) for i in range(length)
    ]
    req_ids = [req for req, length in enumerate(extend_lens) for _ in range(length)]
    rows = StepRows(row_ids, torch.tensor(req_ids), torch.tensor(positions))
    return history, state[:, 0], rows


def make_out(tokens: int, *, has_tree: bool) -> ChainRows:
    return ChainRows(
        torch.full((tokens,), RUBBISH), torch.full((tokens,), RUBBISH) if has_tree else None
    )


def next_by_hand(history: Tensor, kv_committed: Tensor, rows: StepRows) -> list[int]:
    facts, newest = history.tolist(), kv_committed.tolist()
    return [
        facts[rows.row_ids[req]][min(position + 1, newest[rows.row_ids[req]])]
        for req, position in zip(rows.req_ids.tolist(), rows.positions.tolist(), strict=True)
    ]


def taps_by_hand(path: Tensor, n: int) -> list[int]:
    found = []
    for req, accepted in enumerate(path.tolist()):
        found += [req * n + (accepted[j] if j < len(accepted) else j) for j in range(n)]
    return found


@RUNS
def test_the_worked_example_is_as_stated(derive_rows: Derive) -> None:
    history = torch.tensor([[0] * 12, [*range(100, 107), 1, 2, 3, 0, 0]], dtype=torch.int32)
    rows = StepRows(torch.tensor([1]), torch.zeros(4, dtype=torch.int64), torch.arange(7, 11))
    out = make_out(4, has_tree=True)
    kv_committed = torch.tensor([1, 9], dtype=torch.int32)
    derive_rows(history, kv_committed, rows, out, path=torch.tensor([[0, 2, 2]]))
    assert out.next_ids.tolist() == [2, 3, 3, 3]
    assert out.tap_rows is not None
    assert out.tap_rows.tolist() == [0, 2, 2, 3]


@RUNS
@pytest.mark.parametrize("extend_lens", [[1], [4, 4, 4], [7, 1, 140, 3]], ids=str)
def test_each_row_learns_from_the_token_behind_it(
    derive_rows: Derive, extend_lens: list[int]
) -> None:
    """A prompt's chunks are ragged; 151 rows are more than one program's."""
    history, kv_committed, rows = random_step(extend_lens, width=150, seed=len(extend_lens))
    out = make_out(len(rows.positions), has_tree=False)
    derive_rows(history, kv_committed, rows, out, path=None)
    assert out.next_ids.tolist() == next_by_hand(history, kv_committed, rows)


@RUNS
@pytest.mark.parametrize(("reqs", "n", "max_path"), [(1, 2, 2), (3, 6, 4), (33, 5, 3), (2, 4, 4)])
def test_accepted_rows_come_first_and_the_others_stay(
    derive_rows: Derive, reqs: int, n: int, max_path: int
) -> None:
    history, kv_committed, rows = random_step([n] * reqs, width=40, seed=n)
    generator = torch.Generator().manual_seed(n)
    path = torch.rand(reqs, n, generator=generator).argsort(1)[:, :max_path].sort(1).values
    out = make_out(reqs * n, has_tree=True)
    derive_rows(history, kv_committed, rows, out, path=path.contiguous())
    assert out.next_ids.tolist() == next_by_hand(history, kv_committed, rows)
    assert out.tap_rows is not None
    assert out.tap_rows.tolist() == taps_by_hand(path, n)


def test_the_kernel_writes_nothing_behind_its_rows() -> None:
    history, kv_committed, rows = random_step([3] * 2, width=20, seed=0)
    wide = make_out(9, has_tree=True)
    assert wide.tap_rows is not None
    out = ChainRows(wide.next_ids[:6], wide.tap_rows[:6])
    launch_chain_rows(history, kv_committed, rows, out, path=torch.tensor([[0, 2], [0, 1]]))
    assert (wide.next_ids[6:] == RUBBISH).all()
    assert (wide.tap_rows[6:] == RUBBISH).all()


@pytest.mark.parametrize("has_tree", [False, True])
def test_the_operator_hands_every_argument_to_the_kernel(has_tree: bool) -> None:
    history, kv_committed, rows = random_step([3] * 2, width=20, seed=4)
    path, out = torch.tensor([[0, 2], [0, 1]]), make_out(6, has_tree=has_tree)
    with torch.library._scoped_library("paceline", "IMPL") as library:
        library.impl("chain_rows", _chain_rows_cuda, "CPU")
        _CHAIN_ROWS(history, kv_committed, *rows, path if has_tree else None, *out)
    assert out.next_ids.tolist() == next_by_hand(history, kv_committed, rows)
    if out.tap_rows is not None:
        assert out.tap_rows.tolist() == taps_by_hand(path, 3)


def test_a_replay_reads_the_history_it_finds() -> None:
    history, kv_committed, rows = random_step([4] * 3, width=30, seed=1)
    path, out = torch.tensor([[0, 2], [0, 1], [0, 1]]), make_out(12, has_tree=True)
    graph = RecordedGraph(poison=True)
    graph.capture(lambda: chain_rows(history, kv_committed, rows, out, path=path))
    other_history, other_committed, other_rows = random_step([4] * 3, width=30, seed=2)
    history.copy_(other_history)
    kv_committed.copy_(other_committed)
    for mine, theirs in zip(rows, other_rows, strict=True):
        mine.copy_(theirs)
    path.copy_(torch.tensor([[0, 1], [0, 3], [0, 2]]))
    graph.replay()
    assert out.next_ids.tolist() == next_by_hand(history, kv_committed, rows)
    assert out.tap_rows is not None
    assert out.tap_rows.tolist() == taps_by_hand(path, 4)


def test_bad_arguments_are_named_with_what_was_expected() -> None:
    history, kv_committed, rows = random_step([3] * 2, width=20, seed=0)
    path, out = torch.tensor([[0, 2], [0, 1]]), make_out(6, has_tree=True)
    with pytest.raises(
        KernelArgumentError, match=r"history must be contiguous int32 .*, got int64"
    ):
        chain_rows(history.long(), kv_committed, rows, out, path=path)
    with pytest.raises(
        KernelArgumentError, match=r"kv_committed must be int32 \[5\], .* got int32 \[4\]"
    ):
        chain_rows(history, kv_committed[1:], rows, out, path=path)
    with pytest.raises(KernelArgumentError, match=r"tap_rows must be int64 \[6\], got None"):
        chain_rows(history, kv_committed, rows, out._replace(tap_rows=None), path=path)
    with pytest.raises(KernelArgumentError, match=r"next_ids must be int64 \[6\], got int64 \[5\]"):
        chain_rows(history, kv_committed, rows, out._replace(next_ids=out.next_ids[1:]), path=path)
