"""Triton kernel of ngram_lookup; see kernels/ngram_lookup.py for the definition."""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.runtime import next_power_of_2
from paceline.kernels.ngram_lookup import NgramDrafts

_BLOCK_TOKENS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What is looked for."""

    min_n: int  # tokens of a match, at least
    max_n: int  # at most
    num_steps: int  # drafts of a match
    branches: int  # matches wanted


@triton.jit
def _match_lengths(
    row_ptr,  # [max_tokens] int32 one request's history
    ends,  # [positions] int32
    last,  # int32 position of the newest token
    MAX_N: tl.constexpr,
):
    """[positions] int32: tokens before and at each end that equal those before and at `last`."""
    is_alive = ends < last
    lengths = tl.zeros_like(ends)
    for back in tl.static_range(MAX_N):
        is_alive = is_alive & (ends >= back)
        wanted = tl.load(row_ptr + tl.maximum(last - back, 0))
        is_alive = is_alive & (tl.load(row_ptr + ends - back, mask=is_alive, other=-1) == wanted)
        lengths += is_alive.to(tl.int32)
    return lengths


@triton.jit
def _ngram_lookup_kernel(
    history_ptr,  # [table rows, max_tokens] int32
    row_ids_ptr,  # [reqs] int64
    known_ptr,  # [reqs] int32 or int64
    tokens_ptr,  # [reqs, num_draft_tokens] int64
    parents_ptr,  # [reqs, num_draft_tokens] int32, written where TREE
    stride_history_row,
    stride_row_ids,
    stride_known,
    num_draft_tokens,
    MIN_N: tl.constexpr,
    MAX_N: tl.constexpr,
    NUM_STEPS: tl.constexpr,
    BRANCHES: tl.constexpr,
    BLOCK_BRANCHES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,  # of a chain, and of all
    BLOCK_TOKENS: tl.constexpr,
    TREE: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """One request: a scan of its history for every branch."""
    wait_for_inputs(OVERLAPPED)
    let_next_start(OVERLAPPED)
    req = tl.program_id(0).to(tl.int64)
    row_ptr = history_ptr + tl.load(row_ids_ptr + req * stride_row_ids) * stride_history_row
    last = tl.load(known_ptr + req * stride_known).to(tl.int32) - 1
    root = tl.load(row_ptr + last).to(tl.int64)
    out = req * num_draft_tokens
    rows = tl.arange(0, BLOCK_ROWS)
    drafted: tl.constexpr = 1 + BRANCHES * NUM_STEPS
    is_spare = (rows == 0) | ((rows >= drafted) & (rows < num_draft_tokens))
    tl.store(tokens_ptr + out + rows, tl.zeros((BLOCK_ROWS,), tl.int64) + root, mask=is_spare)
    if TREE:
        tl.store(parents_ptr + out + rows, tl.full((BLOCK_ROWS,), -1, tl.int32), mask=is_spare)
    branches = tl.arange(0, BLOCK_BRANCHES)
    firsts = tl.full((BLOCK_BRANCHES,), -1, tl.int32)  # the first draft of each branch so far
    for branch in range(BRANCHES):
        best = tl.full((BLOCK_TOKENS,), -1, tl.int64)  # length, then position
        for start in range(0, last, BLOCK_TOKENS):
            ends = start + tl.arange(0, BLOCK_TOKENS)
            lengths = _match_lengths(row_ptr, ends, last, MAX_N)
            is_match = lengths >= MIN_N
            if BRANCHES > 1:
                behind = tl.load(row_ptr + ends + 1, mask=is_match, other=-1)
                is_old = tl.sum((behind[:, None] == firsts[None, :]).to(tl.int32), axis=1) > 0
                is_match = is_match & ~is_old
            match = (lengths.to(tl.int64) << 32) | ends
            best = tl.maximum(best, tl.where(is_match, match, -1))
        found = tl.max(best, axis=0)
        is_found = found >= 0
        end = tl.where(is_found, found & 0x7FFFFFFF, 0).to(tl.int32)
        source = end + 1 + rows % tl.maximum(last - end, 1)  # in the row, found or not
        draft = tl.load(row_ptr + source).to(tl.int64)
        first = tl.where(is_found, tl.load(row_ptr + end + 1), -1)
        firsts = tl.where(branches == branch, first, firsts)
        at = 1 + branch * NUM_STEPS + rows
        is_row = (rows < NUM_STEPS) & (at < num_draft_tokens)
        tl.store(tokens_ptr + out + at, tl.where(is_found, draft, root), mask=is_row)
        if TREE:
            above = tl.where(rows == 0, 0, at - 1)
            tl.store(parents_ptr + out + at, tl.where(is_found, above, -1), mask=is_row)


def launch_ngram_lookup(
    history: Tensor,
    row_ids: Tensor,
    known: Tensor,
    out: NgramDrafts,
    *,
    search: Search,
    block_tokens: int = _BLOCK_TOKENS,
) -> None:
    """One program per request."""
    reqs, num_draft_tokens = out.tokens.shape
    if reqs == 0:
        return
    launch(
        _ngram_lookup_kernel,
        (reqs,),
        history,
        row_ids,
        known,
        out.tokens,
        out.tokens if out.parents is None else out.parents,
        history.stride(0),
        row_ids.stride(0),
        known.stride(0),
        num_draft_tokens,
        MIN_N=search.min_n,
        MAX_N=search.max_n,
        NUM_STEPS=search.num_steps,
        BRANCHES=search.branches,
        BLOCK_BRANCHES=next_power_of_2(search.branches),
        BLOCK_ROWS=next_power_of_2(max(num_draft_tokens, search.num_steps)),
        BLOCK_TOKENS=block_tokens,
        TREE=out.parents is not None,
        num_warps=min(max(block_tokens // 256, 1), 8),
        **overlap_options(history.device, _ngram_lookup_kernel),
    )
