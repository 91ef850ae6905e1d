"""derive: every length, position, offset and table of a step, from the request table.

The one derivation.  Eager steps run it, graphs record it, every backend plans from its result.
What it computes, with a worked example, is in kernels/derive.py.
"""

import torch

from paceline.kernels.derive import TableRows, derive_rows
from paceline.kernels.derive_rope import derive_rope
from paceline.kernels.derive_tree import derive_tree
from paceline.kernels.step_view import StepView
from paceline.runner.buffers import StepBuffers
from paceline.runner.encoder import derive_encoder
from paceline.runner.table.block_ends import derive_blocks
from paceline.runner.table.overlay import derive_overlay
from paceline.runner.table.request_table import RequestTable


def derive(
    buffers: StepBuffers, table: RequestTable, view: StepView, page_sizes: tuple[int, ...]
) -> None:
    """Fill `view` in place from `buffers.facts` and `table`.  Device-only, static shapes.

    Of trees the positions follow the depth; slots and input ids follow the rows, as ever.  What
    rope turns by follows the positions.
    A frozen row (finished on the device, not yet known to the host) becomes a padded row here.
    page_sizes: [num_groups] tokens.
    """
    derive_rows(
        TableRows(
            facts=buffers.facts,
            kv_committed=table.kv_committed,
            finish=table.finish,
            token_ids=table.token_ids,
            page_tables=table.page_tables,
        ),
        view,
        page_sizes=page_sizes,
        offsets=buffers.arange,
    )
    if view.overlay_slot is not None:
        assert table.overlay is not None, "a step that reads an overlay has one"
        derive_overlay(table.overlay, view)
    if view.token_types is not None:
        assert table.second_from is not None, "who tells types apart has them of every row"
        second = table.second_from.index_select(0, view.row_ids).index_select(0, view.req_ids)
        torch.ge(view.positions, second, out=view.token_types)
    if view.visible_end is not None:
        assert table.block_ends is not None, "a step that sees ahead has blocks"
        derive_blocks(table.block_ends, view)
    if view.tree_mask is not None:
        derive_tree(buffers.parents[: view.padded_tokens], view)
    derive_rope(table.rope, view)
    if table.encoder_lens is not None:
        derive_encoder(table.encoder_lens, view, buffers.encoder_groups[0])
