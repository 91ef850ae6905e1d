"""What each row of a round knows: its request's history, and the drafts on its own path.

Worked example: history [.. a], 7 tokens committed, tree tokens [a b c d], parents [-1 0 0 1].

    row of a   .. a            row of c   .. a c
    row of b   .. a b          row of d   .. a b d
"""

import torch
from torch import Tensor

from paceline.kernels.edit_logits import NO_DRAFT
from paceline.kernels.step_view import StepView


def node_drafts(view: StepView) -> Tensor:
    """[padded_tokens, width] int64: the drafts on the path to every row of a round, its own
    included; NO_DRAFT: the root, which its request's history holds, and what is on no path.

    Device-only, static shapes, recordable.  A row that hangs nowhere gets anything.
    """
    tokens, is_known = _known(view)
    is_draft = is_known & (torch.arange(tokens.shape[1], device=tokens.device) > 0)
    return torch.where(is_draft, tokens.unsqueeze(1), NO_DRAFT).flatten(0, 1)


def node_histories(token_ids: Tensor, rows: Tensor, view: StepView) -> Tensor:
    """[padded_tokens, max_tokens] int32: the history behind every row of a round.

    token_ids: [table rows, max_tokens] int32; rows: [padded_tokens] int64 table row of each.
    Device-only, static shapes, recordable.  A row that hangs nowhere gets anything.
    """
    reqs, width = view.padded_reqs, view.max_extend_len
    positions = view.positions.view(reqs, width)
    tokens, is_known = _known(view)
    # What a row does not know writes the root again.
    where = torch.where(is_known, positions.unsqueeze(1), positions[:, :1, None])
    what = torch.where(is_known, tokens.unsqueeze(1), tokens[:, :1, None])
    histories = token_ids.index_select(0, rows)
    return histories.scatter(1, where.flatten(0, 1), what.flatten(0, 1).int())


def _known(view: StepView) -> tuple[Tensor, Tensor]:
    """Of each request: its rows' tokens [reqs, width] int64, and which of them each row knows
    [reqs, width, width] bool."""
    reqs, width = view.padded_reqs, view.max_extend_len
    tokens = view.input_ids.view(reqs, width)
    if view.tree_mask is not None:
        return tokens, view.tree_mask.view(reqs, width, width)
    offsets = torch.arange(width, device=tokens.device)
    return tokens, (offsets <= offsets.unsqueeze(1)).expand(reqs, width, width)
