"""derive: every length, position, offset and table of a step, from the request table.

The one derivation.  Eager steps run it, graphs record it, every backend plans from its result.

Worked example: page size 4; row 3 decodes at length 6, row 5 prefills 3 tokens after a hit of 4.

    facts         rows [3, 5]  extend [1, 3]         one group, page_table rows 3: [7, 2]  5: [9, 4]
    prefix_lens   [6, 4]                             kv_committed of the rows
    kv_lens       [7, 7]                             prefix + extend
    cu_seqlens_q  [0, 1, 4]
    req_ids       [0, 1, 1, 1]                       which request each token belongs to
    positions     [6, 4, 5, 6]                       prefix + offset in the request
    out_cache_loc [2*4+2, 4*4+0, 4*4+1, 4*4+2]       page_table[req, pos // 4] * 4 + pos % 4
    logits_loc    [0, 3]                             last token of each request
"""

import torch

from paceline.attention.contract import StepView
from paceline.core.padding import PAD_ROW
from paceline.core.step import FinishCode
from paceline.runner.buffers import StepBuffers
from paceline.runner.request_table import RequestTable


def derive(
    buffers: StepBuffers, table: RequestTable, view: StepView, page_sizes: tuple[int, ...]
) -> None:
    """Fill `view` in place from `buffers.facts` and `table`.  Device-only, static shapes.

    A frozen row (finished on the device, not yet known to the host) becomes a padded row here.
    page_sizes: [num_groups] tokens.
    """
    reqs, tokens = view.padded_reqs, view.padded_tokens
    staged_rows = buffers.facts[:reqs, 0].long()
    running = table.finish.index_select(0, staged_rows) == FinishCode.RUNNING
    torch.mul(staged_rows, running, out=view.row_ids)
    view.extend_lens.copy_(buffers.facts[:reqs, 1])
    torch.index_select(table.kv_committed, 0, view.row_ids, out=view.prefix_lens)
    torch.add(view.prefix_lens, view.extend_lens, out=view.kv_lens)
    torch.cumsum(view.extend_lens, 0, dtype=torch.int32, out=view.cu_seqlens_q[1:])
    torch.sub(view.cu_seqlens_q[1:], 1, out=view.logits_loc)

    offsets = buffers.arange[:tokens]
    torch.searchsorted(view.cu_seqlens_q[1:], offsets, right=True, out=view.req_ids)
    first_position = view.prefix_lens - view.cu_seqlens_q[:-1]
    torch.add(first_position.index_select(0, view.req_ids), offsets, out=view.positions)
    token_rows = view.row_ids.index_select(0, view.req_ids)
    width = table.token_ids.shape[1]
    history = table.token_ids.view(-1)
    view.input_ids.copy_(history.index_select(0, token_rows * width + view.positions))

    is_live = token_rows != PAD_ROW
    for group, page_table, page_size in zip(
        view.groups, table.page_tables, page_sizes, strict=True
    ):
        torch.index_select(page_table, 0, view.row_ids, out=group.page_table)
        page_index = token_rows * page_table.shape[1] + view.positions // page_size
        page = page_table.view(-1).index_select(0, page_index)
        slot = page.long() * page_size + view.positions % page_size
        torch.mul(slot, is_live, out=group.out_cache_loc)
