"""Drafts that the host names: whose place they take in a round, and how many count."""

import pytest
import torch

from paceline.core.draft_shape import DraftShape
from paceline.core.modes import MaskKind
from paceline.core.step import GivenDrafts
from paceline.kernels.commit import Drafts
from paceline.runner.buffers import StepBuffers
from paceline.runner.draft_paths import given_most, given_tree
from paceline.runner.extents import PaddedSize
from paceline.runner.proposer import DraftTree
from paceline.runner.staging import StagingRing

GIVEN = (GivenDrafts(0, (), ()), GivenDrafts(2, (5, 6), (-1, -1)))
SIZE = PaddedSize.uniform(3, 4)


def staged(shape: DraftShape) -> StepBuffers:
    buffers = StepBuffers(
        max_reqs=4,
        max_tokens=16,
        max_pages=(4,),
        max_tree_rows=0 if shape.is_chain else shape.num_draft_tokens,
        max_path=shape.max_path,
        vocab_size=40,
        kv_len_bound=16,
        device=torch.device("cpu"),
    )
    slot = StagingRing(1 << 12, pinned=False).slot(1)
    has_tree = not shape.is_chain
    for target, source in buffers.fill_given(GIVEN, SIZE, slot, has_tree=has_tree):
        target.copy_(source)
    return buffers


@pytest.mark.parametrize("topk", [1, 2])
def test_given_drafts_take_the_place_of_the_proposers_and_no_more_count(topk: int) -> None:
    shape = DraftShape(num_steps=3, topk=topk, num_draft_tokens=4)
    buffers = staged(shape)
    view = buffers.view(SIZE, MaskKind.CAUSAL if topk == 1 else MaskKind.TREE)
    view.row_ids.copy_(torch.tensor([3, 1, 2]))
    own = torch.arange(12).view(3, 4) + 20
    above = None if topk == 1 else torch.tensor([[-1, 0, 1, 2]] * 3, dtype=torch.int32)
    q = torch.rand(3, 3, 9)
    given = buffers.given(view)
    tree = given_tree(DraftTree(own, above, q), given)
    assert tree.tokens.tolist() == [[20, 21, 22, 23], [24, 25, 26, 27], [28, 5, 6, 31]]
    if above is not None and tree.parents is not None:
        assert tree.parents.tolist() == [[-1, 0, 1, 2], [-1, 0, 1, 2], [-1, 0, 0, -1]]
    assert tree.q is not None
    assert torch.isnan(tree.q).flatten(1).all(1).tolist() == [True, False, True]
    assert torch.equal(tree.q[1], q[1])
    most = torch.tensor([9, 9, 9, 9])
    limited = given_most(Drafts(own, above, most), given, view)
    assert limited.max_drafts.tolist() == [9, 9, 2, 0]
    assert most.tolist() == [9, 9, 9, 9]


def test_of_padded_rows_the_proposer_drafts() -> None:
    buffers = staged(DraftShape(num_steps=3, topk=2, num_draft_tokens=4))
    buffers.pad(SIZE)
    assert (buffers.given_ids == -1).all()


def test_who_drafts_nothing_has_no_room_for_any() -> None:
    buffers = StepBuffers(
        max_reqs=4,
        max_tokens=16,
        max_pages=(4,),
        vocab_size=40,
        kv_len_bound=16,
        device=torch.device("cpu"),
    )
    assert buffers.given_ids.numel() == buffers.given_parents.numel() == 0
    assert buffers.mask_words.shape == (4, 2)
