"""Triton kernels of draw, first part: what is known of the blocks of every row.

    copy_edited   rows with edits: a float32 copy, edited by _triton/edit_logits.py
    best          all rows: the best and the lowest logit of each block, and whether all are finite

A row is cut into blocks, one program each, so that a single row fills the chip; a program whose row
does not ask for what its kernel does leaves at once.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.core.sampling_params import Asks
from paceline.kernels._triton.edit_logits import EDITS, PENALISE, launch_edit_logits
from paceline.kernels._triton.launch import (
    launch,
    let_next_start,
    overlap_options,
    wait_for_inputs,
)
from paceline.kernels.draw import Laws
from paceline.kernels.edit_logits import Edits, SampledRows

FILTER = tl.constexpr(int(Asks.FILTER))
NO_TOKEN = tl.constexpr(2147483647)
TOKENS_OF_BLOCK = 2048
_BLOCKS_COPIED = 4  # by a program: most leave at once


@triton.jit
def logits_of(
    logits_ptr,  # [num_rows, vocab]
    edited_ptr,  # [num_rows, vocab] float32
    n,
    asks,
    stride_logits_row,
    vocab,
    tokens,
):
    """float32 logits of a row, edited where it asks for that; -inf behind the vocabulary."""
    mask = tokens < vocab
    if asks & EDITS != 0:
        logits = tl.load(edited_ptr + n * vocab + tokens, mask=mask, other=float("-inf"))
    else:
        raw = tl.load(logits_ptr + n * stride_logits_row + tokens, mask=mask, other=float("-inf"))
        logits = raw.to(tl.float32)
    return logits


@triton.jit
def inverse_of(
    temperature,  # float32, 0 or above
):
    """1 / temperature, finite."""
    return tl.minimum(tl.div_rn(1.0, temperature), 3.4028234663852886e38)


@triton.jit
def over_blocks(
    ptr,  # [num_rows, blocks] float32
    n,
    num_blocks,
    other,
    BLOCK: tl.constexpr,
):
    """[BLOCK] of one row."""
    blocks = tl.arange(0, BLOCK)
    return tl.load(ptr + n * num_blocks + blocks, mask=blocks < num_blocks, other=other)


@triton.jit
def _copy_edited_kernel(
    logits_ptr,  # [num_rows, vocab]
    rows_ptr,  # [num_rows] int64
    asks_ptr,  # [table rows] int64
    edited_ptr,  # [num_rows, vocab] float32
    counts_ptr,  # [num_rows, vocab] int32
    stride_logits_row,
    stride_ints,
    vocab,
    BLOCK_VOCAB: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    let_next_start(OVERLAPPED)
    n = tl.program_id(1).to(tl.int64)
    asks = tl.load(asks_ptr + tl.load(rows_ptr + n) * stride_ints)
    if asks & EDITS != 0:
        tokens = tl.program_id(0) * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB)
        mask = tokens < vocab
        logits = tl.load(logits_ptr + n * stride_logits_row + tokens, mask=mask, other=0.0)
        tl.store(edited_ptr + n * vocab + tokens, logits.to(tl.float32), mask=mask)
        if asks & PENALISE != 0:
            zeros = tl.zeros((BLOCK_VOCAB,), tl.int32)
            tl.store(counts_ptr + n * vocab + tokens, zeros, mask=mask)


@triton.jit
def _best_kernel(
    logits_ptr,  # [num_rows, vocab]
    edited_ptr,  # [num_rows, vocab] float32
    rows_ptr,  # [num_rows] int64
    asks_ptr,  # [table rows] int64
    best_ptr,  # [num_rows, blocks] float32; inf: the block holds NaN or an infinity
    tokens_ptr,  # [num_rows, blocks] int32
    lowest_ptr,  # [num_rows, blocks] float32, -inf apart
    counts_ptr,  # [2, num_rows] int32, become 0
    stride_logits_row,
    stride_ints,
    vocab,
    num_blocks,
    BLOCK_VOCAB: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    let_next_start(OVERLAPPED)
    block = tl.program_id(0)
    n = tl.program_id(1).to(tl.int64)
    tokens = block * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB)
    mask = tokens < vocab
    raw = tl.load(logits_ptr + n * stride_logits_row + tokens, mask=mask, other=float("-inf"))
    logits = raw.to(tl.float32)
    is_finite = (tl.abs(logits) < float("inf")) | (tokens >= vocab)  # false for NaN
    asks = tl.load(asks_ptr + tl.load(rows_ptr + n) * stride_ints)
    if asks & EDITS != 0:
        logits = tl.load(edited_ptr + n * vocab + tokens, mask=mask, other=float("-inf"))
    logits = tl.where(is_finite, logits, float("inf"))
    best = tl.max(logits, axis=0)
    at = n * num_blocks + block
    tl.store(best_ptr + at, best)
    tl.store(tokens_ptr + at, tl.min(tl.where(logits == best, tokens, NO_TOKEN), axis=0))
    if asks & FILTER != 0:
        known = tl.where(logits > float("-inf"), logits, float("inf"))
        tl.store(lowest_ptr + at, tl.min(known, axis=0))
        if block == 0:
            tl.store(counts_ptr + n, 0)
            tl.store(counts_ptr + tl.num_programs(1) + n, 0)


class RowBlocks(NamedTuple):
    """What is known of every row's blocks before anything is drawn."""

    edited: Tensor  # [num_rows, vocab]  float32  of rows with edits
    best: Tensor  # [num_rows, blocks]  float32  inf: the block is not finite
    tokens: Tensor  # [num_rows, blocks]  int32  of the best
    lowest: Tensor  # [num_rows, blocks]  float32  of rows that filter
    counts: Tensor  # [2, num_rows]  int32  of rows that filter: 0


