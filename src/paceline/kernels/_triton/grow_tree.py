"""Triton kernels of grow_tree and select_tree; see kernels/grow_tree.py for the definition."""

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.ranks import TAKEN, index_of, rank_of, take_best, value_of
from paceline.kernels._triton.runtime import next_power_of_2
from paceline.kernels.draft_topk import TopDrafts
from paceline.kernels.grow_tree import Candidates, Frontier


@triton.jit
def _grow_tree_kernel(
    child_tokens_ptr,  # [reqs, children] int64
    child_scores_ptr,  # [reqs, children] float32
    frontier_ids_ptr,  # [reqs, TOPK] int32, read where HAS_FRONTIER
    frontier_scores_ptr,  # [reqs, TOPK] float32, as above
    cand_tokens_ptr,  # [reqs, num_candidates] int64
    cand_scores_ptr,  # [reqs, num_candidates] float32
    cand_parents_ptr,  # [reqs, num_candidates] int32
    ids_ptr,  # [reqs, TOPK] int32
    scores_ptr,  # [reqs, TOPK] float32
    tokens_ptr,  # [reqs, TOPK] int64
    origin_ptr,  # [reqs, TOPK] int64
    first_id,
    children,
    num_candidates,
    TOPK: tl.constexpr,
    BLOCK_TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_FRONTIER: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """One request: its frontier's children, and the best of them."""
    wait_for_inputs(OVERLAPPED)
    let_next_start(OVERLAPPED)
    req = tl.program_id(0).to(tl.int64)
    entries = tl.arange(0, BLOCK)
    is_real = entries < children
    at = req * children + entries
    tokens = tl.load(child_tokens_ptr + at, mask=is_real, other=0)
    scores = tl.load(child_scores_ptr + at, mask=is_real, other=0.0)
    scores = tl.where(scores > 0.0, 0.0, scores)  # a NaN stays one
    parents = tl.full((BLOCK,), -1, tl.int32)
    if HAS_FRONTIER:
        slot_ptrs = req * TOPK + entries // TOPK
        parents = tl.load(frontier_ids_ptr + slot_ptrs, mask=is_real, other=-1)
        scores += tl.load(frontier_scores_ptr + slot_ptrs, mask=is_real, other=0.0)
    scores = tl.where(scores == scores, scores, float("-inf"))
    cand = req * num_candidates + first_id + entries
    tl.store(cand_tokens_ptr + cand, tokens, mask=is_real)
    tl.store(cand_scores_ptr + cand, scores, mask=is_real)
    tl.store(cand_parents_ptr + cand, parents, mask=is_real)

    ranks = tl.where(is_real, rank_of(scores, entries), TAKEN)
    best = take_best(ranks, TOPK, BLOCK_TOPK)
    slots = tl.arange(0, BLOCK_TOPK)
    is_slot = slots < TOPK
    chosen = tl.where(is_slot, index_of(best), 0)
    out = req * TOPK + slots
    tl.store(ids_ptr + out, (first_id + chosen).to(tl.int32), mask=is_slot)
    tl.store(scores_ptr + out, value_of(best), mask=is_slot)
    best_tokens = tl.load(child_tokens_ptr + req * children + chosen, mask=is_slot, other=0)
    tl.store(tokens_ptr + out, best_tokens, mask=is_slot)
    tl.store(origin_ptr + out, chosen // TOPK, mask=is_slot)


@triton.jit
def _select_tree_kernel(
    cand_tokens_ptr,  # [reqs, num_candidates] int64
    cand_scores_ptr,  # [reqs, num_candidates] float32
    cand_parents_ptr,  # [reqs, num_candidates] int32
    roots_ptr,  # [reqs] int64
    tokens_ptr,  # [reqs, num_draft_tokens] int64
    parents_ptr,  # [reqs, num_draft_tokens] int32
    stride_roots,
    num_candidates,
    num_draft_tokens,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """One request: take the best candidates one by one, and count the kept ids up to each id."""
    wait_for_inputs(OVERLAPPED)
    let_next_start(OVERLAPPED)
    req = tl.program_id(0).to(tl.int64)
    ids = tl.arange(0, BLOCK)
    is_real = ids < num_candidates
    at = req * num_candidates + ids
    scores = tl.load(cand_scores_ptr + at, mask=is_real, other=0.0)
    above = tl.load(cand_parents_ptr + at, mask=is_real, other=-1)
    tokens = tl.load(cand_tokens_ptr + at, mask=is_real, other=0)
    ranks = tl.where(is_real, rank_of(scores, ids), TAKEN)
    rows = tl.zeros((BLOCK,), tl.int32)  # kept ids up to this one
    parent_rows = tl.zeros((BLOCK,), tl.int32)  # kept ids up to its parent
    for _ in range(num_draft_tokens - 1):
        best = tl.max(ranks, axis=0)
        best_id = index_of(best)
        rows += (best_id <= ids).to(tl.int32)
        parent_rows += (best_id <= above).to(tl.int32)
        ranks = tl.where(ranks == best, TAKEN, ranks)
    is_kept = is_real & (ranks == TAKEN)
    out = req * num_draft_tokens
    tl.store(tokens_ptr + out, tl.load(roots_ptr + req * stride_roots))
    tl.store(parents_ptr + out, -1)
    tl.store(tokens_ptr + out + rows, tokens, mask=is_kept)
    tl.store(parents_ptr + out + rows, parent_rows, mask=is_kept)


def launch_grow_tree(
    children: TopDrafts,
    above: tuple[Tensor, Tensor] | None,  # ids and scores of the frontier
    candidates: Candidates,
    out: Frontier,
    *,
    first_id: int,
) -> None:
    """One program per request."""
    reqs, topk = out.ids.shape
    if reqs == 0:
        return
    num_children = children.tokens.numel() // reqs
    launch(
        _grow_tree_kernel,
        (reqs,),
        *children,
        *(above or (out.ids, out.scores)),
        *candidates,
        *out,
        first_id,
        num_children,
        candidates.tokens.shape[1],
        TOPK=topk,
        BLOCK_TOPK=next_power_of_2(topk),
        BLOCK=next_power_of_2(num_children),
        HAS_FRONTIER=above is not None,
        num_warps=1,
        **overlap_options(out.ids.device, _grow_tree_kernel),
    )


def launch_select_tree(
    candidates: Candidates, roots: Tensor, tokens: Tensor, parents: Tensor
) -> None:
    """One program per request."""
    reqs, num_candidates = candidates.tokens.shape
    if reqs == 0:
        return
    block = next_power_of_2(num_candidates)
    launch(
        _select_tree_kernel,
        (reqs,),
        *candidates,
        roots,
        tokens,
        parents,
        roots.stride(0),
        num_candidates,
        tokens.shape[1],
        BLOCK=block,
        num_warps=min(max(block // 256, 1), 8),
        **overlap_options(tokens.device, _select_tree_kernel),
    )
