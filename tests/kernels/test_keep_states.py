"""keep_states: which slots are copied, and what each stands for afterwards."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from step_cases import rubbish_view
from torch import Tensor

from paceline.kernels._triton import keep_states as keep_states_module
from paceline.kernels._triton.keep_states import launch_keep_states
from paceline.kernels.keep_states import keep_states, keep_states_reference
from paceline.kernels.step_view import GroupView

EVERY = 4
Run = Callable[..., None]


def run_triton(
    parts: list[Tensor], lens: Tensor, view: Any, group: GroupView, num_kept: Tensor, **more: Any
) -> None:
    args = view.prefix_lens, group.page_table, num_kept, more["every"], more["state_lens"]
    launch_keep_states(parts, lens, *args)


RUNS = pytest.mark.parametrize("run", [keep_states, run_triton], ids=["op", "triton"])


def table(rows: list[tuple[int, int, int]]) -> GroupView:
    """Read, write and checkpoint slots."""
    slots, unread = torch.tensor(rows, dtype=torch.int32), torch.empty(0, dtype=torch.int32)
    return GroupView(
        page_table=slots, out_cache_loc=unread.long(), prefix_lens=unread, kv_lens=unread
    )


def keep(
    run: Run,
    prefix_lens: list[int],
    kept: list[int] | Tensor,
    rows: list[tuple[int, int, int]],
    num_slots: int = 9,
) -> tuple[list[Tensor], Tensor, Tensor]:
    """The parts, what each slot stands for, and what the host is told."""
    view = rubbish_view(len(rows), 1, (3,), "cpu")
    view.prefix_lens.copy_(torch.tensor(prefix_lens))
    parts = [
        torch.arange(2 * num_slots * 3, dtype=torch.float32).view(2, num_slots, 3),
        torch.arange(2 * num_slots, dtype=torch.bfloat16).view(2, num_slots),
    ]
    lens, told = torch.full((num_slots,), 77, dtype=torch.int32), view.kv_lens
    num_kept = torch.as_tensor(kept, dtype=torch.int32)  # a tensor as it lies
    run(parts, lens, view, table(rows), num_kept, every=EVERY, state_lens=told)
    return parts, lens, told


@RUNS
def test_the_worked_example_holds(run: Run) -> None:
    parts, lens, told = keep(run, [6, 9, 1], [2, 1, 1], [(5, 5, 7), (6, 6, 8), (0, 0, 0)])
    assert told.tolist() == [8, 0, 0]
    assert lens.tolist() == [0, 77, 77, 77, 77, 8, 10, 8, 77]
    for part in parts:
        assert torch.equal(part[:, 7], part[:, 5])
        assert not torch.equal(part[:, 8], part[:, 6])


@RUNS
def test_without_a_slot_for_it_nothing_is_kept(run: Run) -> None:
    _, lens, told = keep(run, [6], [2], [(5, 5, 0)])
    assert told.tolist() == [0]
    assert lens[5] == 8
    assert lens[0] == 0


@RUNS
@pytest.mark.parametrize("kept", [0, 3])
def test_a_round_that_ends_beside_the_boundary_keeps_nothing(run: Run, kept: int) -> None:
    parts, _, told = keep(run, [6 if kept else 8], [kept], [(5, 5, 7)])
    assert told.tolist() == [0]
    assert not torch.equal(parts[0][:, 7], parts[0][:, 5])


@RUNS
def test_a_column_of_a_rounds_results_says_what_it_kept(run: Run) -> None:
    """As the engine gives it: num_kept of a round lies apart by the row of its results."""
    results = torch.tensor([[2, 0, 31], [3, 0, 37], [1, 0, 41]], dtype=torch.int32)
    rows = [(5, 5, 7), (6, 6, 8), (1, 1, 2)]
    _, lens, told = keep(run, [6, 9, 2], results[:, 0], rows)
    assert lens[[5, 6, 1]].tolist() == [8, 12, 3]
    assert told.tolist() == [8, 12, 0]


@pytest.mark.parametrize(("width", "programs"), [(1, 1), (5, 100), (4500, 1), (4500, 100)])
def test_the_kernel_copies_what_the_definition_copies(
    monkeypatch: pytest.MonkeyPatch, width: int, programs: int
) -> None:
    monkeypatch.setattr(keep_states_module, "_PROGRAMS", programs)  # 1: for all blocks of a slot
    random = torch.Generator().manual_seed(width)
    slots = 1 + torch.randperm(40, generator=random)[:36].view(12, 3).int()
    slots[3, 2], slots[7] = 0, 0
    num_kept = torch.randint(0, 4, (12,), generator=random).int()
    prefix_lens = torch.randint(0, 9, (12,), generator=random).int()
    dtypes = torch.float32, torch.bfloat16, torch.uint8
    layers = 3
    if width == 1:  # one part of one layer tells what the others would
        layers, dtypes = 1, dtypes[:1]
    ends = []
    for run in (keep_states_reference, launch_keep_states):
        parts = [
            torch.arange(layers * 41 * width).view(layers, 41, width).remainder(199).to(dtype)
            for dtype in dtypes
        ]
        lens, told = torch.full((41,), 77, dtype=torch.int32), torch.full((12,), -7).int()
        run(parts, lens, prefix_lens, slots, num_kept, EVERY, told)
        ends.append([*(part[:, 1:] for part in parts), lens, told])
    assert any(ends[0][-1] > 0)
    for wanted, found in zip(*ends, strict=True):
        assert torch.equal(found, wanted)
