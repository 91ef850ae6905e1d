"""StepBuffers: when what is staged already may stay."""

from dataclasses import replace

import pytest
import torch

from paceline.attention.held import tensors_in
from paceline.core.step import StepLayout
from paceline.runner.buffers import Extent, PaddedSize, StepBuffers, StepUse
from paceline.runner.staging import StagingRing

LAYOUT = StepLayout(rows=(3, 1), extend_lens=(1, 1), emits=(True, True))


def make_buffers() -> StepBuffers:
    return StepBuffers(
        max_reqs=8, max_tokens=32, max_pages=(4,), kv_len_bound=16, device=torch.device("cpu")
    )


def fill(buffers: StepBuffers, layout: StepLayout, size: PaddedSize) -> None:
    for target, staged in buffers.fill(layout, size, StagingRing(4096, pinned=False).slot(0)):
        target.copy_(staged)


def test_the_same_rows_padded_otherwise_are_staged_again() -> None:
    """Behind two live rows of a step of four, facts are still those of the step before."""
    buffers = make_buffers()
    fill(buffers, LAYOUT, PaddedSize.uniform(2, 1))
    assert buffers.holds(LAYOUT, PaddedSize.uniform(2, 1))
    assert not buffers.holds(LAYOUT, PaddedSize.uniform(4, 1))
    fill(buffers, LAYOUT, PaddedSize.uniform(4, 1))
    assert buffers.facts[:4].tolist() == [[3, 1, 1], [1, 1, 1], [0, 1, 0], [0, 1, 0]]


def test_other_rows_of_the_same_size_are_staged_again() -> None:
    buffers, size = make_buffers(), PaddedSize.uniform(2, 1)
    fill(buffers, LAYOUT, size)
    assert not buffers.holds(replace(LAYOUT, rows=(1, 3)), size)
    assert not buffers.holds(replace(LAYOUT, emits=(True, False)), size)


def test_facts_that_were_padded_over_are_held_no_more() -> None:
    buffers, size = make_buffers(), PaddedSize.uniform(2, 1)
    fill(buffers, LAYOUT, size)
    buffers.pad(size)
    assert not buffers.holds(LAYOUT, size)
    assert buffers.facts[:2].tolist() == [[0, 1, 0]] * 2


def test_the_first_padded_row_of_a_ragged_step_takes_the_tokens_that_are_left() -> None:
    buffers = make_buffers()
    ragged = StepLayout(rows=(2, 4), extend_lens=(5, 3), emits=(True, False))
    fill(buffers, ragged, PaddedSize.ragged(4, 12))
    assert buffers.facts[:4].tolist() == [[2, 5, 1], [4, 3, 0], [0, 4, 0], [0, 0, 0]]


def test_every_tensor_declares_what_its_entries_are_for() -> None:
    """Sanitizer, guard and budget know of no other."""
    held = make_buffers()
    assert held.named_tensors().keys() == tensors_in("step", held).keys()
    assert {extent for _, extent in held.extents().values()} == set(Extent)


@pytest.mark.parametrize("has_overlay", [False, True])
@pytest.mark.parametrize("has_tree", [False, True])
def test_a_step_uses_the_first_entries_of_each_extent(has_tree: bool, has_overlay: bool) -> None:
    use = StepUse(PaddedSize.uniform(2, 3), has_tree, max_emitted=4, has_overlay=has_overlay)
    assert {extent.name: use.entries(extent) for extent in Extent} == {
        "CONSTANT": 0,
        "REQUEST": 2,
        "BOUND": 3,
        "TOKEN": 6,
        "TREE_TOKEN": 6 * has_tree,
        "TREE_PAIR": 18 * has_tree,
        "OVERLAID": 6 * has_overlay,
        "EMITTED": 8,
        "RESULT": 12,
    }
