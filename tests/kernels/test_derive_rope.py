"""derive_rope: a walk by hand, the kernel against the definition, and what is refused."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from step_cases import rubbish_view

from paceline.core.errors import KernelArgumentError
from paceline.kernels.derive_rope import RopeRows, derive_rope, derive_rope_reference
from paceline.kernels.step_view import StepView

Run = Callable[[RopeRows, StepView], None]


def run_triton(rope: RopeRows, view: StepView) -> None:
    from paceline.kernels._triton.derive_rope import launch_derive_rope

    fields = view.row_ids, view.req_ids, view.positions, view.rope_positions.T
    launch_derive_rope(*rope, *fields)


RUNS = pytest.mark.parametrize(
    "run", [derive_rope, derive_rope_reference, run_triton], ids=["op", "reference", "triton"]
)


def view_of(rows: list[int], req_ids: list[int], positions: list[int], axes: int) -> StepView:
    view = rubbish_view(len(rows), len(positions), (4,), "cpu")
    return replace(
        view,
        row_ids=torch.tensor(rows),
        req_ids=torch.tensor(req_ids),
        positions=torch.tensor(positions),
        rope_positions=torch.full((len(positions), axes), -7).T,
    )


@RUNS
def test_the_worked_example(run: Run) -> None:
    rope = RopeRows.make(3, 8, 2, torch.device("cpu"))
    rope.given.fill_(99)  # behind what was given: rubbish
    rope.given[2, :4] = torch.tensor([[0, 0], [1, 1], [1, 2], [3, 3]])
    rope.ahead[2] = torch.tensor([4, -1])
    # A request that brought none, and a padded row.
    view = view_of([2, 1, 0], [0, 0, 0, 0, 1, 1, 2], [2, 3, 4, 5, 0, 7, 1], 2)
    run(rope, view)
    assert view.rope_positions.tolist() == [[1, 3, 3, 4, 0, 7, 1], [2, 3, 3, 4, 0, 7, 1]]


@RUNS
def test_many_tokens_and_axes_in_blocks(run: Run) -> None:
    random = torch.Generator().manual_seed(1)
    rope = RopeRows.make(5, 400, 3, torch.device("cpu"))
    rope.given.copy_(torch.randint(0, 400, rope.given.shape, generator=random))
    rope.ahead.copy_(torch.tensor([[0, 0], [400, 5], [7, -3], [0, 2], [129, 1]]))
    rows, req_ids = [4, 2, 3, 1], sorted([*range(4)] * 99)
    positions = torch.randint(0, 400, (4 * 99,), generator=random).tolist()
    view = view_of(rows, req_ids, positions, 3)
    run(rope, view)
    for token, (req, index) in enumerate(zip(req_ids, positions, strict=True)):
        num_given, delta = rope.ahead[rows[req]].tolist()
        wanted = rope.given[rows[req], index].tolist() if index < num_given else [index + delta] * 3
        assert view.rope_positions[:, token].tolist() == wanted


def test_one_axis_is_the_positions_themselves() -> None:
    view = rubbish_view(1, 3, (4,), "cpu")
    before = view.positions.clone()
    derive_rope(None, view)
    assert view.rope_positions is view.positions
    assert torch.equal(view.positions, before)


def test_buffers_of_one_axis_are_refused() -> None:
    rope = RopeRows.make(3, 8, 2, torch.device("cpu"))
    text = r"rope_positions must be int64 \[2, 3\], .* got int64 \[3\] .*; make the step's buffers"
    with pytest.raises(KernelArgumentError, match=text):
        derive_rope(rope, rubbish_view(1, 3, (4,), "cpu"))
