"""Overlay: input rows that requests bring, and which token of the request table reads which.

Worked example: row 3 brings rows for tokens 1 and 2 of its prompt, in slots 5 and 6; row 4 none.

    slots          row 3: [0, 5, 6, 0]   row 4: [0, 0, 0, 0]     0: the embedding of the id
    positions      [0, 1, 2, 3, 0, 1]    req_ids [0, 0, 0, 0, 1, 1]
    overlay_slot   [0, 5, 6, 0, 0, 0]
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.core.padding import PAD_ROW
from paceline.core.step import OverlayDelta
from paceline.kernels.step_view import StepView
from paceline.runner.staging import Copy, StagingSlot


class Overlay:
    """Host-owned: changed by deltas, on the step's stream, before the step that reads it.

    rows   [1 + num_slots, hidden]  the model's dtype; slot 0 is nobody's
    slots  [table rows, max_tokens]  int32  slot of the row that stands in for the embedding of the
        token there; 0: none.  Row 0 holds zeros, as padding reads it
    """

    def __init__(
        self,
        *,
        num_slots: int,
        hidden_size: int,
        table_rows: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.rows = torch.zeros(1 + num_slots, hidden_size, dtype=dtype, device=device)
        self.slots = torch.zeros(table_rows, max_tokens, dtype=torch.int32, device=device)
        self._ends: dict[int, int] = {}  # table row -> where its entries end, unless it has none

    def stage(self, delta: OverlayDelta, slot: StagingSlot) -> Iterator[Copy]:
        """A request that has just entered its row: its input rows from delta.start on."""
        source, num = delta.source, len(delta.slots)
        end = delta.start + num
        self._ends[delta.row] = end
        yield self.slots[delta.row, delta.start : end], slot.put(np.array(delta.slots, np.int32))
        rows = source.rows[delta.start - source.start :]
        if self.rows.is_cuda:
            rows = rows.pin_memory()  # torch keeps it until the copy is done
        for first, last in _runs(delta.slots):
            start = delta.slots[first]
            yield self.rows[start : start + last - first], rows[first:last]

    def clear(self, row: int) -> Iterator[Copy]:
        """Another request enters a row: what the last one read there is none of its tokens'."""
        end = self._ends.pop(row, None)
        if end is not None:
            yield self.slots[row, :end], self.slots[PAD_ROW, :end]

    def named_tensors(self) -> dict[str, Tensor]:
        """The tensors by name, for guards."""
        return {"table.overlay.rows": self.rows, "table.overlay.slots": self.slots}


def derive_overlay(overlay: Overlay, view: StepView) -> None:
    """Fill view.overlay_slot: of each token the slot of its row.  Device-only, static shapes."""
    assert view.overlay_slot is not None, "the view is of a step that reads the overlay"
    view.overlay_slot.copy_(view.at_tokens(overlay.slots))


def _runs(slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """[first, last) of the slots that follow one another."""
    first = 0
    for index in range(1, len(slots) + 1):
        if index == len(slots) or slots[index] != slots[index - 1] + 1:
            yield first, index
            first = index
