"""What a constraint foresees: the drafts that its grammar takes, their masks, and what is left."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.core.draft_shape import NO_DRAFTS, DraftShape
from paceline.core.errors import RequestError
from paceline.core.step import NO_ROW_DRAFTS, RowDrafts
from paceline.engine.grammar import Constraint

CHAIN = DraftShape(num_steps=3, topk=1, num_draft_tokens=4)
TREE = DraftShape(num_steps=3, topk=2, num_draft_tokens=6)
END = 39
FOLLOWS = {
    (): {1},
    (1,): {2, 3, END},
    (1, 2): {4},
    (1, 3): {5, 6},
    (1, 3, 5): {7, 8},
    (1, 3, 6): set(),
    (1, 2, 4): {1, 2},
}
DONE = (1, 3, 5, 7)


@dataclass
class Words:
    """Which token may follow which; `fills` counts the masks of it and its forks."""

    follows: Mapping[tuple[int, ...], set[int]]
    fills: list[tuple[int, ...]]
    said: tuple[int, ...] = ()

    def fork(self) -> Self:
        return type(self)(self.follows, self.fills, self.said)

    def fill(self, words: NDArray[np.int32]) -> None:
        self.fills.append(self.said)
        for token in self.follows[self.said]:
            words.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)

    def accept(self, token: int) -> None:
        self.said += (token,)

    @property
    def is_done(self) -> bool:
        return self.said == DONE


def constraint(said: tuple[int, ...] = (), min_tokens: int = 0) -> tuple[Constraint, Words]:
    grammar = Words(FOLLOWS, [])
    made = Constraint(grammar, vocab_size=40, stop_ids=(END,), min_tokens=min_tokens)
    made.accept(said)
    return made, grammar


def bits(words: bytes) -> set[int]:
    found = np.unpackbits(np.frombuffer(words, np.uint8), bitorder="little")
    return set(np.nonzero(found)[0].tolist())


def paths(drafts: RowDrafts) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(drafts.token_ids, drafts.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def test_what_is_forced_is_drafted_though_nobody_told_of_it() -> None:
    kept, _ = constraint()
    kept.foresee(NO_ROW_DRAFTS, CHAIN, share=9)
    assert paths(kept.drafts) == [(1,)]
    assert [bits(words) for words in kept.path_words(1)] == [{1}, {2, 3, END}]
    assert (kept.num_forced([1, 9]), kept.num_forced([1])) == (1, 0)


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        (TREE, [(1,), (1, 2), (1, 3), (1, 2, 4), (1, 3, 5)]),
        (CHAIN, [(1,), (1, 2), (1, 3)]),  # as many as it holds
        (DraftShape(num_steps=1, topk=1, num_draft_tokens=2), [(1,)]),
        (NO_DRAFTS, []),
    ],
)
def test_drafts_that_were_told_are_taken_along_what_is_allowed(
    shape: DraftShape, wanted: list[tuple[int, ...]]
) -> None:
    """9 is not allowed, 6 is followed by nothing; 4 is forced behind 2, whatever was told."""
    told = RowDrafts(token_ids=(9, 1, 2, 3, 5, 6, 8), parents=(-1, -1, 1, 1, 3, 3, 2))
    kept, _ = constraint()
    kept.foresee(told, shape, share=9)
    assert paths(kept.drafts) == wanted
    masks = [FOLLOWS[path] for path in [(), *wanted]]
    assert [bits(words) for words in kept.path_words(len(wanted))] == masks


@pytest.mark.parametrize(
    ("said", "told"),
    [((1,), END), ((1, 3), 6), ((1, 3, 5), 7), ((1, 3, 5), 8)],
    ids=["ends the answer", "a dead end", "the grammar is done", "the grammar raises"],
)
def test_what_may_end_a_request_is_said_and_not_drafted(said: tuple[int, ...], told: int) -> None:
    kept, _ = constraint(said)
    kept.foresee(RowDrafts(token_ids=(told,), parents=(-1,)), CHAIN, share=9)
    assert kept.drafts == NO_ROW_DRAFTS


def test_a_draft_behind_which_only_the_end_is_left_waits_for_min_tokens() -> None:
    follows = {(): {1, 2}, (1,): {END}}
    kept = Constraint(Words(follows, []), vocab_size=40, stop_ids=(END,), min_tokens=2)
    kept.foresee(RowDrafts(token_ids=(1,), parents=(-1,)), CHAIN, share=9)
    assert kept.drafts == NO_ROW_DRAFTS
    with pytest.raises(RequestError, match="to allow a token behind 1 of them"):
        kept.accept([1])


def test_what_was_foreseen_is_not_asked_again_and_the_rest_is_gone() -> None:
    kept, grammar = constraint()
    kept.foresee(RowDrafts(token_ids=(1, 2), parents=(-1, 0)), CHAIN, share=9)
    assert paths(kept.drafts) == [(1,), (1, 2), (1, 2, 4)]
    del grammar.fills[:]
    kept.accept([1, 3])
    assert grammar.fills == [(1, 3)]
    assert bits(kept.words) == FOLLOWS[1, 3]
    assert kept.drafts == NO_ROW_DRAFTS
    kept.accept([5])
    assert bits(kept.words) == {7, 8}
    with pytest.raises(RequestError, match="token 3 of a request with a grammar must be one that"):
        kept.accept([9])


def test_what_is_forced_is_asked_once_however_slowly_it_is_said() -> None:
    follows = {(1,) * said: {1} for said in range(9)}
    grammar = Words(follows, [])
    kept = Constraint(grammar, vocab_size=40, stop_ids=(END,), min_tokens=0)
    for _ in range(4):
        kept.foresee(NO_ROW_DRAFTS, CHAIN, share=1)
        assert paths(kept.drafts) == [(1,), (1, 1), (1, 1, 1)]
        kept.accept([1])
    assert [len(said) for said in grammar.fills] == list(range(7))


@pytest.mark.parametrize(
    ("said", "share", "wanted"),
    [
        ((1,), 1, [(2,)]),
        ((1,), 2, [(2,), (3,)]),  # and not what is forced behind a 2 that may not come
        ((1,), 4, [(2,), (3,), (2, 4), (3, 5)]),
        ((), 1, [(1,)]),  # forced: the share is used up
        ((), 2, [(1,), (1, 2)]),
    ],
)
def test_no_mask_is_made_beyond_the_share_for_what_may_not_be_said(
    said: tuple[int, ...], share: int, wanted: list[tuple[int, ...]]
) -> None:
    told = RowDrafts(token_ids=(1, 2, 3, 5), parents=(-1, 0, 0, 2))
    kept, grammar = constraint(said)
    del grammar.fills[:]
    kept.foresee(told.below(said), TREE, share=share)
    assert paths(kept.drafts) == wanted
    assert grammar.fills == [(*said, *path) for path in wanted]


def test_of_a_tree_that_was_told_what_lies_behind_what_was_said_is_left() -> None:
    told = RowDrafts(token_ids=(1, 2, 3, 4, 5), parents=(-1, -1, 0, 0, 2))
    assert told.below(()) == told
    assert told.below((1,)) == RowDrafts(token_ids=(3, 4, 5), parents=(-1, -1, 0))
    assert told.below((1, 3)) == RowDrafts(token_ids=(5,), parents=(-1,))
    assert told.below((7,)) == told.below((1, 3, 5)) == NO_ROW_DRAFTS
    assert (told.depth, NO_ROW_DRAFTS.depth, told.first(2).depth) == (3, 0, 1)
