"""A shape of drafts is one that a proposer can make and a kernel can hold."""

import pytest

from paceline.core.draft_shape import NO_DRAFTS, DraftShape
from paceline.core.errors import ConfigError
from paceline.core.modes import MaskKind

BAD = {
    "a root alone": ((1, 1, 1), "speculative_num_draft_tokens must be 2 .a chain of 1 and its"),
    "a chain with more": ((3, 1, 5), "must be 4 .a chain of 3 and its root., got 5; leave"),
    "more than it scores": ((1, 2, 4), "must be at most 3: a tree of 1 steps with topk 2 has 2"),
}


@pytest.mark.parametrize("case", BAD)
def test_an_impossible_shape_is_refused_by_name(case: str) -> None:
    (steps, topk, tokens), text = BAD[case]
    with pytest.raises(ConfigError, match=text):
        DraftShape(num_steps=steps, topk=topk, num_draft_tokens=tokens)


@pytest.mark.parametrize(
    ("shape", "mask", "max_path", "reach"),
    [
        ((0, 1, 1), MaskKind.CAUSAL, 1, 0),  # nobody drafts
        ((3, 1, 4), MaskKind.CAUSAL, 4, 4),
        ((3, 4, 8), MaskKind.TREE, 4, 9),  # the last pass: a root and 4 nodes of depths 1 and 2
        ((3, 2, 8), MaskKind.TREE, 4, 8),
        ((4, 2, 3), MaskKind.TREE, 3, 7),  # 3 rows hold no path of 5
    ],
)
def test_what_a_round_emits_and_writes_at_most(
    shape: tuple[int, int, int], mask: MaskKind, max_path: int, reach: int
) -> None:
    steps, topk, tokens = shape
    found = DraftShape(num_steps=steps, topk=topk, num_draft_tokens=tokens)
    assert (found.mask, found.max_path, found.reach) == (mask, max_path, reach)
    assert found.has_drafts is (found != NO_DRAFTS)


@pytest.mark.parametrize(
    ("topk", "from_root", "rows"),
    [
        (1, False, (1, 1, 1)),  # the first of four drafts needs no pass
        (1, True, (1, 1, 1, 1)),
        (3, False, (3, 6, 9)),
        (3, True, (1, 4, 7, 10)),
    ],
)
def test_a_pass_over_a_tree_holds_the_rows_of_the_one_before(
    topk: int, from_root: bool, rows: tuple[int, ...]
) -> None:
    shape = DraftShape(num_steps=4, topk=topk, num_draft_tokens=5)
    assert shape.pass_rows(from_root=from_root) == rows
    assert shape.reach >= max(rows)
