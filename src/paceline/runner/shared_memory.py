"""SharedMemory: what all ranks of a model map: the frames of steps, and the box of their exchange.

It has no name: it is a file of the leader, which hands it to the ranks it starts, and it is gone
with the last process that holds it, however that ends.

    words   [64]  int64   bytes of frames written, then those that each rank has taken
    phases  [64]  int64   how far each rank is with its boot, see llm.rank_phases
    sent    [64]  int64   of the exchange
    ring    [RING_BYTES]  frames, one behind the other: their length, their bytes
    box     [2, ranks, capacity]  of the exchange on a CPU
"""

import mmap
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from paceline.core.errors import message
from paceline.core.parallel import MOST_RANKS
from paceline.kernels.all_reduce import WAIT_S, Exchange, peer_table

RING_BYTES = 1 << 20
_WORDS = MOST_RANKS
_RING = 3 * 8 * _WORDS
_BOX = _RING + RING_BYTES
_LENGTH = struct.Struct("<Q")
_PAUSE_S = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxShape:
    """Of an exchange."""

    ranks: int
    capacity: int  # numbers of one rank's largest message; 0: their boxes are elsewhere
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return 2 * self.ranks * self.capacity


class SharedMemory:
    """One process's map of it."""

    def __init__(self, fd: int, shape: BoxShape) -> None:
        """fd: of `create`, or inherited from who called that; it stays the caller's."""
        self._shape = shape
        self._map = mmap.mmap(fd, _BOX + shape.numel * shape.dtype.itemsize)
        view = memoryview(self._map)
        self.words = view[: 8 * _WORDS].cast("q")
        self.phases = view[8 * _WORDS : 16 * _WORDS].cast("q")
        self.ring = view[_RING:_BOX]
        self.sent = torch.frombuffer(
            self._map, dtype=torch.int64, count=shape.ranks, offset=16 * _WORDS
        )

    @staticmethod
    def create(shape: BoxShape) -> int:
        """A file descriptor of new memory, all zeros; pages that nobody touches take none."""
        fd = os.memfd_create("paceline-ranks")
        os.ftruncate(fd, _BOX + shape.numel * shape.dtype.itemsize)
        return fd

    def exchange(self, rank: int) -> Exchange:
        """A rank's way through the box."""
        shape = self._shape
        box = torch.frombuffer(self._map, dtype=shape.dtype, count=shape.numel, offset=_BOX)
        box = box.view(2, shape.ranks, shape.capacity)
        return Exchange(rank, box, self.sent, box.new_empty(0), peer_table((), box.device))

    @property
    def ranks(self) -> int:
        return self._shape.ranks


class FrameWriter:
    """The leader's end of the ring.

    told: called when there is something to take, and while there is no room; what it raises ends
    the writing.
    """

    def __init__(self, memory: SharedMemory, *, told: Callable[[], None]) -> None:
        self._memory = memory
        self._told = told

    def write(self, frame: bytes) -> None:
        """Behind the frames before it; waits for room, which a long frame needs several times.
        Raises TimeoutError where a rank takes nothing.
        """
        deadline = time.monotonic() + WAIT_S
        words, ring = self._memory.words, self._memory.ring
        left = memoryview(_LENGTH.pack(len(frame)) + frame)
        while left:
            written = words[0]
            at, taken = written % RING_BYTES, min(words[1 : self._memory.ranks])
            piece = left[: min(RING_BYTES - (written - taken), RING_BYTES - at)]
            if piece:
                ring[at : at + len(piece)] = piece
                words[0] = written + len(piece)
                left = left[len(piece) :]
                deadline = time.monotonic() + WAIT_S
            elif time.monotonic() > deadline:
                raise TimeoutError(
                    message(
                        f"bytes of steps that each rank has taken after {WAIT_S:g} s",
                        expected=f"more than {written - RING_BYTES}",
                        got=list(words[1 : self._memory.ranks]),
                        remedy="the rank with the fewest hangs: look at its log",
                    )
                )
            else:
                time.sleep(_PAUSE_S)
            self._told()


class FrameReader:
    """A rank's end of the ring.  bell: a file descriptor that the leader writes on when there is
    something to take, and closes at the end."""

    def __init__(self, memory: SharedMemory, rank: int, bell: int) -> None:
        self._memory = memory
        self._rank = rank
        self._bell = bell

    def read(self) -> bytes:
        """The next frame; waits for it.  Raises EOFError when the leader has gone."""
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size))
        return self._take(length)

    def _take(self, length: int) -> bytes:
        words, ring = self._memory.words, self._memory.ring
        found = bytearray()
        while len(found) < length:
            taken = words[self._rank]
            at = taken % RING_BYTES
            size = min(words[0] - taken, length - len(found), RING_BYTES - at)
            if size:
                found += ring[at : at + size]
                words[self._rank] = taken + size
            elif not os.read(self._bell, RING_BYTES):
                raise EOFError
        return bytes(found)
