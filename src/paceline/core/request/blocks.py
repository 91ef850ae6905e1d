"""Blocks: spans of a prompt whose tokens see one another in both directions; no torch."""

from bisect import bisect_left
from dataclasses import dataclass

from paceline.core.errors import RequestError


@dataclass(frozen=True, slots=True)
class Blocks:
    """As the tokens of a picture do; a step computes a block whole.

    Raises RequestError for spans that are empty, overlap or do not ascend, or where there are none.
    """

    spans: tuple[tuple[int, int], ...]  # [start, stop) positions of each, ascending and apart

    def __post_init__(self) -> None:
        bounds = [bound for span in self.spans for bound in span]
        is_apart = all(stop <= start for (_, stop), (start, _) in self._neighbours())
        if not bounds or bounds[0] < 0 or not is_apart or any(a >= b for a, b in self.spans):
            raise self._error("(start, stop) of at least one token each, ascending and apart")

    def require(self, *, prompt_len: int) -> None:
        """Raise RequestError unless a prompt of so many tokens holds them."""
        if self.spans[-1][1] > prompt_len:
            raise self._error(f"within the prompt's {prompt_len} tokens")

    @property
    def longest(self) -> int:
        """Tokens of the longest."""
        return max(stop - start for start, stop in self.spans)

    def whole(self, length: int) -> int:
        """The most tokens, `length` at most, that end no block in two."""
        index = bisect_left(self.spans, (length, 0)) - 1  # the last that starts before
        if index >= 0 and length < self.spans[index][1]:
            return self.spans[index][0]
        return length

    def meets(self, start: int, stop: int) -> bool:
        """Whether a token of [start, stop) is in a block."""
        return any(first < stop and start < last for first, last in self.spans)

    def _neighbours(self) -> "zip[tuple[tuple[int, int], tuple[int, int]]]":
        return zip(self.spans, self.spans[1:], strict=False)

    def _error(self, expected: str) -> RequestError:
        return RequestError.about(
            "prompt_blocks",
            expected=expected,
            got=list(self.spans),
            remedy="give the first token of each block, and the one behind its last",
        )
