"""Draft trees as parents."""

import pytest

from paceline.proof.suite.trees import (
    VERIFY_TREES,
    beam,
    chain,
    depths,
    draft_step,
    forest,
    irregular,
    unbalanced,
    wide,
)


def children(parents):
    return [parents.count(row) for row in range(len(parents))]


def path(parents, row):
    """The rows from a root down to `row`."""
    return [] if row < 0 else [*path(parents, parents[row]), row]


@pytest.mark.parametrize("name", VERIFY_TREES)
def test_every_row_hangs_on_an_earlier_one(name):
    assert all(-1 <= parent < row for row, parent in enumerate(VERIFY_TREES[name]))


@pytest.mark.parametrize("name", VERIFY_TREES)
def test_depth_counts_ancestors(name):
    tree = VERIFY_TREES[name]
    assert depths(tree) == tuple(len(path(tree, row)) - 1 for row in range(len(tree)))


def test_named_shapes_are_what_they_say():
    assert chain(3) == (-1, 0, 1)
    assert wide(2) == beam(2, 1) == (-1, 0, 0)
    assert forest(3) == (-1, -1, -1)
    assert max(depths(VERIFY_TREES["deep"])) == 8
    assert max(children(wide(8))) == 8
    assert len(set(map(len, (path(unbalanced(8), row) for row in (5, 6, 7))))) == 3


@pytest.mark.parametrize("topk", [2, 4, 8])
def test_beam_has_topk_nodes_a_level_and_dead_branches(topk):
    tree = beam(topk, 4)
    levels = depths(tree)
    assert [levels.count(level) for level in range(5)] == [1, topk, topk, topk, topk]
    assert max(children(tree)[1 : 1 + 3 * topk]) > 1
    assert 0 in children(tree)[1 : 1 + 3 * topk]


def test_irregular_rows_of_a_depth_are_not_neighbours():
    levels = depths(irregular(9))
    assert list(levels) != sorted(levels)


def test_irregular_has_branches_at_every_size():
    for num in range(7, 30):
        assert irregular(num) != chain(num)
        assert max(children(irregular(num))) > 1


@pytest.mark.parametrize("name", ["topk2-deep", "topk4", "irregular", "deep"])
def test_draft_step_holds_the_drafted_nodes_down_to_its_depth(name):
    tree = VERIFY_TREES[name]
    for index in range(max(depths(tree))):
        step = draft_step(tree, index)
        want = [level - 1 for level in depths(tree) if 1 <= level <= index + 1]
        assert list(depths(step)) == want


def test_draft_step_keeps_every_path():
    tree = irregular(9)
    kept = [row for row, level in enumerate(depths(tree)) if level >= 1]
    step = draft_step(tree, 99)
    for place, row in enumerate(kept):
        assert [kept[node] for node in path(step, place)] == path(tree, row)[1:]