def launch_best(
    logits: Tensor, at: SampledRows, edits: Edits, *, block_vocab: int = TOKENS_OF_BLOCK
) -> RowBlocks:
    """Edit the rows that ask, and find the best of every block."""
    (num_rows, vocab), device = logits.shape, logits.device
    num_blocks = triton.cdiv(vocab, block_vocab)
    edited = torch.empty(num_rows, vocab, dtype=torch.float32, device=device)
    said = torch.empty(num_rows, vocab, dtype=torch.int32, device=device)
    best, lowest = torch.empty(2, num_rows, num_blocks, device=device).unbind(0)
    tokens = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=device)
    counts = torch.empty(2, num_rows, dtype=torch.int32, device=device)
    strides = (logits.stride(0), edits.asks.stride(0), vocab)
    copied = _BLOCKS_COPIED * block_vocab
    launch(
        _copy_edited_kernel,
        (triton.cdiv(vocab, copied), num_rows),
        logits,
        at.rows,
        edits.asks,
        edited,
        said,
        *strides,
        **block_tile(copied),
        **overlap_options(device, _copy_edited_kernel),
    )
    launch_edit_logits(edited, said, at, edits)
    launch(
        _best_kernel,
        (num_blocks, num_rows),
        logits,
        edited,
        at.rows,
        edits.asks,
        best,
        tokens,
        lowest,
        counts,
        *strides,
        num_blocks,
        **block_tile(block_vocab),
        **overlap_options(device, _best_kernel),
    )
    return RowBlocks(edited, best, tokens, lowest, counts)


def row_sizes(logits: Tensor, laws: Laws, edits: Edits, num_blocks: int) -> dict[str, int]:
    return {
        "stride_logits_row": logits.stride(0),
        "stride_ints": edits.asks.stride(0),
        "stride_floats": laws.temperature.stride(0),
        "vocab": logits.shape[1],
        "num_blocks": num_blocks,
        "BLOCK": triton.next_power_of_2(num_blocks),
    }


def block_tile(block_vocab: int) -> dict[str, int]:
    return {"BLOCK_VOCAB": block_vocab, "num_warps": min(max(block_vocab // 512, 1), 8)}
