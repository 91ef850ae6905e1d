"""Latent attention with keys and values of every head, expanded from latents: for long prompts.

Rows of the step attend to one another, and then to their prefixes, piece by piece; a merge by
log-sum-exp joins the parts.  A request that has no rows in a piece has out 0 and lse −inf there.
Prefixes are read from the cache as they are stored, and the step's rows are what is stored, so that
this and the absorbed way differ in rounding alone.  An expanded key is never cached.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.attention.contract import LayerCache
from paceline.core.expansion import Expansion
from paceline.kernels.merge_partials import merge_partials
from paceline.kernels.prefix_rows import prefix_rows
from paceline.kernels.ragged_attention import SharedColumns, ragged_attention
from paceline.kernels.step_view import StepView

# latents [rows, rank] -> keys [rows, heads, nope_dim] and values [rows, heads, v_dim]
Expand = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpandedPiece:
    """One piece of the prefixes."""

    first: int  # position of each request's first row
    num_rows: int  # of all requests, at most
    starts: Tensor  # [reqs + 1]  int32  prefix sums of each request's rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpandedPlan:
    """The requests of a step that are expanded: the last `reqs`."""

    first_token: int  # of theirs within the step
    cu_seqlens_q: Tensor  # [reqs + 1]  int32  from 0
    page_tables: tuple[Tensor, ...]  # [num_groups] of [reqs, max_pages]  int32
    pieces: tuple[ExpandedPiece, ...]


def expanded_plan(view: StepView, expansion: Expansion) -> ExpandedPlan:
    """Device-only, from the view's lengths.  A row that the device froze since has fewer rows than
    the host's bounds say, and never more."""
    row = expansion.first_row
    prefix_lens = view.prefix_lens[row:]
    pieces = []
    for piece in expansion.pieces:
        starts = prefix_lens.new_zeros(prefix_lens.shape[0] + 1)
        lens = prefix_lens.clamp(piece.first, piece.end) - piece.first
        torch.cumsum(lens, 0, dtype=torch.int32, out=starts[1:])
        pieces.append(ExpandedPiece(first=piece.first, num_rows=piece.num_rows, starts=starts))
    return ExpandedPlan(
        first_token=expansion.first_token,
        cu_seqlens_q=view.cu_seqlens_q[row:] - expansion.first_token,
        page_tables=tuple(group.page_table[row:] for group in view.groups),
        pieces=tuple(pieces),
    )


def attend_expanded(
    q: Tensor, turned: Tensor, rows: Tensor, layer: LayerCache, plan: ExpandedPlan, expand: Expand
) -> Tensor:
    """[tokens, heads, v_dim] in q's dtype, of the rows that a plan expands.

    q: [tokens, heads, nope_dim]; turned: [tokens, heads, rope_dim], the columns of queries that
    turn; rows: [tokens, rank + rope_dim], as the cache has them by now.
    """
    rank, cu_q = layer.spec.v_head_dim, plan.cu_seqlens_q
    table = plan.page_tables[layer.spec.group]
    # Parts are not rounded before they are one.
    wide = torch.promote_types(q.dtype, torch.float32) if plan.pieces else q.dtype

    def attend(rows: Tensor, cu_k: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
        keys, values = expand(rows[:, :rank])
        return ragged_attention(
            q,
            keys,
            values,
            cu_q,
            cu_k,
            causal=causal,
            scale=layer.spec.scale,
            shared=SharedColumns(turned, rows[:, rank:]),
            out_dtype=wide,
        )

    out, lse = attend(rows, cu_q, causal=True)
    for piece in plan.pieces:
        found = prefix_rows(
            layer.k_cache, table, piece.starts, first=piece.first, num_rows=piece.num_rows
        )
        part, part_lse = attend(found, piece.starts, causal=False)
        merge_partials(out, lse, part, part_lse, out=out, lse=lse)
        del found, part, part_lse  # before the next is made
    return out.to(q.dtype)
