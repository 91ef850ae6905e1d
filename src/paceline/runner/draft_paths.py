"""The paths of a round's drafts: what each of its rows knows, and which path a forced one takes.

Worked example: history [.. a], 7 tokens committed, tree tokens [a b c d], parents [-1 0 0 1].

    row of a   .. a            row of c   .. a c
    row of b   .. a b          row of d   .. a b d
"""

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels.commit import Drafts
from paceline.kernels.edit_logits import NO_DRAFT
from paceline.kernels.step_view import StepView
from paceline.runner.proposer import DraftTree

PROPOSED = -1  # of a request whose proposer drafts
FORCED_BITS = 16  # a forced length is a multiple of 2**-16
FORCED_SPREAD = 40503  # 2**16 over the golden ratio: requests are spread over a forced length


class GivenRows(NamedTuple):
    """Drafts that the host names for some requests of a round."""

    ids: Tensor  # [padded_reqs, n]  int32  column 0: how many are accepted at most, PROPOSED: any
    # number; behind it the drafts, PROPOSED: the proposer's
    parents: Tensor | None  # [padded_reqs, n]  int32  of a request with such drafts, as Drafts has
    # them; None: chains


def given_tree(tree: DraftTree, given: GivenRows) -> DraftTree:
    """`tree` with the drafts of the host where it names some.

    Where it says how many are accepted, drafts have no q: they count where they are sampled again.
    Device-only, static shapes, recordable; mutates nothing.
    """
    most, ids = given.ids[:, :1], given.ids[:, 1:]
    drafts = torch.where(ids != PROPOSED, ids.long(), tree.tokens[:, 1:])
    tokens = torch.cat((tree.tokens[:, :1], drafts), dim=1)
    parents = tree.parents
    if parents is not None:
        assert given.parents is not None, "a round of trees is given trees"
        parents = torch.where(most > 0, given.parents, parents)
    q = tree.q
    if q is not None:
        q = q.masked_fill((most != PROPOSED).unsqueeze(2), float("nan"))
    return DraftTree(tokens, parents, q, tree.d2t)


def given_most(drafts: Drafts, given: GivenRows, view: StepView) -> Drafts:
    """`drafts` of which no more are accepted than the host has given.

    Device-only, static shapes, recordable; mutates nothing.
    """
    most = drafts.max_drafts.index_select(0, view.row_ids)
    ours = given.ids[:, 0]
    most = torch.where(ours != PROPOSED, ours.long(), most)
    return drafts._replace(max_drafts=drafts.max_drafts.index_copy(0, view.row_ids, most))


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


def force_drafts(
    drafts: Drafts, sampled: Tensor, view: StepView, *, length: float, max_path: int
) -> tuple[Drafts, Tensor]:
    """A round that emits `length` tokens on average, whatever was sampled: to compare machines.

    sampled: [padded_tokens] int64.  Returns the drafts with as many for each request as it is to
    accept, and samples that agree with the way to the first row that is so deep, or deepest.
    Device-only, static shapes, recordable.
    """
    reqs, n = drafts.tokens.shape
    columns = torch.arange(n, device=sampled.device)
    _, is_known = _known(view)
    depths = is_known.sum(2) - 1
    hangs = is_known[:, :, 0] & (depths < max_path)
    depths = depths.masked_fill(~hangs, -1)
    most = drafts.max_drafts.index_select(0, view.row_ids)
    depth = torch.minimum(torch.minimum(_forced_depths(view, length), most), depths.amax(1))
    leaf = columns.where(depths == depth.unsqueeze(1), n).amin(1)
    is_on_way = is_known.gather(1, leaf.view(reqs, 1, 1).expand(reqs, 1, n))  # [reqs, 1, n]
    # Of every row the first one behind it on the way: of the way's rows their child.
    is_behind = is_on_way & (columns > columns.unsqueeze(1))
    behind = columns.expand(reqs, n, n).where(is_behind, n).amin(2)
    agreed = drafts.tokens.gather(1, behind.clamp(max=n - 1))
    has_child = is_on_way.squeeze(1) & (behind < n)
    max_drafts = drafts.max_drafts.index_copy(0, view.row_ids, depth)
    return drafts._replace(max_drafts=max_drafts), agreed.where(has_child, sampled.view(reqs, n))


def _forced_depths(view: StepView, length: float) -> Tensor:
    """[padded_reqs]  int64  drafts to accept, such that `length` tokens are emitted on average.

    Round k of a request would end at floor(k * length + phase); from the one before which the
    request stands it goes as far as from there to the next.
    """
    length_bits = round(length * 2**FORCED_BITS)
    phase = (view.row_ids * FORCED_SPREAD) & (2**FORCED_BITS - 1)
    ends_before = (((view.prefix_lens.long() + 1) << FORCED_BITS) - phase - 1) // length_bits
    reach = ends_before * length_bits + phase
    emitted: Tensor = ((reach + length_bits) >> FORCED_BITS) - (reach >> FORCED_BITS)
    return emitted - 1


def _known(view: StepView) -> tuple[Tensor, Tensor]:
    """Of each request: its rows' tokens [reqs, width] int64, and which of them each row knows
    [reqs, width, width] bool."""
    reqs, width = view.padded_reqs, view.max_extend_len
    tokens = view.input_ids.view(reqs, width)
    if view.tree_mask is not None:
        return tokens, view.tree_mask.view(reqs, width, width)
    offsets = torch.arange(width, device=tokens.device)
    return tokens, (offsets <= offsets.unsqueeze(1)).expand(reqs, width, width)
