"""Triton kernel of rope_write_kv; see kernels/rope_write_kv.py for the definition.

A program takes some heads of a token, or of each of several: of q, of k or of v.  A row of a head
is read as three ranges of columns, the two halves that rotate against each other and the rest:

    [START, + HALF) first    [START + HALF, + HALF) second    the rest behind them, or before
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.runtime import cdiv, next_power_of_2

_BLOCK_HEADS = 8  # heads of one program
_MANY, _BLOCK_TOKENS = 2048, 2  # tokens from which on a program takes several; so many


@triton.jit
def _square_sum(x):
    """[heads] sums over the columns of x [heads, cols]."""
    wide = x.to(tl.float32)
    return tl.sum(wide * wide, axis=1)


@triton.jit
def _normed(
    x,  # [heads, cols]
    inverse_rms,  # [heads] float32
    weight_ptr,  # [cols]
    cols,
    col_mask,
    UNIT_OFFSET: tl.constexpr,
):
    """x / rms * weight in x's dtype, rounded as kernels/rms_norm.py says."""
    weight = tl.load(weight_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    row = x.to(tl.float32) * inverse_rms[:, None]
    if UNIT_OFFSET:
        return (row * (1.0 + weight)).to(x.dtype)
    else:
        return (row.to(x.dtype).to(tl.float32) * weight).to(x.dtype)


@triton.jit
def _store_cache(
    ptrs,  # [heads, cols]
    x,  # [heads, cols]
    mask,
    scale_ptr,  # [1] float32, or None
):
    if scale_ptr is None:
        tl.store(ptrs, x, mask=mask)
    else:
        scaled = tl.div_rn(x.to(tl.float32), tl.load(scale_ptr))
        # Compared, not clamped: NaN stays NaN.
        scaled = tl.where(scaled > 448.0, 448.0, tl.where(scaled < -448.0, -448.0, scaled))
        tl.store(ptrs, scaled.to(tl.float8e4nv), mask=mask)


@triton.jit
def _axis_of(
    cols,  # [cols]
    AXIS_COLUMNS: tl.constexpr,  # start, stop and step of each axis
):
    """[cols] int32: which axis each pair turns by, the last that has it."""
    axis = tl.zeros_like(cols)
    for a in tl.static_range(1, len(AXIS_COLUMNS) // 3):
        offsets = cols - AXIS_COLUMNS[3 * a]
        is_within = (offsets >= 0) & (cols < AXIS_COLUMNS[3 * a + 1])
        axis = tl.where(is_within & (offsets % AXIS_COLUMNS[3 * a + 2] == 0), a, axis)
    return axis


@triton.jit
def _heads(
    row_ptr,  # [heads, DIM] one token, written in place where something changes
    stride_head,
    heads,
    first_head,
    cos_sin_ptr,  # [max_position, 2 * HALF] float32, or None where HALF is 0
    positions_ptr,  # [tokens, axes] int64, or None
    token,
    position,  # of the token, where there is one axis
    norm_ptr,  # [DIM], or None
    eps,
    target_ptr,  # [heads, DIM] one slot, or None
    stride_target_head,
    scale_ptr,  # [1] float32, or None
    DIM: tl.constexpr,
    START: tl.constexpr,  # 0, or DIM - 2 * HALF
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    AXIS_COLUMNS: tl.constexpr,
):
    head = first_head + tl.arange(0, BLOCK_HEADS)
    live = (head < heads)[:, None]
    offsets = head[:, None] * stride_head
    target_offsets = head[:, None] * stride_target_head
    REST: tl.constexpr = DIM - 2 * HALF
    REST_START: tl.constexpr = 0 if START > 0 else 2 * HALF
    if HALF > 0:
        cols = tl.arange(0, BLOCK_HALF)
        is_half = cols < HALF
        half_mask = live & is_half[None, :]
        half_ptrs = row_ptr + offsets + (START + cols)[None, :]
        first = tl.load(half_ptrs, mask=half_mask, other=0.0)
        second = tl.load(half_ptrs + HALF, mask=half_mask, other=0.0)
        if len(AXIS_COLUMNS) > 0:
            axis = _axis_of(cols, AXIS_COLUMNS)
            ends = tl.load(positions_ptr + token * (len(AXIS_COLUMNS) // 3) + axis)
            table_ptr = cos_sin_ptr + ends * (2 * HALF)
        else:
            table_ptr = cos_sin_ptr + position * (2 * HALF)
        cos = tl.load(table_ptr + cols, mask=is_half, other=0.0)[None, :]
        sin = tl.load(table_ptr + HALF + cols, mask=is_half, other=0.0)[None, :]
    if REST > 0:
        rest_cols = tl.arange(0, BLOCK_REST)
        is_rest = rest_cols < REST
        rest_mask = live & is_rest[None, :]
        rest_ptrs = row_ptr + offsets + (REST_START + rest_cols)[None, :]
        rest = tl.load(rest_ptrs, mask=rest_mask, other=0.0)
    if norm_ptr is not None:
        total = tl.zeros([BLOCK_HEADS], dtype=tl.float32)
        if HALF > 0:
            total += _square_sum(first) + _square_sum(second)
        if REST > 0:
            total += _square_sum(rest)
        inverse = 1.0 / tl.sqrt(total / DIM + eps)
        if HALF > 0:
            first = _normed(first, inverse, norm_ptr + START, cols, is_half, UNIT_OFFSET)
            second = _normed(second, inverse, norm_ptr + START + HALF, cols, is_half, UNIT_OFFSET)
        if REST > 0:
            rest = _normed(rest, inverse, norm_ptr + REST_START, rest_cols, is_rest, UNIT_OFFSET)
            tl.store(rest_ptrs, rest, mask=rest_mask)
    if HALF > 0:
        a = first.to(tl.float32)
        b = second.to(tl.float32)
        first = (a * cos - b * sin).to(first.dtype)
        second = (b * cos + a * sin).to(second.dtype)
        tl.store(half_ptrs, first, mask=half_mask)
        tl.store(half_ptrs + HALF, second, mask=half_mask)
        if target_ptr is not None:
            target_ptrs = target_ptr + target_offsets + (START + cols)[None, :]
            _store_cache(target_ptrs, first, half_mask, scale_ptr)
            _store_cache(target_ptrs + HALF, second, half_mask, scale_ptr)
    if REST > 0 and target_ptr is not None:
        target_ptrs = target_ptr + target_offsets + (REST_START + rest_cols)[None, :]
        _store_cache(target_ptrs, rest, rest_mask, scale_ptr)


@triton.jit
def _rope_write_kv_kernel(
    q_ptr,  # [tokens, heads, DIM]
    k_ptr,  # [tokens, kv_heads, DIM]
    v_ptr,  # [tokens, kv_heads, DIM_V], or None with v_cache_ptr
    cos_sin_ptr,  # [max_position, 2 * HALF] float32, or None
    positions_ptr,  # [tokens, axes] int64, or None
    q_norm_ptr,  # [DIM], or None
    k_norm_ptr,  # [DIM], or None
    k_cache_ptr,  # [num_pages, PAGE_SIZE, kv_heads, DIM], or None: nothing is written
    v_cache_ptr,  # [num_pages, PAGE_SIZE, kv_heads, DIM_V], or None: V is in K
    loc_ptr,  # [tokens] int64, or None with k_cache_ptr
    k_scale_ptr,  # [1] float32, or None
    v_scale_ptr,  # [1] float32, or None
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_k_page,
    stride_k_slot,
    stride_k_cache_head,
    stride_v_page,
    stride_v_slot,
    stride_v_cache_head,
    heads,
    kv_heads,
    eps,
    PAGE_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    START: tl.constexpr,
    HALF: tl.constexpr,
    Q_BLOCKS: tl.constexpr,  # 0 where q is left as it is
    KV_BLOCKS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_DIM_V: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    AXIS_COLUMNS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    # Positions are the step's: what stands before all layers wrote them.
    first_token = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS
    turned_by = ()
    for each in tl.static_range(BLOCK_TOKENS):
        position = first_token
        if positions_ptr is not None and len(AXIS_COLUMNS) == 0:
            position = tl.load(positions_ptr + first_token + each)
        turned_by += (position,)
    wait_for_inputs(OVERLAPPED)
    let_next_start(OVERLAPPED)
    block = tl.program_id(1)
    for each in tl.static_range(BLOCK_TOKENS):
        token = first_token + each
        if block < Q_BLOCKS:
            _heads(
                q_ptr + token * stride_q_token,
                stride_q_head,
                heads,
                block * BLOCK_HEADS,
                cos_sin_ptr,
                positions_ptr,
                token,
                turned_by[each],
                q_norm_ptr,
                eps,
                None,
                0,
                None,
                DIM,
                START,
                HALF,
                BLOCK_HEADS,
                BLOCK_HALF,
                BLOCK_REST,
                UNIT_OFFSET,
                AXIS_COLUMNS,
            )
        else:
            if k_cache_ptr is not None:
                slot = tl.load(loc_ptr + token)
                page = slot // PAGE_SIZE
                place = slot % PAGE_SIZE
            if block < Q_BLOCKS + KV_BLOCKS:
                _heads(
                    k_ptr + token * stride_k_token,
                    stride_k_head,
                    kv_heads,
                    (block - Q_BLOCKS) * BLOCK_HEADS,
                    cos_sin_ptr,
                    positions_ptr,
                    token,
                    turned_by[each],
                    k_norm_ptr,
                    eps,
                    None
                    if k_cache_ptr is None
                    else k_cache_ptr + page * stride_k_page + place * stride_k_slot,
                    stride_k_cache_head,
                    k_scale_ptr,
                    DIM,
                    START,
                    HALF,
                    BLOCK_HEADS,
                    BLOCK_HALF,
                    BLOCK_REST,
                    UNIT_OFFSET,
                    AXIS_COLUMNS,
                )
            elif v_ptr is not None:
                _heads(
                    v_ptr + token * stride_v_token,
                    stride_v_head,
                    kv_heads,
                    (block - Q_BLOCKS - KV_BLOCKS) * BLOCK_HEADS,
                    None,
                    None,
                    token,
                    turned_by[each],
                    None,
                    eps,
                    v_cache_ptr + page * stride_v_page + place * stride_v_slot,
                    stride_v_cache_head,
                    v_scale_ptr,
                    DIM_V,
                    0,
                    0,
                    BLOCK_HEADS,
                    BLOCK_HALF,
                    BLOCK_DIM_V,
                    UNIT_OFFSET,
                    (),
                )


def launch_rope_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    cos_sin: Tensor | None,
    positions: Tensor | None,
    rope_start: int,
    axis_columns: Sequence[int],
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    unit_offset: bool,
    k_cache: Tensor | None,
    v_cache: Tensor | None,
    loc: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    *,
    block_tokens: int | None = None,  # divides the tokens; None: chosen by their number
    block_heads: int = _BLOCK_HEADS,
    num_warps: int | None = None,  # None: chosen by the size of a program
) -> None:
    """One program per block of tokens and of heads: q's blocks, k's, v's if it is given."""
    tokens, heads, dim = q.shape
    if tokens == 0:
        return
    half = 0 if cos_sin is None else cos_sin.shape[1] // 2
    kv_heads = k.shape[1]
    own_v = k if v is None else v  # whose sizes nobody reads where there is none
    page_size, k_strides = (1, (0, 0, 0)) if k_cache is None else _pages(k_cache)
    v_strides = k_strides if v_cache is None else v_cache.stride()[:3]
    q_blocks = cdiv(heads, block_heads) if half or q_norm is not None else 0
    kv_blocks = cdiv(kv_heads, block_heads)
    if block_tokens is None:
        block_tokens = _BLOCK_TOKENS if tokens >= _MANY and tokens % _BLOCK_TOKENS == 0 else 1
    launch(
        _rope_write_kv_kernel,
        (tokens // block_tokens, q_blocks + (1 if v is None else 2) * kv_blocks),
        q,
        k,
        v,
        cos_sin,
        positions if not axis_columns or positions is None else positions.T.contiguous(),
        q_norm,
        k_norm,
        k_cache,
        v_cache,
        loc,
        k_scale,
        v_scale,
        *q.stride()[:2],
        *k.stride()[:2],
        *own_v.stride()[:2],
        *k_strides,
        *v_strides,
        heads,
        kv_heads,
        eps,
        PAGE_SIZE=page_size,
        DIM=dim,
        DIM_V=own_v.shape[2],
        START=rope_start,
        HALF=half,
        Q_BLOCKS=q_blocks,
        KV_BLOCKS=kv_blocks,
        BLOCK_TOKENS=block_tokens,
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=next_power_of_2(max(half, 1)),
        BLOCK_REST=next_power_of_2(max(dim - 2 * half, 1)),
        BLOCK_DIM_V=next_power_of_2(own_v.shape[2]),
        UNIT_OFFSET=unit_offset,
        AXIS_COLUMNS=tuple(axis_columns),
        num_warps=num_warps
        or _num_warps(block_heads * next_power_of_2(dim), quantised=k_scale is not None),
        **overlap_options(q.device, _rope_write_kv_kernel),
    )


def _pages(cache: Tensor) -> tuple[int, tuple[int, ...]]:
    """Tokens of a page, and the strides of a page, a slot and a head."""
    return cache.shape[1], cache.stride()[:3]


def _num_warps(elements: int, *, quantised: bool) -> int:
    """Warps for a program of `elements`: 8 elements a thread, 4 where each is divided."""
    return min(max(elements // (128 if quantised else 256), 1), 8)
