"""Grammar: what may be said next, told by an object of the caller's; Constraint: the grammar of one
completion, and the mask that its next token takes.

Worked example: a grammar of digits that ends behind the third, over a vocabulary of 40 whose digits
are tokens 16 to 25.

    said      fill sets bits            is_done
              16 .. 25 of word 0        False
    18        16 .. 25 of word 0        False
    18 16     16 .. 25 of word 0        False
    18 16 20  it is not asked           True: the request stops here, and token 20 is text

A grammar that lets the model end allows an end token instead, and is told nothing of it.

A constraint also looks ahead: what may be said behind a draft depends on that draft, so each one
has a grammar and a mask of its own.  The same grammar, but its second token must be an 18:

    said    told by the drafter       drafts, and why        masks
    16      17 -> 18, 3 -> 18         18   forced            root 18; behind it 16 .. 25
    16 18   17 -> 20, 3               17   allowed           root 16 .. 25; behind 17 nothing
                                      would follow: it is said, if at all, without being a draft
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from paceline.core.draft_shape import DraftShape
from paceline.core.errors import RequestError
from paceline.core.step import NO_ROW_DRAFTS, RowDrafts

_BITS = 32  # of a word


@runtime_checkable
class Grammar(Protocol):
    """What a caller brings.  It must not depend on time or chance: a request that gives its place
    to others goes on where it stood.
    """

    def fork(self) -> Self:
        """One that goes on from here by itself: each completion has its own."""
        ...

    def fill(self, words: NDArray[np.int32]) -> None:
        """Set the bit of every token that may come next.

        words: [ceil(vocab / 32)], zeros; token t is bit t % 32 of word t // 32, the lowest first,
        as xgrammar and llguidance write it.
        """
        ...

    def accept(self, token: int) -> None:
        """A token that was allowed has been said; an end token or stop id is not told."""
        ...

    @property
    def is_done(self) -> bool:
        """Whether nothing may follow: the request stops, whatever min_tokens says."""
        ...


class _Draft(NamedTuple):
    """A draft that its grammar allows, and what follows it."""

    grammar: Grammar  # behind it
    words: bytes  # int32 [ceil(vocab / 32)]  of the token behind it
    is_forced: bool  # nothing else is allowed in its place
    foreseen: dict[int, "_Draft"]  # by token, what was drafted behind it


class Constraint:
    """Owns the state of a grammar for one completion, the mask of its next token, and drafts that
    the grammar allows, with the mask behind each.

    vocab_size: bits behind it say nothing.  stop_ids: they do not count as allowed while fewer than
    min_tokens are said.  Raises RequestError when nothing may be said, or the grammar raises.
    """

    def __init__(
        self, grammar: Grammar, *, vocab_size: int, stop_ids: Sequence[int], min_tokens: int
    ) -> None:
        self._source = grammar
        self._vocab_size = vocab_size
        self._stop_ids = tuple(stop_ids)
        self._min_tokens = min_tokens
        self._num_said = 0
        with self._asked():
            self._grammar = grammar.fork()
            self.is_done = bool(self._grammar.is_done)
        self.words = self._words_of(self._grammar, 0)  # int32 [ceil(vocab / 32)] of the next token
        self.drafts = NO_ROW_DRAFTS  # what may be said next, as far as it was looked for
        self._ahead: list[_Draft] = []  # [num_drafts]
        self._foreseen: dict[int, _Draft] = {}  # by token, what was drafted behind what was said

    def fork(self) -> "Constraint":
        """The same for another completion, from its first token on."""
        return Constraint(
            self._source,
            vocab_size=self._vocab_size,
            stop_ids=self._stop_ids,
            min_tokens=self._min_tokens,
        )

    def accept(self, tokens: Sequence[int]) -> None:
        """Take in what was said, none of which ends anything by itself; drafts are gone then.

        Raises RequestError.
        """
        for token in tokens:
            self._accept(token)
        self.drafts, self._ahead = NO_ROW_DRAFTS, []

    def foresee(self, told: RowDrafts, shape: DraftShape, *, share: int) -> None:
        """Look for drafts, which replace those there are: what the grammar forces, else those of
        `told` that it allows, each with its mask.

        told: what a drafter would say next.  shape: how many there may be, and how deep.  share: so
        many are likely to be given; beyond them only what will be said in any case is worth a mask.
        A draft behind which nothing may follow is none: who says it ends there, with a reason or an
        error.
        """
        token_ids, parents, ahead = list[int](), list[int](), list[_Draft]()
        root = _Draft(self._grammar, self.words, is_forced=False, foreseen=self._foreseen)
        num_certain = 0  # first drafts: a chain of what is forced
        # Drafts that others may hang on: depth, index, index among those that were told.
        open_ = deque[tuple[int, int, int | None]]([(1, -1, -1)])
        while open_:
            depth, above, at = open_.popleft()
            behind = ahead[above] if above >= 0 else root
            only = _only(behind.words)
            children = [] if at is None else [told.token_ids[i] for i in told.children(at)]
            for token in children if only is None else [only]:
                is_certain = only is not None and above == num_certain - 1
                if depth >= shape.max_path or len(token_ids) + 1 >= shape.num_draft_tokens:
                    break
                if len(token_ids) >= share and not is_certain:
                    break
                draft = self._draft(behind, token, self._num_said + depth, only is not None)
                if draft is not None:
                    open_.append(
                        (depth + 1, len(ahead), None if at is None else told.child(at, token))
                    )
                    token_ids.append(token)
                    parents.append(above)
                    ahead.append(draft)
                    num_certain += is_certain
        self.drafts = RowDrafts(token_ids=tuple(token_ids), parents=tuple(parents))
        self._ahead = ahead

    def path_words(self, num_drafts: int) -> Iterator[bytes]:
        """The mask of the next token, and those behind the first so many drafts."""
        yield self.words
        for draft in self._ahead[:num_drafts]:
            yield draft.words

    def num_forced(self, emitted: Sequence[int]) -> int:
        """How many of the drafts that a round took which emitted these tokens were forced."""
        return sum(self._ahead[index].is_forced for index in self.drafts.taken(emitted))

    def _accept(self, token: int) -> None:
        if not _allows(self.words, token):
            raise RequestError.about(
                f"token {self._num_said} of a request with a grammar",
                expected="one that the grammar allows",
                got=token,
                remedy="let no logits processor raise what is at -inf",
            )
        draft = self._foreseen.get(token)
        if draft is not None:
            self._grammar, self.words, self._foreseen = draft.grammar, draft.words, draft.foreseen
            self._num_said += 1
            return
        with self._asked():
            self._grammar.accept(token)
            self.is_done = bool(self._grammar.is_done)
        self._num_said += 1
        self._foreseen = {}
        if not self.is_done:
            self.words = self._words_of(self._grammar, self._num_said)

    def _draft(self, behind: _Draft, token: int, num_said: int, is_forced: bool) -> _Draft | None:
        """`token` as the draft that is said as number `num_said`; None where it cannot be one."""
        if token in behind.foreseen:
            return behind.foreseen[token]
        if token in self._stop_ids or not _allows(behind.words, token):
            return None
        try:
            with self._asked():
                grammar = behind.grammar.fork()
                grammar.accept(token)
                if grammar.is_done:
                    return None
            words = self._words_of(grammar, num_said)
        except RequestError:  # told where the token is said, if it is
            return None
        return behind.foreseen.setdefault(token, _Draft(grammar, words, is_forced, {}))

    def _words_of(self, grammar: Grammar, num_said: int) -> bytes:
        """The mask behind so many tokens.  Raises RequestError when no token is left."""
        words = np.zeros(-(-self._vocab_size // _BITS), dtype=np.int32)
        with self._asked():
            grammar.fill(words)
        bits = words.view(np.uint32)
        if self._vocab_size % _BITS:
            bits[-1] &= np.uint32((1 << self._vocab_size % _BITS) - 1)
        left = bits
        if num_said < self._min_tokens:
            left = bits.copy()
            for token in self._stop_ids:
                if token < self._vocab_size:
                    left[token // _BITS] &= ~np.uint32(1 << token % _BITS)
        if not left.any():
            is_early = bool(bits.any())
            raise RequestError.about(
                "grammar",
                expected=f"to allow a token behind {num_said} of them",
                got=f"none but end tokens before min_tokens ({self._min_tokens})"
                if is_early
                else "none",
                remedy="lower min_tokens"
                if is_early
                else "let it be done there, or allow an end token",
            )
        return words.astype("<i4", copy=False).tobytes()

    @contextmanager
    def _asked(self) -> Iterator[None]:
        """What the caller's object raises ends its own request."""
        try:
            yield
        except RequestError:  # it says itself what is wrong
            raise
        except Exception as error:
            raise RequestError.about(
                "grammar",
                expected="to follow the request token by token",
                got=f"{error!r} behind {self._num_said} of them",
                remedy="correct the object that was passed as grammar",
            ) from error


def _allows(words: bytes, token: int) -> bool:
    """Whether a mask has the bit of a token."""
    return token < 8 * len(words) and bool(words[token // 8] >> token % 8 & 1)


def _only(words: bytes) -> int | None:
    """The one token that a mask allows; None where it allows more."""
    bits = int.from_bytes(words, "little")
    return None if bits & (bits - 1) else bits.bit_length() - 1
