"""How many bytes of a GPU torch's caching allocator takes for what is allocated and freed in turn.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` as it is by default (torch 2.11), for one
stream: pieces are multiples of 512 bytes; a request takes the smallest free piece that holds it, of
segments of its own kind; a segment of small requests has 2 MiB, one of others 20 MiB, or what was
asked for in multiples of 2 MiB where that is 10 MiB or more; a piece is split where what is left
is large enough to be of use, and joined with its free neighbours when it is given back.
"""

from dataclasses import dataclass

PIECE = 512  # bytes: every request is rounded up to a multiple
_SMALL = 1 << 20  # the largest request that takes from small segments
_SMALL_SEGMENT = 2 << 20
_LARGE_SEGMENT = 20 << 20
_OWN_SEGMENT = 10 << 20  # the least request that gets a segment of its size
_ROUND_SEGMENT = 2 << 20


@dataclass(slots=True, eq=False)
class Piece:
    """A stretch of one segment."""

    nbytes: int
    is_free: bool
    segment: list["Piece"]  # all pieces of the segment in order of address, this one included


class CudaPool:
    """Segments that grow with what is taken from them and never shrink."""

    def __init__(self) -> None:
        self.held = 0  # bytes of all segments
        self._segments: dict[bool, list[list[Piece]]] = {True: [], False: []}  # is small: pieces

    def take(self, nbytes: int) -> Piece:
        """A piece of at least `nbytes`, which is 1 or more."""
        nbytes = -(-nbytes // PIECE) * PIECE
        is_small = nbytes <= _SMALL
        free = (
            piece
            for segment in self._segments[is_small]
            for piece in segment
            if piece.is_free and piece.nbytes >= nbytes
        )
        piece = min(free, key=lambda each: each.nbytes, default=None) or self._grow(nbytes)
        left = piece.nbytes - nbytes
        if left > _SMALL or (is_small and left):
            rest = Piece(left, True, piece.segment)
            piece.segment.insert(piece.segment.index(piece) + 1, rest)
            piece.nbytes = nbytes
        piece.is_free = False
        return piece

    def give_back(self, piece: Piece) -> None:
        """Free a piece that was taken."""
        piece.is_free = True
        index = piece.segment.index(piece)
        for first in (index, index - 1):  # with the next one, then with the one before
            pair = piece.segment[first : first + 2] if first >= 0 else []
            if len(pair) == 2 and all(each.is_free for each in pair):
                pair[0].nbytes += pair[1].nbytes
                del piece.segment[first + 1]

    def _grow(self, nbytes: int) -> Piece:
        is_small = nbytes <= _SMALL
        size = _SMALL_SEGMENT if is_small else _LARGE_SEGMENT
        if nbytes >= _OWN_SEGMENT:
            size = -(-nbytes // _ROUND_SEGMENT) * _ROUND_SEGMENT
        segment: list[Piece] = []
        segment.append(Piece(size, True, segment))
        self._segments[is_small].append(segment)
        self.held += size
        return segment[0]
