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
    place: tuple[int, int]  # segment, offset in bytes
    is_small: bool
    before: "Piece | None" = None  # its neighbours within the segment
    behind: "Piece | None" = None


class CudaPool:
    """Segments that grow with what is taken from them and never shrink."""

    def __init__(self) -> None:
        self.held = 0  # bytes of all segments
        self._num_segments = 0
        self._free: dict[bool, set[Piece]] = {True: set(), False: set()}  # is small: pieces

    def take(self, nbytes: int) -> Piece:
        """A piece of at least `nbytes`, which is 1 or more."""
        nbytes = -(-nbytes // PIECE) * PIECE
        is_small = nbytes <= _SMALL
        free = self._free[is_small]
        fitting = (piece for piece in free if piece.nbytes >= nbytes)
        piece = min(fitting, key=lambda each: (each.nbytes, each.place), default=None)
        if piece is None:
            piece = self._grow(nbytes, is_small)
        free.discard(piece)
        left = piece.nbytes - nbytes
        if left > _SMALL or (is_small and left):
            number, offset = piece.place
            rest = Piece(left, (number, offset + nbytes), is_small, piece, piece.behind)
            if rest.behind is not None:
                rest.behind.before = rest
            piece.nbytes, piece.behind = nbytes, rest
            free.add(rest)
        return piece

    def give_back(self, piece: Piece) -> None:
        """Free a piece that was taken; it is joined with its free neighbours."""
        free = self._free[piece.is_small]
        for first, second in ((piece, piece.behind), (piece.before, piece)):
            other = second if first is piece else first
            if first is None or second is None or other not in free:
                continue
            free.discard(other)
            first.nbytes += second.nbytes
            first.behind = second.behind
            if first.behind is not None:
                first.behind.before = first
            piece = first
        free.add(piece)

    def _grow(self, nbytes: int, is_small: bool) -> Piece:
        size = _SMALL_SEGMENT if is_small else _LARGE_SEGMENT
        if nbytes >= _OWN_SEGMENT:
            size = -(-nbytes // _ROUND_SEGMENT) * _ROUND_SEGMENT
        self._num_segments += 1
        self.held += size
        return Piece(size, (self._num_segments, 0), is_small)
