"""Triton kernels of draw, first part: what is known of the blocks of every row.

    copy_edited   rows with edits: a float32 copy, edited by _triton/edit_logits.py
    best          all rows: the best of each block, and whether all are finite; rows that filter:
                  the edges of the buckets in which draw_cuts looks for the cut

A row is cut into blocks, one program each, so that a single row fills the chip; a program whose row
does not ask for what its kernel does leaves at once.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.core.request.sampling_params import Asks
from paceline.kernels._triton.edit_logits import EDITS, PENALISE, launch_edit_logits
from paceline.kernels._triton.launch import (
    launch,
    let_next_start,
    overlap_options,
    wait_for_inputs,
)
from paceline.kernels._triton.runtime import cdiv, next_power_of_2
from paceline.kernels._triton.split_merge import finishes_last
from paceline.kernels.draw import BUCKETS, TOKENS_OF_BLOCK, Laws
from paceline.kernels.edit_logits import Edits, SampledRows

FILTER = tl.constexpr(int(Asks.FILTER))
NO_TOKEN = tl.constexpr(2147483647)
WIDEST = tl.constexpr(32.0)  # of -scaled: tokens further below the best have no mass
_DEEPEST = tl.constexpr(64.0)  # of -scaled, in moments
_NARROWEST = tl.constexpr(1e-30)  # of -scaled
_OUTER = tl.constexpr(4)  # buckets above the guess of top-p's cut, and below
_REACH = tl.constexpr(0.25)  # of the others to each side of it, in standard deviations
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
def _over_blocks_now(
    ptr,  # [num_rows, blocks] float32, written by other programs of the same kernel
    n,
    num_blocks,
    other,
    BLOCK: tl.constexpr,
):
    """[BLOCK] of one row."""
    blocks = tl.arange(0, BLOCK)
    mask = blocks < num_blocks
    return tl.load(ptr + n * num_blocks + blocks, mask=mask, other=other, cache_modifier=".cg")


@triton.jit
def row_edges(
    best_ptr,  # [num_rows, blocks] float32
    lowest_ptr,  # [num_rows, blocks] float32
    moments_ptr,  # [3, num_rows, blocks] float32
    n,
    inverse,  # float32, 1 / temperature
    top_k,  # int64
    top_p,  # float32
    vocab,
    num_rows,
    num_blocks,
    BUCKETS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(best, near, far, and buckets per unit of -scaled up to near, up to far and below), float32.

    With top-k all buckets are of equal width, from the row's best logit to its lowest, between near
    and far.  With top-p those between are narrow, about where the cut would be if -scaled were
    normal with the mean and the deviation that it has; a wrong guess costs time.
    """
    bests = _over_blocks_now(best_ptr, n, num_blocks, float("-inf"), BLOCK)
    best = tl.max(bests, axis=0)
    low = tl.min(_over_blocks_now(lowest_ptr, n, num_blocks, float("inf"), BLOCK), axis=0)
    width = tl.minimum((best - low) * inverse, WIDEST)
    near, far, first, last = 0.0, 2.0 * WIDEST, 0.0, 0.0
    middle = _per_unit(BUCKETS, width)
    if top_k >= vocab:
        # Even a whole vocabulary further down has less than 1 - top_p of the best's mass.
        width = tl.minimum(width, tl.log(vocab.to(tl.float32) / (1.0 - top_p)) + 0.1)
        shift = tl.minimum((best - bests) * inverse, _DEEPEST)
        weight = tl.exp(-shift)
        sums = _over_blocks_now(moments_ptr, n, num_blocks, 0.0, BLOCK)
        firsts = _over_blocks_now(moments_ptr + num_rows * num_blocks, n, num_blocks, 0.0, BLOCK)
        squares = _over_blocks_now(
            moments_ptr + 2 * num_rows * num_blocks, n, num_blocks, 0.0, BLOCK
        )
        mass = tl.sum(weight * sums, axis=0)
        mean = tl.sum(weight * (shift * sums + firsts), axis=0) / mass
        square = tl.sum(weight * (shift * (shift * sums + 2.0 * firsts) + squares), axis=0) / mass
        spread = tl.sqrt(tl.maximum(square - mean * mean, 0.0))
        # The quantile of a normal law, by Tukey's lambda.
        rest = tl.exp(0.135 * tl.log(1.0 - top_p))
        quantile = (tl.exp(0.135 * tl.log(top_p)) - rest) / 0.1975
        guess = tl.minimum(tl.maximum(mean + quantile * spread, 0.0), width)
        near = tl.maximum(guess - _REACH * spread, 0.0)
        far = tl.maximum(guess + _REACH * spread, _NARROWEST)
        first, middle = _per_unit(_OUTER, near), _per_unit(BUCKETS - 2 * _OUTER, far - near)
        last = _per_unit(_OUTER, width - far)
    return best, near, far, first, middle, last


