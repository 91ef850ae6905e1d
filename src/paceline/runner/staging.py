"""StagingRing: pinned host memory from which a step's facts and deltas travel to the device.

A slot belongs to one epoch.  It is rewritten only by the step `depth` epochs later, so `depth`
must exceed the number of steps in flight: the copy of an earlier step may still be reading.
"""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.errors import IntegrityError

Copy = tuple[Tensor, Tensor]  # (device destination, pinned source)

STEPS_IN_FLIGHT = 2  # one executing, one just launched: the overlapped loop's most
RING_DEPTH = STEPS_IN_FLIGHT + 1


class StagingSlot:
    """A bump allocator over one pinned byte buffer, emptied at the start of each epoch."""

    def __init__(self, num_bytes: int, *, pinned: bool) -> None:
        self._bytes = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        self._host = self._bytes.numpy()  # the same bytes: numpy takes a third of torch's time
        self._used = 0

    def reset(self) -> None:
        """Forget what the slot held; its bytes will be written again."""
        self._used = 0

    def put(self, values: NDArray[Any]) -> Tensor:
        """Copy host `values` into the slot; returns the pinned tensor to copy from.

        values: any shape; uint8, int32, int64 or float32.

        Raises IntegrityError when the slot is full: the scheduler bounds what a step stages.
        """
        size = values.nbytes
        start = (self._used + 15) & ~15
        if start + size > self._bytes.numel():
            raise IntegrityError.about(
                "staged bytes of one step",
                expected=f"at most {self._bytes.numel()}",
                got=start + size,
                remedy="bound what joins in one step by what the slot holds",
            )
        self._used = start + size
        staged = self._host[start : start + size].view(values.dtype).reshape(values.shape)
        staged[...] = values
        return torch.from_numpy(staged)


class StagingRing:
    """One slot per epoch, reused every `depth` epochs.  Owned by the model runner."""

    def __init__(self, num_bytes: int, *, pinned: bool, depth: int = RING_DEPTH) -> None:
        self._slots = [StagingSlot(num_bytes, pinned=pinned) for _ in range(depth)]

    def slot(self, epoch: int) -> StagingSlot:
        """The slot of `epoch`, empty.  Call once per epoch."""
        slot = self._slots[epoch % len(self._slots)]
        slot.reset()
        return slot
