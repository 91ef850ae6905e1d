"""Trees of drafts, as proposers give them to verification."""

from rounds import ROWS, Spy, prefilled, spied
from tiny_drafters import TREE, standalone
from tiny_runner import TinyModel


def test_siblings_are_different_tokens(tiny: TinyModel) -> None:
    requests = prefilled(tiny, TREE, spied(standalone(tiny, TREE)))
    requests.driver.rounds(ROWS, 2)
    spy = requests.driver.parts.proposer
    assert isinstance(spy, Spy)
    for tree in spy.trees:
        for tokens, parents in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
            children = list(zip(parents[1:], tokens[1:], strict=True))
            assert len(set(children)) == len(children), f"siblings of one token: {children}"
