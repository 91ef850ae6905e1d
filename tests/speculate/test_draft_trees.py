"""Trees of drafts, as proposers give them to verification."""

import torch
from rounds import ROWS, Spy, prefilled, spied
from tiny_drafters import TREE, standalone
from tiny_runner import TinyModel

from paceline.core.draft_shape import DraftShape
from paceline.kernels.draft_topk import TopDrafts
from paceline.kernels.grow_tree import Candidates, grow_tree, select_tree


def test_siblings_are_different_tokens(tiny: TinyModel) -> None:
    requests = prefilled(tiny, TREE, spied(standalone(tiny, TREE)))
    requests.driver.rounds(ROWS, 2)
    spy = requests.driver.parts.proposer
    assert isinstance(spy, Spy)
    for tree in spy.trees:
        for tokens, parents in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
            children = list(zip(parents[1:], tokens[1:], strict=True))
            assert len(set(children)) == len(children), f"siblings of one token: {children}"


def test_among_equals_a_draft_is_kept_only_with_its_parent() -> None:
    """Every draft is certain: all candidates tie, and the first ids are the first depths."""
    shape = DraftShape(num_steps=3, topk=2, num_draft_tokens=5)
    candidates = Candidates.empty(1, shape, torch.device("cpu"))
    frontier = None
    for step in range(shape.num_steps):
        rows = 1 if frontier is None else shape.topk
        tokens = torch.arange(rows * shape.topk).view(rows, shape.topk) + 10 * step
        children = TopDrafts(tokens, torch.zeros(rows, shape.topk))
        frontier = grow_tree(children, frontier, candidates, step=step)
    tokens, parents = select_tree(candidates, torch.tensor([99]), shape.num_draft_tokens)
    kept = list(zip(tokens[0].tolist(), parents[0].tolist(), strict=True))
    assert kept == [(99, -1), (0, 0), (1, 0), (10, 1), (11, 1)], f"tokens and parents kept: {kept}"
