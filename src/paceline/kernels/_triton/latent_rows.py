"""Triton kernel of latent_rows; see kernels/latent_rows.py for the definition.

A program takes what turns of some heads' queries of one token, or the token's row.
"""

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.runtime import cdiv, next_power_of_2
from paceline.kernels._triton.scaled_latents import quantised

_BLOCK_HEADS = 16  # of one program


@triton.jit
def _turned(
    turning_ptrs,  # [heads, 1] pointers to what turns, 2 * HALF numbers
    live,  # [heads, 1] bool
    half,  # [BLOCK_HALF]
    cos,  # [1, BLOCK_HALF] float32
    sin,  # [1, BLOCK_HALF] float32
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Both halves, [heads, BLOCK_HALF] each."""
    mask = live & (half < HALF)[None, :]
    if PAIRS:
        first_ptrs = turning_ptrs + (2 * half)[None, :]
        second_ptrs = first_ptrs + 1
    else:
        first_ptrs = turning_ptrs + half[None, :]
        second_ptrs = first_ptrs + HALF
    first = tl.load(first_ptrs, mask=mask, other=0.0)
    second = tl.load(second_ptrs, mask=mask, other=0.0)
    a = first.to(tl.float32)
    b = second.to(tl.float32)
    return (a * cos - b * sin).to(first.dtype), (b * cos + a * sin).to(first.dtype)


@triton.jit(do_not_specialize=["positions_ptr", "loc_ptr"])  # of a step's tokens from any one on
def _latent_rows_kernel(
    turning_ptr,  # [tokens, heads, 2 * HALF]
    row_ptr,  # [tokens, RANK + 2 * HALF]
    queries_ptr,  # [tokens, heads, START + 2 * HALF]
    weight_ptr,  # [RANK]
    cos_sin_ptr,  # [max_position, 2 * HALF] float32
    positions_ptr,  # [tokens] int64
    cache_ptr,  # [num_pages, PAGE_SIZE, 1, RANK + 2 * HALF]; with scales [..., RANK] float8
    loc_ptr,  # [tokens] int64
    turned_ptr,  # [num_pages, PAGE_SIZE, 1, 2 * HALF] or None
    row_scales_ptr,  # [num_pages, PAGE_SIZE, 1, 1] float32 or None
    rows_ptr,  # [tokens, 1, RANK + 2 * HALF]
    stride_turning_token,
    stride_turning_head,
    stride_row_token,
    stride_queries_token,
    stride_queries_head,
    stride_table_position,
    stride_cache_page,
    stride_cache_slot,
    stride_turned_page,
    stride_turned_slot,
    stride_row_scales_page,
    stride_row_scales_slot,
    stride_rows_token,
    heads,
    eps,
    PAGE_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    START: tl.constexpr,  # columns of a query before those that turn
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    cols = tl.arange(0, BLOCK_RANK)
    weight = tl.load(weight_ptr + cols, mask=cols < RANK, other=0.0).to(tl.float32)
    let_next_start(OVERLAPPED)
    wait_for_inputs(OVERLAPPED)
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    half = tl.arange(0, BLOCK_HALF)
    table_ptr = cos_sin_ptr + tl.load(positions_ptr + token) * stride_table_position
    cos = tl.load(table_ptr + half, mask=half < HALF, other=0.0)[None, :]
    sin = tl.load(table_ptr + HALF + half, mask=half < HALF, other=0.0)[None, :]
    if block > 0:
        head = ((block - 1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
        live = head < heads
        turning_ptrs = turning_ptr + token * stride_turning_token + head * stride_turning_head
        first, second = _turned(turning_ptrs, live, half, cos, sin, HALF, PAIRS)
        query_ptrs = queries_ptr + token * stride_queries_token + head * stride_queries_head
        target_ptrs = query_ptrs + (START + half)[None, :]
        mask = live & (half < HALF)[None, :]
        tl.store(target_ptrs, first, mask=mask)
        tl.store(target_ptrs + HALF, second, mask=mask)
    else:
        slot = tl.load(loc_ptr + token)
        page, slot = slot // PAGE_SIZE, slot % PAGE_SIZE
        slot_ptr = cache_ptr + page * stride_cache_page + slot * stride_cache_slot
        made_ptr = rows_ptr + token * stride_rows_token
        token_ptr = row_ptr + token * stride_row_token
        x = tl.load(token_ptr + cols, mask=cols < RANK, other=0.0)
        wide = x.to(tl.float32)
        inverse = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / RANK + eps)
        latent = ((wide * inverse).to(x.dtype).to(tl.float32) * weight).to(x.dtype)
        tl.store(made_ptr + cols, latent, mask=cols < RANK)
        turned_slot_ptr = slot_ptr + RANK
        if row_scales_ptr is None:
            tl.store(slot_ptr + cols, latent, mask=cols < RANK)
        else:
            codes, scale = quantised(latent)
            tl.store(slot_ptr + cols, codes, mask=cols < RANK)
            scale_ptr = row_scales_ptr + page * stride_row_scales_page
            tl.store(scale_ptr + slot * stride_row_scales_slot, scale)
            turned_slot_ptr = turned_ptr + page * stride_turned_page + slot * stride_turned_slot
        one = tl.zeros([1, 1], tl.int32)
        own_first, own_second = _turned(
            token_ptr + RANK + one, one == 0, half, cos, sin, HALF, PAIRS
        )
        place = (RANK + half)[None, :]
        is_half = (half < HALF)[None, :]
        tl.store(made_ptr + place, own_first, mask=is_half)
        tl.store(made_ptr + place + HALF, own_second, mask=is_half)
        tl.store(turned_slot_ptr + half[None, :], own_first, mask=is_half)
        tl.store(turned_slot_ptr + (HALF + half)[None, :], own_second, mask=is_half)


def launch_latent_rows(
    turning: Tensor,
    row: Tensor,
    queries: Tensor,
    weight: Tensor,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    pairs: bool,
    cache: Tensor,
    loc: Tensor,
    turned: Tensor | None,
    row_scales: Tensor | None,
    rows: Tensor,
    *,
    block_heads: int = _BLOCK_HEADS,
) -> None:
    """One program per token for its row, and one for each block of its heads; arguments as checked
    by kernels/latent_rows.py."""
    tokens, heads, rope_dim = turning.shape
    if tokens == 0:
        return
    rank = weight.shape[0]
    launch(
        _latent_rows_kernel,
        (tokens, 1 + cdiv(heads, block_heads)),
        turning,
        row,
        queries,
        weight,
        cos_sin,
        positions,
        cache,
        loc,
        turned,
        row_scales,
        rows,
        *turning.stride()[:2],
        row.stride(0),
        *queries.stride()[:2],
        cos_sin.stride(0),
        *cache.stride()[:2],
        *((0, 0) if turned is None else turned.stride()[:2]),
        *((0, 0) if row_scales is None else row_scales.stride()[:2]),
        rows.stride(0),
        heads,
        eps,
        PAGE_SIZE=cache.shape[1],
        RANK=rank,
        START=queries.shape[2] - rope_dim,
        HALF=rope_dim // 2,
        PAIRS=pairs,
        BLOCK_HEADS=block_heads,
        BLOCK_RANK=next_power_of_2(rank),
        BLOCK_HALF=next_power_of_2(rope_dim // 2),
        num_warps=4,
        **overlap_options(turning.device, _latent_rows_kernel),
    )
