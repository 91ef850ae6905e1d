"""grow_tree and select_tree: the worked example, and trees grown by plain lists and sorting."""

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.core.draft_shape import DraftShape
from paceline.core.errors import KernelArgumentError
from paceline.kernels._triton.grow_tree import launch_grow_tree, launch_select_tree
from paceline.kernels.draft_topk import TopDrafts
from paceline.kernels.grow_tree import (
    Candidates,
    Frontier,
    grow_tree,
    pass_parents,
    select_tree,
)
from paceline.runner.recording.recorded import RecordedGraph

EXAMPLE = DraftShape(num_steps=3, topk=2, num_draft_tokens=6)
LETTERS = {0: ["ab"], 1: ["cd", "ef"], 2: ["gh", "ij"]}
CHANCES = {0: [[0.6, 0.3]], 1: [[0.7, 0.2], [0.5, 0.4]], 2: [[0.9, 0.05], [0.8, 0.1]]}
SHAPES = [
    DraftShape(num_steps=steps, topk=topk, num_draft_tokens=tokens)
    for steps, topk, tokens in [(1, 2, 3), (1, 8, 4), (3, 4, 8), (5, 2, 16), (2, 3, 13), (2, 16, 9)]
]
# The interpreter computes with NumPy, which warns where a number is not finite.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def grow_by_kernel(
    children: TopDrafts, frontier: Frontier | None, candidates: Candidates, *, step: int
) -> Frontier:
    reqs, topk = candidates.tokens.shape[0], children.tokens.shape[1]
    size = (reqs, topk)
    out = Frontier(
        torch.full(size, -9, dtype=torch.int32),
        torch.full(size, math.nan),
        torch.full(size, -9),
        torch.full(size, -9),
    )
    first = 0 if step == 0 else topk + (step - 1) * topk**2
    above = None if frontier is None else (frontier.ids, frontier.scores)
    launch_grow_tree(children, above, candidates, out, first_id=first)
    return out


def select_by_kernel(
    candidates: Candidates, roots: Tensor, num_draft_tokens: int
) -> tuple[Tensor, Tensor]:
    tokens = torch.full((len(roots), num_draft_tokens), -9)
    parents = torch.full((len(roots), num_draft_tokens), -9, dtype=torch.int32)
    launch_select_tree(candidates, roots, tokens, parents)
    return tokens, parents


class Run(NamedTuple):
    grow: Callable[..., Frontier]
    select: Callable[..., tuple[Tensor, Tensor]]


OP, TRITON = Run(grow_tree, select_tree), Run(grow_by_kernel, select_by_kernel)
RUNS = pytest.mark.parametrize("run", [OP, TRITON], ids=["op", "triton"])


class Grown(NamedTuple):
    candidates: Candidates
    frontiers: list[Frontier]
    tokens: Tensor  # [reqs, num_draft_tokens]
    parents: Tensor  # [reqs, num_draft_tokens]


def grow(run: Run, drafts: list[TopDrafts], roots: Tensor, shape: DraftShape) -> Grown:
    candidates = Candidates.empty(len(roots), shape, roots.device)
    frontiers: list[Frontier] = []
    for step, children in enumerate(drafts):
        above = frontiers[-1] if frontiers else None
        frontiers.append(run.grow(children, above, candidates, step=step))
    tokens, parents = run.select(candidates, roots, shape.num_draft_tokens)
    return Grown(candidates, frontiers, tokens, parents)


def example_drafts() -> list[TopDrafts]:
    return [
        TopDrafts(
            torch.tensor([[ord(letter) for letter in row] for row in LETTERS[step]]),
            torch.tensor(CHANCES[step]).log(),
        )
        for step in range(3)
    ]


