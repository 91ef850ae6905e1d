"""keep_states: which slots are copied, and what each stands for afterwards."""

import pytest
import torch
from step_cases import rubbish_view
from torch import Tensor

from paceline.kernels.keep_states import keep_states
from paceline.kernels.step_view import GroupView

EVERY = 4


def table(rows: list[tuple[int, int, int]]) -> GroupView:
    """Read, write and checkpoint slots."""
    slots = torch.tensor(rows, dtype=torch.int32)
    return GroupView(page_table=slots, out_cache_loc=torch.empty(0, dtype=torch.int64))


def keep(
    prefix_lens: list[int], kept: list[int], rows: list[tuple[int, int, int]], num_slots: int = 9
) -> tuple[list[Tensor], Tensor, Tensor]:
    """The parts, what each slot stands for, and what the host is told."""
    view = rubbish_view(len(rows), 1, (3,), "cpu")
    view.prefix_lens.copy_(torch.tensor(prefix_lens))
    parts = [
        torch.arange(2 * num_slots * 3, dtype=torch.float32).view(2, num_slots, 3),
        torch.arange(2 * num_slots, dtype=torch.bfloat16).view(2, num_slots),
    ]
    lens, told = torch.full((num_slots,), 77, dtype=torch.int32), view.kv_lens
    num_kept = torch.tensor(kept, dtype=torch.int32)
    keep_states(parts, lens, view, table(rows), num_kept, every=EVERY, state_lens=told)
    return parts, lens, told


def test_the_worked_example_holds():
    parts, lens, told = keep([6, 9, 1], [2, 1, 1], [(5, 5, 7), (6, 6, 8), (0, 0, 0)])
    assert told.tolist() == [8, 0, 0]
    assert lens.tolist() == [0, 77, 77, 77, 77, 8, 10, 8, 77]
    for part in parts:
        assert torch.equal(part[:, 7], part[:, 5])
        assert not torch.equal(part[:, 8], part[:, 6])


def test_without_a_slot_for_it_nothing_is_kept():
    _, lens, told = keep([6], [2], [(5, 5, 0)])
    assert told.tolist() == [0]
    assert lens[5] == 8
    assert lens[0] == 0


@pytest.mark.parametrize("kept", [0, 3])
def test_a_round_that_ends_beside_the_boundary_keeps_nothing(kept):
    parts, _, told = keep([6 if kept else 8], [kept], [(5, 5, 7)])
    assert told.tolist() == [0]
    assert not torch.equal(parts[0][:, 7], parts[0][:, 5])
