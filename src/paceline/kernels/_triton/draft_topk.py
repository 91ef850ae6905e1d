"""Triton kernels of draft_topk; see kernels/draft_topk.py for the definition.

One pass finds the best of each block of the vocabulary and its share of the softmax, so that a
single row fills the chip; a second merges the blocks of a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.gumbel import gumbel_at
from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.ranks import TAKEN, index_of, rank_of, take_best, value_of
from paceline.kernels._triton.runtime import cdiv, next_power_of_2
from paceline.kernels.draft_topk import BLOCK_VOCAB, DraftNoise, TopDrafts


@triton.jit
def _draft_topk_blocks_kernel(
    logits_ptr,  # [rows, vocab]
    temperature_ptr,  # [rows] float32, read where NOISE
    seeds_ptr,  # [rows] int64, as above
    positions_ptr,  # [rows] int64, as above
    d2t_ptr,  # [vocab] int64, read where NOISE and MAPPED
    ranks_ptr,  # [rows, blocks, K] int64
    highest_ptr,  # [rows, blocks] float32
    sums_ptr,  # [rows, blocks] float32, of exp(logit - highest); NaN where that is -inf
    stride_logits_row,
    vocab,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr,
    NOISE: tl.constexpr,
    MAPPED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    let_next_start(OVERLAPPED)
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    draft_ids = block * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB)
    is_real = draft_ids < vocab
    logits = tl.load(
        logits_ptr + row * stride_logits_row + draft_ids, mask=is_real, other=float("-inf")
    ).to(tl.float32)
    if NOISE:
        temperature = tl.load(temperature_ptr + row)
        if temperature > 0.0:
            targets = draft_ids.to(tl.int64)
            if MAPPED:
                targets += tl.load(d2t_ptr + draft_ids, mask=is_real, other=0)
            seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
            logits += temperature * gumbel_at(seed, position, targets)
    logits = tl.where(logits == logits, logits, float("-inf"))
    # Ids behind the vocabulary are the largest: they lose to every real -inf of the row.
    best = take_best(rank_of(logits, draft_ids), K, BLOCK_K)
    highest = tl.max(logits, axis=0)
    at = row * tl.num_programs(0) + block
    slots = tl.arange(0, BLOCK_K)
    tl.store(ranks_ptr + at * K + slots, best, mask=slots < K)
    tl.store(highest_ptr + at, highest)
    tl.store(sums_ptr + at, tl.sum(tl.exp(logits - highest), axis=0))


@triton.jit
def _draft_topk_rows_kernel(
    ranks_ptr,  # [rows, blocks, K] int64
    highest_ptr,  # [rows, blocks] float32
    sums_ptr,  # [rows, blocks] float32
    d2t_ptr,  # [vocab] int64, read where MAPPED
    tokens_ptr,  # [rows, K] int64
    scores_ptr,  # [rows, K] float32
    num_blocks,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    MAPPED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    let_next_start(OVERLAPPED)
    row = tl.program_id(0).to(tl.int64)
    entries = tl.arange(0, BLOCK_RANKS)
    ranks = tl.load(
        ranks_ptr + row * num_blocks * K + entries, mask=entries < num_blocks * K, other=TAKEN
    )
    blocks = tl.arange(0, BLOCK)
    at = row * num_blocks + blocks
    is_real = blocks < num_blocks
    highest = tl.load(highest_ptr + at, mask=is_real, other=float("-inf"))
    sums = tl.load(sums_ptr + at, mask=is_real, other=0.0)
    top = tl.max(highest, axis=0)
    # Blocks of -inf alone have no share; a row of them has no scores.
    shares = tl.where(highest > float("-inf"), sums * tl.exp(highest - top), 0.0)
    log_total = tl.log(tl.sum(shares, axis=0))

    best = take_best(ranks, K, BLOCK_K)
    slots = tl.arange(0, BLOCK_K)
    is_slot = slots < K
    draft_ids = tl.where(is_slot, index_of(best), 0)
    tokens = draft_ids
    if MAPPED:
        tokens += tl.load(d2t_ptr + draft_ids, mask=is_slot, other=0)
    scores = value_of(best) - top - log_total
    scores = tl.where(scores == scores, scores, float("-inf"))
    tl.store(tokens_ptr + row * K + slots, tokens, mask=is_slot)
    tl.store(scores_ptr + row * K + slots, scores, mask=is_slot)


def launch_draft_topk(
    logits: Tensor,
    out: TopDrafts,
    *,
    noise: DraftNoise | None,
    d2t: Tensor | None,
    block_vocab: int = BLOCK_VOCAB,
) -> None:
    """One program per row and block of the vocabulary, then one per row."""
    (rows, vocab), k = logits.shape, out.tokens.shape[1]
    if rows == 0:
        return
    device, num_blocks = logits.device, cdiv(vocab, block_vocab)
    ranks = torch.empty(rows, num_blocks, k, dtype=torch.int64, device=device)
    highest = torch.empty(rows, num_blocks, dtype=torch.float32, device=device)
    sums = torch.empty_like(highest)
    block_k, block_ranks = next_power_of_2(k), next_power_of_2(num_blocks * k)
    launch(
        _draft_topk_blocks_kernel,
        (num_blocks, rows),
        logits,
        *(noise or (logits, logits, logits)),
        logits if d2t is None else d2t,
        ranks,
        highest,
        sums,
        logits.stride(0),
        vocab,
        K=k,
        BLOCK_K=block_k,
        BLOCK_VOCAB=block_vocab,
        NOISE=noise is not None,
        MAPPED=d2t is not None,
        num_warps=min(max(block_vocab // 512, 1), 8),
        **overlap_options(device, _draft_topk_blocks_kernel),
    )
    launch(
        _draft_topk_rows_kernel,
        (rows,),
        ranks,
        highest,
        sums,
        logits if d2t is None else d2t,
        *out,
        num_blocks,
        K=k,
        BLOCK_K=block_k,
        BLOCK=next_power_of_2(num_blocks),
        BLOCK_RANKS=block_ranks,
        MAPPED=d2t is not None,
        num_warps=min(max(block_ranks // 512, 1), 8),
        **overlap_options(device, _draft_topk_rows_kernel),
    )
