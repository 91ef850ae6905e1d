"""Token ids of a prompt, and the array of them that a device reads."""

import struct
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray


class TokenIds(tuple[int, ...]):
    """Token ids beside their array, made once: where they are read, and not where a step that the
    device waits for is staged.  Elsewhere they are a tuple as any.

    Raises OverflowError for an id that is no int32.
    """

    array: NDArray[np.int32]  # [num_tokens] read-only

    def __new__(cls, token_ids: Iterable[int]) -> "TokenIds":
        found = super().__new__(cls, token_ids)
        found.array = _array(found)
        return found

    def are_below(self, vocab_size: int) -> bool:
        """Whether all are ids of a vocabulary, 0 to `vocab_size` - 1."""
        below_0_last = self.array.view(np.uint32)
        return not self or int(below_0_last.max()) < vocab_size


def token_array(token_ids: Sequence[int]) -> NDArray[np.int32]:
    """[num_tokens] int32, read-only.  Raises OverflowError as TokenIds."""
    return token_ids.array if isinstance(token_ids, TokenIds) else _array(token_ids)


def _array(token_ids: Sequence[int]) -> NDArray[np.int32]:
    """In less than half the time that numpy takes to read a tuple."""
    try:
        packed = struct.pack(f"{len(token_ids)}i", *token_ids)
    except struct.error as error:
        raise OverflowError(f"a token id is no int32: {error}") from error
    return np.frombuffer(packed, np.int32)