@triton.jit
def _per_unit(
    buckets,
    width,  # float32; of nothing: all are in the first of the buckets
):
    return tl.where(width > _NARROWEST, buckets / tl.maximum(width, _NARROWEST), 0.0)


@triton.jit
def _copy_edited_kernel(
    logits_ptr,  # [num_rows, vocab]
    rows_ptr,  # [num_rows] int64
    asks_ptr,  # [table rows] int64
    edited_ptr,  # [num_rows, vocab] float32
    said_ptr,  # [num_rows, vocab] int32
    counts_ptr,  # [3, num_rows] int32, become 0
    stride_logits_row,
    stride_ints,
    vocab,
    BLOCK_VOCAB: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    let_next_start(OVERLAPPED)
    n = tl.program_id(1).to(tl.int64)
    if tl.program_id(0) == 0:
        for count in tl.static_range(3):
            tl.store(counts_ptr + count * tl.num_programs(1) + n, 0)
    asks = tl.load(asks_ptr + tl.load(rows_ptr + n) * stride_ints)
    if asks & EDITS != 0:
        tokens = tl.program_id(0) * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB)
        mask = tokens < vocab
        logits = tl.load(logits_ptr + n * stride_logits_row + tokens, mask=mask, other=0.0)
        tl.store(edited_ptr + n * vocab + tokens, logits.to(tl.float32), mask=mask)
        if asks & PENALISE != 0:
            zeros = tl.zeros((BLOCK_VOCAB,), tl.int32)
            tl.store(said_ptr + n * vocab + tokens, zeros, mask=mask)


