"""What each row of a round knows: its request's history, and the drafts on its own path.

Worked example: history [.. a], 7 tokens committed, tree tokens [a b c d], parents [-1 0 0 1].

    row of a   .. a            row of c   .. a c
    row of b   .. a b          row of d   .. a b d
"""

import torch
from torch import Tensor

from paceline.attention.contract import StepView


def node_histories(token_ids: Tensor, rows: Tensor, view: StepView) -> Tensor:
    """[padded_tokens, max_tokens] int32: the history behind every row of a round.

    token_ids: [table rows, max_tokens] int32; rows: [padded_tokens] int64 table row of each.
    Device-only, static shapes, recordable.  A row that hangs nowhere gets anything.
    """
    reqs, width = view.padded_reqs, view.max_extend_len
    positions = view.positions.view(reqs, width)
    tokens = view.input_ids.view(reqs, width)
    if view.tree_mask is None:
        offsets = torch.arange(width, device=rows.device)
        is_known = (offsets <= offsets.unsqueeze(1)).expand(reqs, width, width)
    else:
        is_known = view.tree_mask.view(reqs, width, width)
    # What a row does not know writes the root again.
    where = torch.where(is_known, positions.unsqueeze(1), positions[:, :1, None])
    what = torch.where(is_known, tokens.unsqueeze(1), tokens[:, :1, None])
    histories = token_ids.index_select(0, rows)
    return histories.scatter(1, where.flatten(0, 1), what.flatten(0, 1).int())
