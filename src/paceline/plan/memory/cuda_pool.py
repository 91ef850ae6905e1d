"""How many bytes of a GPU torch's caching allocator takes for what is allocated and freed in turn.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` as it is by default (torch 2.11), for one
stream: blocks are multiples of 512 bytes; a request takes the smallest free block that holds it, of
segments of its own kind; a segment of small requests has 2 MiB, one of others 20 MiB, or what was
asked for in multiples of 2 MiB where that is 10 MiB or more; a block is split where what is left
is large enough to be of use, and joined with its free neighbours when it is given back.
"""

from dataclasses import dataclass

MIN_BLOCK = 512  # bytes: every request is rounded up to a multiple
_SMALL = 1 << 20  # the largest request that takes from small segments
_SMALL_SEGMENT = 2 << 20
_LARGE_SEGMENT = 20 << 20
_OWN_SEGMENT = 10 << 20  # the least request that gets a segment of its size
_ROUND_SEGMENT = 2 << 20


@dataclass(slots=True, eq=False)
class Block:
    """A stretch of one segment."""

    nbytes: int
    place: tuple[int, int]  # segment, offset in bytes
    is_small: bool
    before: "Block | None" = None  # its neighbours within the segment
    behind: "Block | None" = None


class CudaPool:
    """Segments that grow with what is taken from them and never shrink."""

    def __init__(self) -> None:
        self.held = 0  # bytes of all segments
        self._num_segments = 0
        self._free: dict[bool, set[Block]] = {True: set(), False: set()}  # is small: blocks

    def take(self, nbytes: int) -> Block:
        """A block of at least `nbytes`, which is 1 or more."""
        nbytes = -(-nbytes // MIN_BLOCK) * MIN_BLOCK
        is_small = nbytes <= _SMALL
        free = self._free[is_small]
        fitting = (block for block in free if block.nbytes >= nbytes)
        block = min(fitting, key=lambda each: (each.nbytes, each.place), default=None)
        if block is None:
            block = self._grow(nbytes, is_small)
        free.discard(block)
        left = block.nbytes - nbytes
        if left > _SMALL or (is_small and left):
            number, offset = block.place
            rest = Block(left, (number, offset + nbytes), is_small, block, block.behind)
            if rest.behind is not None:
                rest.behind.before = rest
            block.nbytes, block.behind = nbytes, rest
            free.add(rest)
        return block

    def give_back(self, block: Block) -> None:
        """Free a block that was taken; it is joined with its free neighbours."""
        free = self._free[block.is_small]
        for first, second in ((block, block.behind), (block.before, block)):
            other = second if first is block else first
            if first is None or second is None or other not in free:
                continue
            free.discard(other)
            first.nbytes += second.nbytes
            first.behind = second.behind
            if first.behind is not None:
                first.behind.before = first
            block = first
        free.add(block)

    def _grow(self, nbytes: int, is_small: bool) -> Block:
        size = _SMALL_SEGMENT if is_small else _LARGE_SEGMENT
        if nbytes >= _OWN_SEGMENT:
            size = -(-nbytes // _ROUND_SEGMENT) * _ROUND_SEGMENT
        self._num_segments += 1
        self.held += size
        return Block(size, (self._num_segments, 0), is_small)
