"""GraphSizes: the padded sizes of steps that may be graphs."""

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise

from paceline.runner.extents import PaddedSize, rows_left_over

_FEWEST_TOKENS = 16  # of a padded ragged step, unless none may be larger
_FEW_ROWS = (4, 16)  # of ragged steps beside one: what attention launches goes by how few they are


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """Padded request counts that graphs are made for, and token counts of ragged ones."""

    sizes: tuple[int, ...]  # ascending
    tokens: tuple[int, ...]  # ascending; empty: ragged steps run eagerly
    pad_len: int = 0  # tokens of a padded row of a ragged step at most; 0: any number

    @staticmethod
    def up_to(
        max_reqs: int, *, every: int = 4, max_tokens: int = 0, pad_len: int = 0
    ) -> "GraphSizes":
        """Requests: every size up to `every`, then 6, 8, 12, 16, then each 8 to 64, each 16 to 128
        and each 32 up to max_reqs, which is in.  Tokens: from 16 on each power of two and the
        middle to the next, up to max_tokens, which is in unless it is 0.
        """
        fine = set(range(1, every + 1))
        coarse = {6, 8, 12, *range(16, 64, 8), *range(64, 128, 16), *range(128, max_reqs, 32)}
        powers = [1 << bit for bit in range(max_tokens.bit_length())]
        tokens = {n for power in powers for n in (power, power * 3 // 2) if n >= _FEWEST_TOKENS}
        return GraphSizes(
            tuple(sorted({n for n in fine | coarse if n < max_reqs} | {max_reqs})),
            tuple(sorted(n for n in tokens | {max_tokens} if 0 < n <= max_tokens)),
            pad_len,
        )

    @property
    def spare_rows(self) -> int:
        """Padded rows that a ragged step needs beside its own at most; 0: none is padded."""
        gaps = [high - low - 1 for low, high in pairwise((0, *self.tokens))]
        return max((max(1, rows_left_over(gap, self.pad_len)) for gap in gaps), default=0)

    def empty(self, tokens: int) -> PaddedSize:
        """A ragged step of so many tokens without a request, of as few rows as hold them."""
        return PaddedSize.ragged(max(1, rows_left_over(tokens, self.pad_len)), tokens, self.pad_len)

    def few(self, tokens: int) -> tuple[PaddedSize, ...]:
        """Ragged steps of so many tokens, of each of the fewest numbers of rows there are."""
        empty, most = self.empty(tokens), self.sizes[-1] + self.spare_rows
        others = {min(rows, most) for rows in _FEW_ROWS if rows > empty.reqs}
        return empty, *(PaddedSize.ragged(n, tokens, self.pad_len) for n in sorted(others))

    def full(self, tokens: int) -> PaddedSize:
        """The same of as many rows as a ragged step may have."""
        return PaddedSize.ragged(self.sizes[-1] + self.spare_rows, tokens, self.pad_len)

    def pad(self, num_reqs: int, extend_len: int) -> PaddedSize | None:
        """The smallest that holds `num_reqs` rows of `extend_len` tokens; None when none does."""
        index = bisect_left(self.sizes, num_reqs)
        if index == len(self.sizes):
            return None
        return PaddedSize.uniform(self.sizes[index], extend_len)

    def pad_ragged(self, num_reqs: int, num_tokens: int) -> PaddedSize | None:
        """What holds a ragged step, tokens left over in rows of their own.

        Requests are a power of four, or the spare rows and the largest size: those of what is left
        over come on top.  None when nothing holds it.
        """
        index = bisect_left(self.tokens, num_tokens)
        if index == len(self.tokens):
            return None
        tokens, most = self.tokens[index], self.sizes[-1] + self.spare_rows
        rows = num_reqs + rows_left_over(tokens - num_tokens, self.pad_len)
        if rows > most:
            return None
        reqs = min(4 ** (((rows - 1).bit_length() + 1) // 2), most)
        return PaddedSize.ragged(reqs, tokens, self.pad_len)
