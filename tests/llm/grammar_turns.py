"""A grammar of tests: sets of tokens that take turns."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray


@dataclass
class Turns:
    """`length` tokens, of one set after the other; then `end` alone, or, None, it is done."""

    sets: Sequence[Sequence[int]]
    length: int
    end: int | None = None
    said: tuple[int, ...] = ()

    def fork(self) -> Self:
        return type(self)(self.sets, self.length, self.end, self.said)

    def allowed(self, num_said: int) -> set[int]:
        if num_said >= self.length:
            return set() if self.end is None else {self.end}
        return set(self.sets[num_said % len(self.sets)])

    def fill(self, words: NDArray[np.int32]) -> None:
        for token in self.allowed(len(self.said)):
            words.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)

    def accept(self, token: int) -> None:
        assert token in self.allowed(len(self.said)), f"{token} behind {self.said}"
        self.said += (token,)

    @property
    def is_done(self) -> bool:
        return self.end is None and len(self.said) >= self.length

    def takes(self, token_ids: Sequence[int]) -> bool:
        """Whether all of it was allowed, in that order."""
        return all(token in self.allowed(index) for index, token in enumerate(token_ids))
