"""Latent attention with keys and values of every head, expanded from latents: for long prompts.

Rows of the step attend to one another, and then to their prefixes, piece by piece; a merge by
log-sum-exp joins the parts.  A request that has no rows in a piece has out 0 and lse −inf there.
Prefixes are read from the cache as they are stored, and the step's rows are what is stored, so that
this and the absorbed way differ in rounding alone.  An expanded key is never cached.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.attention.contract import LayerCache
from paceline.attention.ragged.contract import RaggedBackend, RaggedPart
from paceline.core.expansion import Expansion
from paceline.kernels.merge_partials import merge_partials
from paceline.kernels.prefix_rows import prefix_rows
from paceline.kernels.ragged_attention import SharedColumns
from paceline.kernels.step_view import StepView

# latents [rows, rank] -> keys [rows, heads, nope_dim] and values [rows, heads, v_dim], both new
Expand = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpandedPiece:
    """One piece of the prefixes."""

    first: int  # position of each request's first row
    num_rows: int  # of all requests, at most
    starts: Tensor  # [reqs + 1]  int32  prefix sums of each request's rows
    plan: Any  # the ragged backend's


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpandedPlan:
    """The requests of a step that are expanded: the last `reqs`."""

    first_token: int  # of theirs within the step
    backend: RaggedBackend
    own: Any  # its plan of the step's own rows
    page_tables: tuple[Tensor, ...]  # [num_groups] of [reqs, max_pages]  int32
    pieces: tuple[ExpandedPiece, ...]


def expanded_plan(
    view: StepView, expansion: Expansion, backend: RaggedBackend, buffers: Any
) -> ExpandedPlan:
    """From the view's lengths, or for a backend that plans on the host from the host's.  A row that
    the device froze since has fewer rows than the host's bounds say, and never more.

    buffers: of `backend`, which plans each part.
    """
    row, q_lens = expansion.first_row, expansion.extend_lens
    cu_q = view.cu_seqlens_q[row:] - expansion.first_token

    def plan(index: int, cu_k: Tensor, k_lens: tuple[int, ...]) -> Any:
        part = RaggedPart(
            index=index, cu_q=cu_q, cu_k=cu_k, q_lens=q_lens, k_lens=k_lens, causal=index == 0
        )
        return backend.plan(part, buffers)

    own = plan(0, cu_q, q_lens)
    prefix_lens = view.prefix_lens[row:]
    pieces = []
    for index, piece in enumerate(expansion.pieces, start=1):
        lens = prefix_lens.clamp(piece.first, piece.end) - piece.first
        if backend.capabilities.host_plan:
            of_all = (*piece.lens, *[0] * (len(lens) - len(piece.lens)))  # padded rows too
            lens = torch.tensor(of_all, dtype=torch.int32).to(lens.device, non_blocking=True)
        starts = prefix_lens.new_zeros(prefix_lens.shape[0] + 1)
        torch.cumsum(lens, 0, dtype=torch.int32, out=starts[1:])
        pieces.append(
            ExpandedPiece(
                first=piece.first,
                num_rows=piece.num_rows,
                starts=starts,
                plan=plan(index, starts, piece.lens),
            )
        )
    return ExpandedPlan(
        first_token=expansion.first_token,
        backend=backend,
        own=own,
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
    rank, backend, table = layer.spec.v_head_dim, plan.backend, plan.page_tables[layer.spec.group]
    # Parts are not rounded before they are one, but by a backend that knows no other way.
    wide = torch.promote_types(q.dtype, torch.float32) if plan.pieces else q.dtype
    shares = backend.capabilities.shared_columns
    queries = q if shares else torch.cat((q, turned), 2)

    def attend(rows: Tensor, part: Any) -> tuple[Tensor, Tensor]:
        keys, values = expand(rows[:, :rank])
        shared = None
        if shares:
            shared = SharedColumns(turned, rows[:, rank:])
        else:
            of_all = rows[:, rank:].unsqueeze(1).expand(-1, keys.shape[1], -1)
            keys = torch.cat((keys, of_all), 2)
        return backend.attend(queries, keys, values, shared, part, out_dtype=wide)

    out, lse = attend(rows, plan.own)
    out = out.to(wide)
    for piece in plan.pieces:
        found = prefix_rows(
            layer.k_cache, table, piece.starts, first=piece.first, num_rows=piece.num_rows
        )
        part, part_lse = attend(found, piece.plan)
        merge_partials(out, lse, part, part_lse, out=out, lse=lse)
        del found, part, part_lse  # before the next is made
    return out.to(q.dtype)
