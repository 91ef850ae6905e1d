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
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import RequestError

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


class Constraint:
    """Owns the state of a grammar for one completion, and the mask of its next token.

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
        self.words = self._next_words()  # int32 [ceil(vocab / 32)] of the next token

    def fork(self) -> "Constraint":
        """The same for another completion, from its first token on."""
        return Constraint(
            self._source,
            vocab_size=self._vocab_size,
            stop_ids=self._stop_ids,
            min_tokens=self._min_tokens,
        )

    def accept(self, token: int) -> None:
        """Take in what was said, which ends nothing by itself.  Raises RequestError."""
        if not self.words[token // 8] >> token % 8 & 1:
            raise RequestError.about(
                f"token {self._num_said} of a request with a grammar",
                expected="one that the grammar allows",
                got=token,
                remedy="let no logits processor raise what is at -inf",
            )
        with self._asked():
            self._grammar.accept(token)
            self.is_done = bool(self._grammar.is_done)
        self._num_said += 1
        if not self.is_done:
            self.words = self._next_words()

    def _next_words(self) -> bytes:
        """Raises RequestError when no token is left."""
        words = np.zeros(-(-self._vocab_size // _BITS), dtype=np.int32)
        with self._asked():
            self._grammar.fill(words)
        bits = words.view(np.uint32)
        if self._vocab_size % _BITS:
            bits[-1] &= np.uint32((1 << self._vocab_size % _BITS) - 1)
        left = bits
        if self._num_said < self._min_tokens:
            left = bits.copy()
            for token in self._stop_ids:
                if token < self._vocab_size:
                    left[token // _BITS] &= ~np.uint32(1 << token % _BITS)
        if not left.any():
            is_early = bool(bits.any())
            raise RequestError.about(
                "grammar",
                expected=f"to allow a token behind {self._num_said} of them",
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