def random_drafts(
    shape: DraftShape, reqs: int, *, seed: int, chances: list[float]
) -> list[TopDrafts]:
    """Probabilities drawn from a few values, so that scores tie; siblings' tokens are different."""
    generator = torch.Generator().manual_seed(seed)
    drafts = []
    for step in range(shape.num_steps):
        size = (reqs if step == 0 else reqs * shape.topk, shape.topk)
        picks = torch.randint(len(chances), size, generator=generator)
        tokens = torch.rand(size[0], 40, generator=generator).argsort(1)[:, : shape.topk]
        drafts.append(TopDrafts(tokens.contiguous(), torch.tensor(chances).log()[picks]))
    return drafts


def plain_tree(
    drafts: list[TopDrafts], req: int, root: int, shape: DraftShape
) -> tuple[list[int], list[int], list[list[int]]]:
    """(tokens, parents, origins of each frontier) of one request, by lists and sorting."""
    topk = shape.topk
    nodes: list[tuple[int, float, int]] = []  # token, score, id of the parent
    frontier, origins = [-1], []
    for step, children in enumerate(drafts):
        first = len(nodes)
        for slot, above in enumerate(frontier):
            row = req if step == 0 else req * topk + slot
            for token, own in zip(
                children.tokens[row].tolist(), children.scores[row].tolist(), strict=True
            ):
                total = float(torch.tensor(nodes[above][1] if above >= 0 else 0.0) + own)
                nodes.append((token, -math.inf if math.isnan(total) else total, above))
        ids = sorted(range(first, len(nodes)), key=lambda i: (-nodes[i][1], i))[:topk]
        origins.append([(i - first) // topk for i in ids])
        frontier = ids
    best = sorted(range(len(nodes)), key=lambda i: (-nodes[i][1], i))
    kept = sorted(best[: shape.num_draft_tokens - 1])
    row_of = {-1: 0} | {i: 1 + row for row, i in enumerate(kept)}
    tokens = [root, *(nodes[i][0] for i in kept)]
    return tokens, [-1, *(row_of[nodes[i][2]] for i in kept)], origins


@RUNS
def test_the_worked_example_grows_as_stated(run: Run) -> None:
    grown = grow(run, example_drafts(), torch.tensor([ord("R")]), EXAMPLE)
    assert "".join(map(chr, grown.candidates.tokens[0].tolist())) == "abcdefghij"
    assert grown.candidates.parents.tolist() == [[-1, -1, 0, 0, 1, 1, 2, 2, 4, 4]]
    scores = [0.6, 0.3, 0.42, 0.12, 0.15, 0.12, 0.378, 0.021, 0.12, 0.015]
    assert grown.candidates.scores.exp().tolist()[0] == pytest.approx(scores, rel=1e-5)
    assert [f.ids.tolist()[0] for f in grown.frontiers] == [[0, 1], [2, 4], [6, 8]]
    assert [f.origin.tolist()[0] for f in grown.frontiers] == [[0, 0], [0, 1], [0, 1]]
    assert "".join(map(chr, grown.tokens[0].tolist())) == "Rabceg"
    assert grown.parents.tolist() == [[-1, 0, 0, 1, 2, 3]]


@RUNS
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.num_steps}-{s.topk}")
def test_trees_are_those_of_plain_sorting(run: Run, shape: DraftShape) -> None:
    drafts = random_drafts(shape, 3, seed=1, chances=[0.5, 0.25, 0.25, 0.125, 1.0, math.nan])
    roots = torch.tensor([70, 80, 90, 99])[:3]
    grown = grow(run, drafts, roots, shape)
    for req in range(3):
        tokens, parents, origins = plain_tree(drafts, req, int(roots[req]), shape)
        assert grown.tokens[req].tolist() == tokens
        assert grown.parents[req].tolist() == parents
        assert [f.origin[req].tolist() for f in grown.frontiers] == origins


@settings(max_examples=60, deadline=None)
@given(
    shape=st.sampled_from(SHAPES),
    seed=st.integers(0, 10**6),
    chances=st.lists(st.sampled_from([1.0, 0.5, 0.0, math.nan]), min_size=1, max_size=3),
)
def test_no_draft_is_kept_without_its_parent(
    shape: DraftShape, seed: int, chances: list[float]
) -> None:
    """Whatever ties: certain children score as their parents do, and impossible ones as theirs.

    The plain tree finds no row for an orphan's parent.
    """
    drafts = random_drafts(shape, 2, seed=seed, chances=chances)
    grown = grow(OP, drafts, torch.tensor([50, 60]), shape)
    for req, root in enumerate([50, 60]):
        tokens, parents, _ = plain_tree(drafts, req, root, shape)
        assert grown.tokens[req].tolist() == tokens
        assert grown.parents[req].tolist() == parents
        edges = list(zip(parents, tokens, strict=True))
        assert len(set(edges)) == len(edges)  # siblings are different


def test_a_log_probability_above_zero_counts_as_zero() -> None:
    """As rounding may leave one; the child must not pass its parent."""
    drafts = example_drafts()
    drafts[1] = drafts[1]._replace(scores=torch.full((2, 2), 1e-3))
    for run in (OP, TRITON):
        grown = grow(run, drafts, torch.tensor([1]), EXAMPLE)
        assert grown.frontiers[1].scores.exp().tolist()[0] == pytest.approx([0.6, 0.6], rel=1e-6)


def test_passes_hang_each_row_on_the_row_of_its_parent() -> None:
    grown = grow(OP, example_drafts(), torch.tensor([1]), EXAMPLE)
    first, second, _ = [frontier.origin for frontier in grown.frontiers]
    for root, wanted in (([], [-1, -1, 0, 1]), ([-1], [-1, 0, 0, 1, 2])):
        before = torch.tensor([root], dtype=torch.int32)
        once = pass_parents(before, first)
        assert pass_parents(once, second).tolist() == [wanted]
        assert once.dtype == torch.int32


def test_a_chain_of_passes_hangs_each_row_on_the_one_before() -> None:
    origin = torch.zeros(2, 1, dtype=torch.int64)
    parents = torch.empty(2, 0, dtype=torch.int32)
    for _ in range(3):
        parents = pass_parents(parents, origin)
    assert parents.tolist() == [[-1, 0, 1]] * 2


def test_a_round_replays_on_other_drafts() -> None:
    shape, roots, kept = SHAPES[2], torch.tensor([7, 8]), []
    drafts = random_drafts(shape, 2, seed=3, chances=[0.5, 0.3, 0.2])
    graph = RecordedGraph(poison=True)
    graph.capture(lambda: kept.append(grow(OP, drafts, roots, shape)))
    others = random_drafts(shape, 2, seed=4, chances=[0.5, 0.3, 0.2])
    for mine, other in zip(drafts, others, strict=True):
        mine.tokens.copy_(other.tokens)
        mine.scores.copy_(other.scores)
    graph.replay()
    for req in range(2):
        tokens, parents, _ = plain_tree(others, req, int(roots[req]), shape)
        assert kept[0].tokens[req].tolist() == tokens
        assert kept[0].parents[req].tolist() == parents


def test_bad_arguments_are_named_with_what_was_expected() -> None:
    drafts, roots = example_drafts(), torch.tensor([1])
    candidates = Candidates.empty(1, EXAMPLE, roots.device)
    frontier = grow_tree(drafts[0], None, candidates, step=0)
    with pytest.raises(KernelArgumentError, match=r"children.tokens must be contiguous \[2, 2\]"):
        grow_tree(drafts[0], frontier, candidates, step=1)
    with pytest.raises(KernelArgumentError, match=r"frontier must be None in step 0, .* step 1;"):
        grow_tree(drafts[1], None, candidates, step=1)
    with pytest.raises(KernelArgumentError, match="candidates must be at least 14 per request"):
        grow_tree(drafts[1], frontier, candidates, step=3)
    with pytest.raises(KernelArgumentError, match=r"roots must be int64 \[1\], got int32 \[1\]"):
        select_tree(candidates, roots.int(), 6)
    with pytest.raises(KernelArgumentError, match=r"num_draft_tokens must be 2 to 11: .* got 12"):
        select_tree(candidates, roots, 12)