@triton.jit
def _best_kernel(
    logits_ptr,  # [num_rows, vocab]
    edited_ptr,  # [num_rows, vocab] float32
    rows_ptr,  # [num_rows] int64
    asks_ptr,  # [table rows] int64
    mask_ids_ptr,  # [num_rows] int32, -1: the row has no mask; read when MASKED
    best_ptr,  # [num_rows, blocks] float32; inf: the block holds NaN or an infinity
    tokens_ptr,  # [num_rows, blocks] int32
    temperature_ptr,  # [table rows] float32
    top_k_ptr,  # [table rows] int64
    top_p_ptr,  # [table rows] float32
    lowest_ptr,  # [num_rows, blocks] float32, -inf apart
    moments_ptr,  # [3, num_rows, blocks] float32
    arrived_ptr,  # [num_rows] int32, 0 before and after
    row_best_ptr,  # [num_rows] float32, of rows that filter
    edges_ptr,  # [num_rows, 5] float32, of rows that filter
    stride_logits_row,
    stride_ints,
    stride_floats,
    vocab,
    num_blocks,
    MASKED: tl.constexpr,
    BUCKETS: tl.constexpr,
    BLOCK: tl.constexpr,
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
    if MASKED:
        is_finite |= (tl.load(mask_ids_ptr + n) >= 0) & (logits == float("-inf"))
    row = tl.load(rows_ptr + n)
    asks = tl.load(asks_ptr + row * stride_ints)
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
        inverse = inverse_of(tl.load(temperature_ptr + row * stride_floats))
        depth = tl.minimum((best - logits) * inverse, _DEEPEST)
        odds = tl.where(best > float("-inf"), tl.exp(-depth), 0.0)
        depth = tl.where(odds > 0.0, depth, 0.0)
        moment_ptr = moments_ptr + at
        for _power in tl.static_range(3):
            tl.store(moment_ptr, tl.sum(odds, axis=0))
            moment_ptr += tl.num_programs(1) * num_blocks
            odds *= depth
        if finishes_last(arrived_ptr + n, num_blocks):
            top_k = tl.load(top_k_ptr + row * stride_ints)
            top_p = tl.load(top_p_ptr + row * stride_floats)
            row_best, near, far, first, middle, last = row_edges(
                best_ptr, lowest_ptr, moments_ptr, n, inverse, top_k, top_p, vocab,
                tl.num_programs(1), num_blocks, BUCKETS, BLOCK,
            )  # fmt: skip
            tl.store(row_best_ptr + n, row_best)
            edge_ptr = edges_ptr + n * 5
            tl.store(edge_ptr, near)
            tl.store(edge_ptr + 1, far)
            tl.store(edge_ptr + 2, first)
            tl.store(edge_ptr + 3, middle)
            tl.store(edge_ptr + 4, last)


class RowBlocks(NamedTuple):
    """What is known of every row's blocks before anything is drawn."""

    edited: Tensor  # [num_rows, vocab]  float32  of rows with edits
    best: Tensor  # [num_rows, blocks]  float32  inf: the block is not finite
    tokens: Tensor  # [num_rows, blocks]  int32  of the best
    row_best: Tensor  # [num_rows]  float32  of rows that filter
    edges: Tensor  # [num_rows, 5]  float32  of rows that filter: of buckets, see row_edges
    counts: Tensor  # [3, num_rows]  int32  0


def launch_best(
    logits: Tensor,
    at: SampledRows,
    laws: Laws,
    edits: Edits,
    *,
    mask_ids: Tensor | None = None,
    block_vocab: int = TOKENS_OF_BLOCK,
) -> RowBlocks:
    """Edit the rows that ask, and find the best of every block."""
    (num_rows, vocab), device = logits.shape, logits.device
    num_blocks = cdiv(vocab, block_vocab)
    edited = torch.empty(num_rows, vocab, dtype=torch.float32, device=device)
    said = torch.empty(num_rows, vocab, dtype=torch.int32, device=device)
    best, lowest = torch.empty(2, num_rows, num_blocks, device=device).unbind(0)
    tokens = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=device)
    moments = torch.empty(3, num_rows, num_blocks, device=device)
    row_best, edges = torch.empty(num_rows, device=device), torch.empty(num_rows, 5, device=device)
    counts = torch.empty(3, num_rows, dtype=torch.int32, device=device)
    copied = _BLOCKS_COPIED * block_vocab
    launch(
        _copy_edited_kernel,
        (cdiv(vocab, copied), num_rows),
        logits,
        at.rows,
        edits.asks,
        edited,
        said,
        counts,
        logits.stride(0),
        edits.asks.stride(0),
        vocab,
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
        at.rows if mask_ids is None else mask_ids,
        best,
        tokens,
        laws.temperature,
        laws.top_k,
        laws.top_p,
        lowest,
        moments,
        counts[0],
        row_best,
        edges,
        logits.stride(0),
        edits.asks.stride(0),
        laws.temperature.stride(0),
        vocab,
        num_blocks,
        MASKED=mask_ids is not None,
        BUCKETS=BUCKETS,
        BLOCK=next_power_of_2(num_blocks),
        **block_tile(block_vocab),
        **overlap_options(device, _best_kernel),
    )
    return RowBlocks(edited, best, tokens, row_best, edges, counts)


def row_sizes(logits: Tensor, laws: Laws, edits: Edits, num_blocks: int) -> dict[str, int]:
    return {
        "stride_logits_row": logits.stride(0),
        "stride_ints": edits.asks.stride(0),
        "stride_floats": laws.temperature.stride(0),
        "vocab": logits.shape[1],
        "num_blocks": num_blocks,
        "BLOCK": next_power_of_2(num_blocks),
    }


def block_tile(block_vocab: int) -> dict[str, int]:
    return {"BLOCK_VOCAB": block_vocab, "num_warps": min(max(block_vocab // 512, 1), 8)}
