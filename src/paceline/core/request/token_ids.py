"""Token ids of a prompt as the bytes that a device reads."""

import marshal
import struct
from collections.abc import Sequence

import numpy as np

# Version 2 of marshal: a header of a list or tuple, and of an int of 32 bits a code and its bytes,
# lowest first.
_HEADER = 5  # bytes
_ITEM = np.dtype([("code", "S1"), ("id", "<i4")])
_INT = b"i"


def packed_ids(token_ids: Sequence[int]) -> bytes:
    """[num_tokens] int32, in less than half the time that numpy takes to read a tuple.  Raises
    OverflowError for an id that is no int32."""
    try:
        return struct.pack(f"{len(token_ids)}i", *token_ids)
    except struct.error as error:
        raise OverflowError(f"a token id is no int32: {error}") from error


def exact_ids(token_ids: Sequence[object]) -> bytes | None:
    """As `packed_ids`, of what is a list or tuple of ints of 32 bits and nothing else; else None.

    To ask for types and to pack are two walks; marshal tells types as it packs: of a bool, of an
    integer of numpy, of a subclass of int it writes something else, or nothing.
    """
    size = len(token_ids)
    if not size or type(token_ids) not in (list, tuple):
        return None if size else b""
    try:
        found = marshal.dumps(token_ids, 2)  # type: ignore[arg-type]
    except ValueError:
        return None
    # Each int is as long as an item: where all codes so far are right, the next is in its place.
    is_exact = len(found) == _HEADER + size * _ITEM.itemsize
    if not is_exact or found[_HEADER :: _ITEM.itemsize].count(_INT) != size:
        return None
    return np.frombuffer(found, _ITEM, offset=_HEADER)["id"].tobytes()
