"""StepBuffers: when what is staged already may stay."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from paceline.attention.held import tensors_in
from paceline.core.modes import MaskKind
from paceline.core.step import StepLayout, TokenMask
from paceline.kernels.mask_tokens import NO_MASK
from paceline.runner.buffers import StepBuffers
from paceline.runner.extents import Extent, PaddedSize, StepUse
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


def test_rows_of_padding_alone_have_the_length_that_is_dealt_and_the_last_what_is_left() -> None:
    buffers = make_buffers()
    buffers.facts.fill_(7)
    buffers.pad(PaddedSize.ragged(5, 14, pad_len=4))
    assert buffers.facts[:6].tolist() == [[0, n, 0] for n in (4, 4, 4, 2, 0)] + [[7, 7, 7]]


@pytest.mark.parametrize("shares", [False, True])
def test_a_view_says_whether_prefixes_are_read_once(shares: bool) -> None:
    size = PaddedSize.uniform(2, 1)
    assert make_buffers().view(size, MaskKind.CAUSAL, shares_prefix=shares).shares_prefix == shares


def test_every_tensor_declares_what_its_entries_are_for() -> None:
    """Sanitizer, guard and budget know of no other."""
    held = make_buffers()
    assert held.named_tensors().keys() == tensors_in("step", held).keys()
    assert {extent for _, extent in held.extents().values()} == set(Extent)


@pytest.mark.parametrize("sees_ahead", [False, True])
@pytest.mark.parametrize("has_overlay", [False, True])
@pytest.mark.parametrize("has_tree", [False, True])
def test_a_step_uses_the_first_entries_of_each_extent(
    has_tree: bool, has_overlay: bool, sees_ahead: bool
) -> None:
    use = StepUse(
        PaddedSize.uniform(2, 3),
        has_tree,
        max_emitted=4,
        has_overlay=has_overlay,
        sees_ahead=sees_ahead,
    )
    assert {extent.name: use.entries(extent) for extent in Extent} == {
        "CONSTANT": 0,
        "REQUEST": 2,
        "BOUND": 3,
        "TOKEN": 6,
        "TREE_TOKEN": 6 * has_tree,
        "TREE_PAIR": 18 * has_tree,
        "OVERLAID": 6 * has_overlay,
        "AHEAD": 6 * sees_ahead,
        "EMITTED": 8,
        "RESULT": 12,
        "POOLED": 0,
        "SAMPLED": 0,
        "MASK": 0,
        "GIVEN": 0,
        "GIVEN_TREE": 0,
    }


def test_a_step_of_masks_uses_a_row_for_each_that_is_sampled() -> None:
    size = PaddedSize.uniform(2, 3)
    assert [size.sampled(is_round=is_round) for is_round in (False, True)] == [2, 6]
    use = StepUse(size, has_tree=False, max_emitted=4, num_sampled=6, num_masks=1)
    assert [use.entries(extent) for extent in (Extent.SAMPLED, Extent.MASK)] == [6, 1]


def test_a_step_that_pools_uses_a_row_for_each_request() -> None:
    use = StepUse(PaddedSize.uniform(2, 3), has_tree=False, max_emitted=1, pools=True)
    assert use.entries(Extent.POOLED) == 2


def test_masks_are_staged_as_they_are_and_other_rows_have_none() -> None:
    buffers = StepBuffers(
        max_reqs=4,
        max_tokens=8,
        max_pages=(4,),
        vocab_size=40,
        kv_len_bound=16,
        device=torch.device("cpu"),
    )
    words = [np.array([1 << 30, row], dtype=np.int32) for row in (3, 5)]
    masks = [TokenMask(row, each.tobytes()) for row, each in zip((2, 0), words, strict=True)]
    slot = StagingRing(4096, pinned=False).slot(0)
    for target, staged in buffers.fill_masks(masks, 3, slot):
        target.copy_(staged)
    ids, told = buffers.masks(3)
    assert ids.tolist() == [1, NO_MASK, 0]
    assert told[:2].tolist() == [[1 << 30, 3], [1 << 30, 5]]
    buffers.pad(PaddedSize.uniform(2, 1))
    assert buffers.mask_ids.tolist() == [NO_MASK] * 4


@pytest.mark.parametrize(("is_round", "has_tree"), [(True, True), (True, False), (False, False)])
def test_only_a_round_with_masks_is_given_drafts(is_round: bool, has_tree: bool) -> None:
    use = StepUse(
        PaddedSize.uniform(2, 3),
        has_tree=has_tree,
        max_emitted=1,
        num_sampled=6,
        num_masks=4,
        is_round=is_round,
    )
    assert use.entries(Extent.GIVEN) == 6 * is_round
    assert use.entries(Extent.GIVEN_TREE) == 6 * has_tree
