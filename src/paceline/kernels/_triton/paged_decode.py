"""Triton kernels of paged_decode; see kernels/paged_attention/decode.py.

Worked example, 2 splits, BLOCK_KEYS 64, kv_len 200, window 150: the visible keys are [50, 200);
cdiv(150, 2) = 75 keys per split rounded up to 128, so split 0 takes [50, 178), split 1 [178, 200).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.primitives import (
    dot,
    load_rows,
    lookup_pages,
    scores_log2,
    softmax_finish,
    softmax_step,
)
from paceline.kernels._triton.runtime import (
    TileConfig,
    block_dim,
    interpreted,
    keys_per_stage,
    require_runnable,
    shared_memory_bytes,
)


@triton.jit(do_not_specialize=["splits"])
def _decode_kernel(
    q_ptr,  # [reqs, heads, head_dim]
    k_cache_ptr,  # [num_pages, page_size, kv_heads, head_dim]
    v_cache_ptr,  # [num_pages, page_size, kv_heads, v_head_dim]
    page_table_ptr,  # [reqs, max_pages] int32
    kv_lens_ptr,  # [reqs] int32
    out_ptr,  # [reqs, heads, v_head_dim]; [reqs * splits, heads, v_head_dim] float32 when split
    lse_ptr,  # [reqs, heads]; [reqs * splits, heads] float32, log2 units when split
    stride_q_req,
    stride_q_head,
    stride_k_page,
    stride_k_slot,
    stride_k_head,
    stride_v_page,
    stride_v_slot,
    stride_v_head,
    stride_page_table_req,
    stride_out_row,
    stride_out_head,
    heads,
    scale,
    splits,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    DIM_K: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_DIM_K: tl.constexpr,
    BLOCK_DIM_V: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    kv_head = (tl.program_id(0) // HEAD_TILES).to(tl.int64)
    split = tl.program_id(1)
    req = tl.program_id(2).to(tl.int64)

    kv_len = tl.load(kv_lens_ptr + req)
    first = 0
    if WINDOW is not None:
        first = tl.maximum(kv_len - WINDOW, 0)
    keys_per_split = tl.cdiv(tl.cdiv(kv_len - first, splits), BLOCK_KEYS) * BLOCK_KEYS
    begin = first + split * keys_per_split
    end = tl.minimum(begin + keys_per_split, kv_len)

    group_head = tl.program_id(0) % HEAD_TILES * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    head = kv_head * GROUP + group_head
    head_live = group_head < GROUP
    cols_k = tl.arange(0, BLOCK_DIM_K)
    q = tl.load(
        q_ptr + req * stride_q_req + head[:, None] * stride_q_head + cols_k[None, :],
        mask=head_live[:, None] & (cols_k < DIM_K)[None, :],
        other=0.0,
    )

    page_row_ptr = page_table_ptr + req * stride_page_table_req
    k_head_ptr = k_cache_ptr + kv_head * stride_k_head
    v_head_ptr = v_cache_ptr + kv_head * stride_v_head
    running_max = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_ROWS], tl.float32)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_DIM_V], tl.float32)
    for start in range(begin, end, BLOCK_KEYS):
        keys = start + tl.arange(0, BLOCK_KEYS)
        live = keys < end
        page = lookup_pages(page_row_ptr, keys, live, PAGE_SIZE, True)
        slot = keys % PAGE_SIZE
        k = load_rows(
            k_head_ptr, page * stride_k_page + slot * stride_k_slot, live, DIM_K, BLOCK_DIM_K, True
        )
        products = dot(q, tl.trans(k), tl.zeros([BLOCK_ROWS, BLOCK_KEYS], tl.float32), WIDEN)
        scores = scores_log2(products, scale, SOFT_CAP)
        scores = tl.where(live[None, :], scores, float("-inf"))
        v = load_rows(
            v_head_ptr, page * stride_v_page + slot * stride_v_slot, live, DIM_V, BLOCK_DIM_V, True
        )
        running_max, running_sum, acc = softmax_step(
            scores, v, running_max, running_sum, acc, WIDEN
        )

    out, lse = softmax_finish(running_max, running_sum, acc)
    if not IS_SPLIT:
        lse = lse * 0.6931471805599453
    row = req * splits + split
    cols_v = tl.arange(0, BLOCK_DIM_V)
    tl.store(
        out_ptr + row * stride_out_row + head[:, None] * stride_out_head + cols_v[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=head_live[:, None] & (cols_v < DIM_V)[None, :],
    )
    tl.store(lse_ptr + row * heads + head, lse, mask=head_live)


@triton.jit(do_not_specialize=["splits"])
def _combine_kernel(
    partial_out_ptr,  # [reqs * splits, heads, v_head_dim] float32
    partial_lse_ptr,  # [reqs * splits, heads] float32, log2 units
    out_ptr,  # [reqs, heads, v_head_dim]
    lse_ptr,  # [reqs, heads] float32, natural log
    stride_out_req,
    stride_out_head,
    heads,
    splits,
    DIM_V: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_DIM_V: tl.constexpr,
):
    head = tl.program_id(0)
    req = tl.program_id(1).to(tl.int64)
    split = tl.arange(0, BLOCK_SPLITS)
    cols = tl.arange(0, BLOCK_DIM_V)
    row = (req * splits + split) * heads + head
    split_lse = tl.load(partial_lse_ptr + row, mask=split < splits, other=float("-inf"))
    top = tl.max(split_lse, axis=0)
    top = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(split_lse - top)
    total = tl.sum(weights, axis=0)
    # An empty split is skipped, a NaN one is not: NaN != -inf.
    partial = tl.load(
        partial_out_ptr + row[:, None] * DIM_V + cols[None, :],
        mask=(split_lse != float("-inf"))[:, None] & (cols < DIM_V)[None, :],
        other=0.0,
    )
    safe_total = tl.where(total == 0.0, 1.0, total)
    out = tl.sum(partial * weights[:, None], axis=0) / safe_total
    lse = tl.where(total == 0.0, float("-inf"), (top + tl.log2(safe_total)) * 0.6931471805599453)
    out_row = out_ptr + req * stride_out_req + head * stride_out_head
    tl.store(out_row + cols, out.to(out_ptr.dtype.element_ty), mask=cols < DIM_V)
    tl.store(lse_ptr + req * heads + head, lse)


def decode_config(
    group: int, head_dim: int, v_head_dim: int, *, dtype: torch.dtype, shared_bytes: int
) -> TileConfig:
    """Static tile table of paged_decode: memory-bound, so small row tiles and deep prefetch.

    The page lookup and the cache load it feeds share the stages: five keep two tiles in flight.
    """
    deep = shared_bytes >= 163840 and dtype != torch.float32
    return TileConfig(
        block_rows=16 if group <= 16 else 32,
        block_keys=keys_per_stage(head_dim, v_head_dim, dtype.itemsize),
        num_warps=4,
        num_stages=5 if deep else 3,
    )


def launch_paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    splits: int,
    out: Tensor,
    lse: Tensor,
    partial_out: Tensor,
    partial_lse: Tensor,
    config: TileConfig | None = None,
) -> None:
    """Decode, then merge when there is more than one split; `config` overrides the tile table."""
    require_runnable("paged_decode", q, _decode_kernel)
    num_reqs, heads, head_dim = q.shape
    _, page_size, kv_heads, v_head_dim = v_cache.shape
    group = heads // kv_heads
    if config is None:
        shared_bytes = shared_memory_bytes(q.device)
        config = decode_config(
            group, head_dim, v_head_dim, dtype=q.dtype, shared_bytes=shared_bytes
        )
    head_tiles = triton.cdiv(group, config.block_rows)
    target = (out, lse) if splits == 1 else (partial_out, partial_lse)
    target_strides = out.stride()[:2] if splits == 1 else (heads * v_head_dim, v_head_dim)
    _decode_kernel[(kv_heads * head_tiles, splits, num_reqs)](
        q,
        k_cache,
        v_cache,
        page_table,
        kv_lens,
        *target,
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        page_table.stride(0),
        *target_strides,
        heads,
        scale,
        splits,
        WINDOW=window,
        SOFT_CAP=soft_cap,
        IS_SPLIT=splits > 1,
        GROUP=group,
        HEAD_TILES=head_tiles,
        PAGE_SIZE=page_size,
        DIM_K=head_dim,
        DIM_V=v_head_dim,
        BLOCK_DIM_K=block_dim(head_dim),
        BLOCK_DIM_V=block_dim(v_head_dim),
        BLOCK_ROWS=config.block_rows,
        BLOCK_KEYS=config.block_keys,
        WIDEN=q.dtype == torch.bfloat16 and interpreted(_decode_kernel),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if splits == 1:
        return
    _combine_kernel[(heads, num_reqs)](
        partial_out,
        partial_lse,
        out,
        lse,
        *out.stride()[:2],
        heads,
        splits,
        DIM_V=v_head_dim,
        BLOCK_SPLITS=triton.next_power_of_2(splits),
        BLOCK_DIM_V=block_dim(v_head_dim),
        num_warps=4,
    )
