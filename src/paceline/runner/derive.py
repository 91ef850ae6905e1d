"""derive: every length, position, offset and table of a step, from the request table.

The one derivation.  Eager steps run it, graphs record it, every backend plans from its result.
What it computes, with a worked example, is in kernels/derive.py.
"""

from paceline.kernels.derive import DerivedStep, RequestRows
from paceline.kernels.derive import derive as derive_rows
from paceline.kernels.derive_tree import derive_tree
from paceline.kernels.step_view import StepView
from paceline.runner.buffers import StepBuffers
from paceline.runner.request_table import RequestTable


def derive(
    buffers: StepBuffers, table: RequestTable, view: StepView, page_sizes: tuple[int, ...]
) -> None:
    """Fill `view` in place from `buffers.facts` and `table`.  Device-only, static shapes.

    Of trees the positions follow the depth; slots and input ids follow the rows, as ever.
    A frozen row (finished on the device, not yet known to the host) becomes a padded row here.
    page_sizes: [num_groups] tokens.
    """
    derived = DerivedStep(
        row_ids=view.row_ids,
        prefix_lens=view.prefix_lens,
        extend_lens=view.extend_lens,
        kv_lens=view.kv_lens,
        cu_seqlens_q=view.cu_seqlens_q,
        logits_loc=view.logits_loc,
        req_ids=view.req_ids,
        positions=view.positions,
        input_ids=view.input_ids,
        page_tables=tuple(group.page_table for group in view.groups),
        out_cache_locs=tuple(group.out_cache_loc for group in view.groups),
    )
    derive_rows(
        buffers.facts,
        RequestRows(table.kv_committed, table.finish, table.token_ids, table.page_tables),
        derived,
        page_sizes=page_sizes,
        max_extend_len=view.max_extend_len,
        offsets=buffers.arange,
    )
    if view.tree_mask is not None:
        derive_tree(
            buffers.parents[: view.padded_tokens],
            view.prefix_lens,
            view.positions,
            tree_mask=view.tree_mask,
        )
