"""The request table: what a join and its pages write, and into which row."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from paceline.core.padding import PAD_PREFIX_LEN
from paceline.core.request.sampling_params import SamplingParams
from paceline.core.step import Delta, FinishCode, JoinDelta, PageDelta
from paceline.runner.staging import StagingRing
from paceline.runner.table.request_table import RequestTable
from paceline.runner.table.runs import page_runs


def make_table(**settings: object) -> RequestTable:
    sizes = {"max_running": 3, "max_tokens": 8, "max_pages": (5, 4), "eos_token_ids": (7, 9)}
    return RequestTable(**(sizes | settings), device=torch.device("cpu"))


def stage(table: RequestTable, *deltas: Delta) -> int:
    """Returns the number of copies."""
    slot = StagingRing(1 << 16, pinned=False).slot(0)
    copies = table.stage(deltas, slot)
    for target, staged in copies:
        target.copy_(staged)
    return len(copies)


def join(row: int, tokens: tuple[int, ...], **more: object) -> JoinDelta:
    settings = {"prompt_len": 2, "prefix_len": 0, "max_len": 8, "params": SamplingParams(seed=3)}
    return JoinDelta(row=row, token_ids=tokens, **(settings | more))


def test_a_join_wakes_its_row_behind_the_hit_and_touches_no_other() -> None:
    table = make_table()
    table.finish.fill_(int(FinishCode.STOP_TOKEN))
    table.token_ids.fill_(-1)
    stage(table, join(2, (4, 5, 6), prefix_len=2))
    assert table.kv_committed.tolist() == [PAD_PREFIX_LEN, 0, 2, 0]
    assert [code == FinishCode.RUNNING for code in table.finish.tolist()] == [False] * 2 + [
        True,
        False,
    ]
    assert table.token_ids[2].tolist() == [4, 5, 6, -1, -1, -1, -1, -1]
    assert (table.token_ids[[0, 1, 3]] == -1).all()


def test_a_join_brings_limits_and_what_ends_it() -> None:
    table = make_table()
    stage(table, join(1, (4, 5, 6)), join(3, (4,), params=SamplingParams(ignore_eos=True, seed=8)))
    sampling = table.sampling
    assert sampling.seed[[1, 3]].tolist() == [3, 8]
    assert sampling.prompt_len[[1, 3]].tolist() == [2, 2]
    assert sampling.max_len[[1, 3]].tolist() == [8, 8]
    assert sampling.stop_ids[1, :3].tolist() == [7, 9, -1]
    assert sampling.num_stop_ids[[1, 3]].tolist() == [2, 0]


def test_pages_enter_their_group_where_they_belong() -> None:
    table = make_table()
    first = PageDelta(row=2, group=0, start=0, page_ids=(11, 12))
    more = PageDelta(row=2, group=0, start=2, page_ids=(13,))
    other = PageDelta(row=2, group=1, start=1, page_ids=(21, 22))
    stage(table, first, more, other)
    assert table.page_tables[0].tolist() == [[0] * 5, [0] * 5, [11, 12, 13, 0, 0], [0] * 5]
    assert table.page_tables[1].tolist() == [[0] * 4, [0] * 4, [0, 21, 22, 0], [0] * 4]


# Rows of a step that joins some, the tokens of each, and how many runs that makes.
TOGETHER = [
    pytest.param(((1, 3), (2, 3), (3, 2), (4, 3)), 1, id="alike"),
    pytest.param(((1, 3), (3, 3), (4, 3), (2, 3)), 3, id="apart"),
    pytest.param(((1, 1), (2, 8), (3, 8), (4, 1), (5, 1)), 2, id="a long one behind a short"),
]


@pytest.mark.parametrize(("joining", "num_runs"), TOGETHER)
def test_rows_that_enter_together_hold_what_they_would_one_by_one(
    joining: tuple[tuple[int, int], ...], num_runs: int
) -> None:
    deltas: list[Delta] = []
    for row, length in joining:
        asked = SamplingParams(seed=row // 2, temperature=0.5, stop_token_ids=[row])
        ids = range(10 * row, 10 * row + length)
        packed = np.array(ids, np.int32).tobytes() if row < 4 else None
        second = {"second_from": row if row % 2 else None, "params": asked, "prefix_len": row}
        deltas.append(join(row, tuple(ids), packed_ids=packed, **second))
        deltas.append(PageDelta(row=row, group=1, start=0, page_ids=(row, 20)))
        deltas.append(PageDelta(row=row, group=1, start=2, page_ids=(30, row)))
        deltas.append(PageDelta(row=row, group=0, start=row // 4, page_ids=(row,) * (1 + row % 2)))
    together, apart = (make_table(max_running=6, tells_types=True) for _ in range(2))
    num_copies = stage(together, *deltas) - len(page_runs(deltas))
    assert num_copies == 5 * num_runs
    for delta in deltas:
        stage(apart, replace(delta, packed_ids=None) if isinstance(delta, JoinDelta) else delta)
    for name, tensor in together.named_tensors().items():
        assert torch.equal(tensor, apart.named_tensors()[name]), name


def test_what_nobody_samples_stays_on_the_host() -> None:
    table, sampling = make_table(samples=False), make_table().sampling
    assert stage(table, join(1, (4, 5, 6)), join(2, (7, 8, 9))) == 2
    assert table.token_ids[1:3, :3].tolist() == [[4, 5, 6], [7, 8, 9]]
    assert torch.equal(table.sampling.ints, sampling.ints)
    assert torch.equal(table.sampling.floats, sampling.floats)


@pytest.mark.parametrize(("length", "width"), [(4, 8), (3, 3)])
def test_prompts_that_half_fill_their_rows_are_copied_with_them(length: int, width: int) -> None:
    """As one piece of memory; others leave alone what is behind the longest."""
    table = make_table()
    slot = StagingRing(1 << 16, pinned=False).slot(0)
    target, staged = table.stage([join(row, (5,) * length) for row in (1, 2)], slot)[0]
    assert target.shape == staged.shape == (2, width)
    assert target.is_contiguous() is (width == 8)
    assert staged.tolist() == [[5] * length + [0] * (width - length)] * 2
