"""Triton kernels of greedy; see kernels/greedy.py for the definition."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.runtime import cdiv, next_power_of_2
from paceline.kernels.greedy import BLOCK_VOCAB


@triton.jit
def _greedy_blocks_kernel(
    logits_ptr,  # [rows, vocab]
    mask_ids_ptr,  # [rows] int32, -1: the row has no mask; read when MASKED
    best_ptr,  # [rows, blocks] float32
    token_ids_ptr,  # [rows, blocks] int32
    stride_logits_row,
    vocab,
    MASKED: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    let_next_start(OVERLAPPED)
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    tokens = block * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB)
    mask = tokens < vocab
    logits = tl.load(logits_ptr + row * stride_logits_row + tokens, mask=mask, other=float("-inf"))
    logits = logits.to(tl.float32)
    is_finite = tl.abs(logits) < float("inf")  # false for NaN
    if MASKED:
        is_finite |= (tl.load(mask_ids_ptr + row) >= 0) & (logits == float("-inf"))
    # A block that holds NaN or an infinity reports +inf, as no finite block can.
    logits = tl.where(is_finite | (tokens >= vocab), logits, float("inf"))
    best = tl.max(logits, axis=0)
    token = tl.min(tl.where(logits == best, tokens, 2147483647), axis=0)
    index = row * tl.num_programs(0) + block
    tl.store(best_ptr + index, best)
    tl.store(token_ids_ptr + index, token)


@triton.jit
def _greedy_rows_kernel(
    best_ptr,  # [rows, blocks] float32
    block_token_ids_ptr,  # [rows, blocks] int32
    token_ids_ptr,  # [rows] int64
    finite_ptr,  # [rows] uint8
    num_blocks,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    let_next_start(OVERLAPPED)
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, BLOCK)
    mask = blocks < num_blocks
    index = row * num_blocks + blocks
    best = tl.load(best_ptr + index, mask=mask, other=float("-inf"))
    tokens = tl.load(block_token_ids_ptr + index, mask=mask, other=2147483647)
    row_best = tl.max(best, axis=0)
    token = tl.min(tl.where(best == row_best, tokens, 2147483647), axis=0)
    finite = row_best < float("inf")
    tl.store(token_ids_ptr + row, tl.where(finite, token, 0).to(tl.int64))
    tl.store(finite_ptr + row, finite.to(tl.uint8))


def launch_greedy(
    logits: Tensor,
    token_ids: Tensor,
    finite: Tensor,
    *,
    mask_ids: Tensor | None = None,
    block_vocab: int = BLOCK_VOCAB,
) -> None:
    """One program per row and block of the vocabulary, then one per row."""
    rows, vocab = logits.shape
    if rows == 0:
        return
    num_blocks = cdiv(vocab, block_vocab)
    best = torch.empty(rows, num_blocks, dtype=torch.float32, device=logits.device)
    block_token_ids = torch.empty(rows, num_blocks, dtype=torch.int32, device=logits.device)
    launch(
        _greedy_blocks_kernel,
        (num_blocks, rows),
        logits,
        logits if mask_ids is None else mask_ids,
        best,
        block_token_ids,
        logits.stride(0),
        vocab,
        MASKED=mask_ids is not None,
        BLOCK_VOCAB=block_vocab,
        num_warps=min(max(block_vocab // 512, 1), 8),
        **overlap_options(logits.device, _greedy_blocks_kernel),
    )
    launch(
        _greedy_rows_kernel,
        (rows,),
        best,
        block_token_ids,
        token_ids,
        finite.view(torch.uint8),
        num_blocks,
        BLOCK=next_power_of_2(num_blocks),
        num_warps=1,
        **overlap_options(logits.device, _greedy_rows_kernel),
    )
