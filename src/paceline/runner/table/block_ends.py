"""BlockEnds: where the block of each token of the request table ends, where prompts have blocks.

Worked example: row 3 has a prompt of 6 tokens whose tokens 1 to 3 are a block; row 4 none.

    ends           row 3: [0, 4, 4, 4, 0, 0]   row 4: [0, 0]     0: the token is in no block
    positions      [0, 1, 2, 3, 4, 5, 0, 1]    req_ids [0, 0, 0, 0, 0, 0, 1, 1]
    visible_end    [1, 4, 4, 4, 5, 6, 1, 2]    position + 1, but within a block its end
"""

from collections.abc import Iterator

import numpy as np
import torch

from paceline.core.padding import PAD_ROW
from paceline.core.request.blocks import Blocks
from paceline.kernels.step_view import StepView
from paceline.runner.staging import Copy, StagingSlot


class BlockEnds:
    """Host-owned: staged when a request joins, on the step's stream.

    ends  [table rows, max_tokens]  int32  the position behind the block that the token there is in;
        0: it is in none.  Row 0 holds zeros, as padding reads it
    """

    def __init__(self, table_rows: int, max_tokens: int, device: torch.device) -> None:
        self.ends = torch.zeros(table_rows, max_tokens, dtype=torch.int32, device=device)
        self._stops: dict[int, int] = {}  # table row -> where its entries stop, unless it has none

    def stage(self, row: int, blocks: Blocks | None, slot: StagingSlot) -> Iterator[Copy]:
        """A request enters a row: the blocks of its prompt, and none of who left it."""
        stop = self._stops.pop(row, None)
        if stop is not None:
            yield self.ends[row, :stop], self.ends[PAD_ROW, :stop]
        if blocks is None:
            return
        self._stops[row] = stop = blocks.spans[-1][1]
        staged = np.zeros(stop, dtype=np.int32)
        for first, behind in blocks.spans:
            staged[first:behind] = behind
        yield self.ends[row, :stop], slot.put(staged)


def derive_blocks(blocks: BlockEnds, view: StepView) -> None:
    """Fill view.visible_end: of each token its block's end, or the position behind its own.

    Device-only, static shapes.
    """
    assert view.visible_end is not None, "the view is of a step that sees ahead"
    ends = view.at_tokens(blocks.ends)
    view.visible_end.copy_(torch.maximum(ends, view.positions + 1))
