"""Trees of drafts: who is a sibling, and who a parent."""

from rounds import ROWS, Spy, prefilled, spied
from tiny_drafters import TREE, standalone
from tiny_runner import TinyModel

from paceline.core.draft_shape import DraftShape


def test_siblings_are_different_tokens(tiny: TinyModel) -> None:
    requests = prefilled(tiny, TREE, spied(standalone(tiny, TREE)))
    requests.driver.rounds(ROWS, 2)
    spy = requests.driver.parts.proposer
    assert isinstance(spy, Spy)
    for tree in spy.trees:
        for tokens, parents in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
            children = list(zip(parents[1:], tokens[1:], strict=True))
            assert len(set(children)) == len(children), f"siblings of one token: {children}"


def test_among_certain_drafts_a_child_is_kept_only_with_its_parent(tiny: TinyModel) -> None:
    """Log-probabilities of 0 all along: each node ties with its parent."""
    shape = DraftShape(num_steps=3, topk=2, num_draft_tokens=3)
    requests = prefilled(tiny, shape, standalone(tiny, shape, certain=True))
    for outputs in requests.driver.rounds(ROWS, 3):
        lens = [len(tokens) for tokens in outputs.token_ids]
        assert lens == [3] * 3, f"the best two drafts and the bonus token, got {lens}"
