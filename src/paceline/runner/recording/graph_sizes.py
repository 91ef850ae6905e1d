"""GraphSizes: the padded sizes of steps that may be graphs."""

from bisect import bisect_left
from dataclasses import dataclass

from paceline.runner.extents import PaddedSize

_FEWEST_TOKENS = 16  # of a padded ragged step, unless none may be larger


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """Padded request counts that graphs are made for, and token counts of ragged ones."""

    sizes: tuple[int, ...]  # ascending
    tokens: tuple[int, ...]  # ascending; empty: ragged steps run eagerly

    @staticmethod
    def up_to(max_reqs: int, *, every: int = 4, max_tokens: int = 0) -> "GraphSizes":
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
        )

    def pad(self, num_reqs: int, extend_len: int) -> PaddedSize | None:
        """The smallest that holds `num_reqs` rows of `extend_len` tokens; None when none does."""
        index = bisect_left(self.sizes, num_reqs)
        if index == len(self.sizes):
            return None
        return PaddedSize.uniform(self.sizes[index], extend_len)

    def pad_ragged(self, num_reqs: int, num_tokens: int) -> PaddedSize | None:
        """What holds a ragged step, tokens left over in a row of their own.

        Requests are a power of four, or one more than the largest size: the row of what is left
        over comes on top.  None when nothing holds it.
        """
        index = bisect_left(self.tokens, num_tokens)
        if index == len(self.tokens):
            return None
        rows, most = num_reqs + (self.tokens[index] > num_tokens), self.sizes[-1] + 1
        if rows > most:
            return None
        reqs = min(4 ** (((rows - 1).bit_length() + 1) // 2), most)
        return PaddedSize.ragged(reqs, self.tokens[index])
