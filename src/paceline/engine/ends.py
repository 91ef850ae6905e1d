"""What requests that generate nothing end in, on the host: the vector of one, made of its steps'.

A prompt that is computed in several steps has a row of each: Pooling over the step's tokens.  Their
mean, weighed by tokens and summed in float64, is the mean over all.

    steps          tokens 0..3        4..5        6
    last                                          the row of the last step
    cls            the row of the first
    mean           4 rows' mean       2 rows'     1 row        (4 a + 2 b + c) / 7
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paceline.core.modes import Pooling


@dataclass(slots=True)
class PooledRows:
    """Owns what has come of one request's vector since it (re)joined."""

    pooling: Pooling
    _rows: list[tuple[int, NDArray[np.float32]]] = field(default_factory=list)  # tokens, their row

    def clear(self) -> None:
        """The request is computed anew."""
        self._rows.clear()

    def take(self, row: bytes, *, first: int, num_tokens: int) -> None:
        """What a step made of tokens from `first` on.  row: [width] float32."""
        if self.pooling is Pooling.CLS and first > 0:
            return
        if self.pooling is Pooling.LAST:
            self._rows.clear()
        self._rows.append((num_tokens, np.frombuffer(row, np.float32)))

    @property
    def is_finite(self) -> bool:
        """Whether all numbers of its vector are."""
        return bool(np.isfinite(self.vector()).all())

    def vector(self) -> NDArray[np.float32]:
        """[width]; of one step its bits."""
        [(_, first), *others] = self._rows
        if not others:
            return first
        weights = np.array([num_tokens for num_tokens, _ in self._rows], np.float64)
        rows = np.stack([row for _, row in self._rows]).astype(np.float64)
        mean: NDArray[np.float64] = weights @ rows / weights.sum()
        return mean.astype(np.float32)
