"""Triton kernel of paged_extend; see kernels/paged_attention/extend.py.

Worked example, GROUP 4, BLOCK_ROWS 16, BLOCK_KEYS 8, prefix 10, extend 5, no window: rows are
(query, head) pairs, so tile 0 holds queries 0..3 at positions 10..13 and tile 1 query 4 at 14.
Tile 0 sees keys [0, 14): [0, 8) lies before position 11 for every row and takes no mask, [8, 14)
is masked row by row.
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


@triton.jit
def _attend_keys(
    start,  # first key of the tile
    end,  # keys from here on are dead
    query_position,  # [rows] int32
    q,  # [rows, BLOCK_DIM_K]
    k_head_ptr,  # [pages, page_size, head_dim] one KV head
    v_head_ptr,  # [pages, page_size, v_head_dim] one KV head
    page_row_ptr,  # [max_pages] int32
    stride_k_page,
    stride_k_slot,
    stride_v_page,
    stride_v_slot,
    running_max,  # [rows] float32
    running_sum,  # [rows] float32
    acc,  # [rows, BLOCK_DIM_V] float32
    scale,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    DIM_K: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_DIM_K: tl.constexpr,
    BLOCK_DIM_V: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    WIDEN: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One tile of keys; without MASKED every row sees every key of it."""
    keys = start + tl.arange(0, BLOCK_KEYS)
    live = keys < end
    page = lookup_pages(page_row_ptr, keys, live, PAGE_SIZE, MASKED)
    slot = keys % PAGE_SIZE
    k_offsets = page * stride_k_page + slot * stride_k_slot
    v_offsets = page * stride_v_page + slot * stride_v_slot
    k = load_rows(k_head_ptr, k_offsets, live, DIM_K, BLOCK_DIM_K, MASKED)
    products = dot(q, tl.trans(k), tl.zeros([BLOCK_ROWS, BLOCK_KEYS], tl.float32), WIDEN)
    scores = scores_log2(products, scale, SOFT_CAP)
    if MASKED:
        visible = live[None, :] & (keys[None, :] <= query_position[:, None])
        if WINDOW is not None:
            visible = visible & (keys[None, :] > query_position[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
    v = load_rows(v_head_ptr, v_offsets, live, DIM_V, BLOCK_DIM_V, MASKED)
    return softmax_step(scores, v, running_max, running_sum, acc, WIDEN)


@triton.jit
def _extend_kernel(
    q_ptr,  # [tokens, heads, head_dim]
    k_cache_ptr,  # [num_pages, page_size, kv_heads, head_dim]
    v_cache_ptr,  # [num_pages, page_size, kv_heads, v_head_dim]
    page_table_ptr,  # [reqs, max_pages] int32
    prefix_lens_ptr,  # [reqs] int32
    kv_lens_ptr,  # [reqs] int32
    cu_seqlens_q_ptr,  # [reqs + 1] int32
    out_ptr,  # [tokens, heads, v_head_dim]
    lse_ptr,  # [tokens, heads] float32
    stride_q_token,
    stride_q_head,
    stride_k_page,
    stride_k_slot,
    stride_k_head,
    stride_v_page,
    stride_v_slot,
    stride_v_head,
    stride_page_table_req,
    stride_out_token,
    stride_out_head,
    heads,
    scale,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PREFIX_ONLY: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    DIM_K: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_DIM_K: tl.constexpr,
    BLOCK_DIM_V: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    # The last tile has the most keys under a causal mask: it starts first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    req = tl.program_id(2).to(tl.int64)

    token_begin = tl.load(cu_seqlens_q_ptr + req)
    num_rows = (tl.load(cu_seqlens_q_ptr + req + 1) - token_begin) * GROUP
    if tile * BLOCK_ROWS >= num_rows:
        return
    prefix_len = tl.load(prefix_lens_ptr + req)
    key_limit = prefix_len
    if not PREFIX_ONLY:
        key_limit = tl.load(kv_lens_ptr + req)

    row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_live = row < num_rows
    query_position = prefix_len + row // GROUP
    token = (token_begin + row // GROUP).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    cols_k = tl.arange(0, BLOCK_DIM_K)
    q = tl.load(
        q_ptr + (token * stride_q_token + head * stride_q_head)[:, None] + cols_k[None, :],
        mask=row_live[:, None] & (cols_k < DIM_K)[None, :],
        other=0.0,
    )

    # Keys [begin, full_end) are seen by every row, [full_end, end) are masked row by row.
    first_position = prefix_len + tile * BLOCK_ROWS // GROUP
    last_row = tl.minimum(tile * BLOCK_ROWS + BLOCK_ROWS, num_rows) - 1
    end = tl.minimum(key_limit, prefix_len + last_row // GROUP + 1)
    if WINDOW is None:
        begin = 0
        full_end = tl.minimum(end, first_position + 1) // BLOCK_KEYS * BLOCK_KEYS
    else:
        begin = tl.maximum(first_position - WINDOW + 1, 0)
        full_end = begin

    page_row_ptr = page_table_ptr + req * stride_page_table_req
    k_head_ptr = k_cache_ptr + kv_head * stride_k_head
    v_head_ptr = v_cache_ptr + kv_head * stride_v_head
    running_max = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_ROWS], tl.float32)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_DIM_V], tl.float32)
    for start in range(begin, full_end, BLOCK_KEYS):
        running_max, running_sum, acc = _attend_keys(
            start, end, query_position, q, k_head_ptr, v_head_ptr, page_row_ptr,
            stride_k_page, stride_k_slot, stride_v_page, stride_v_slot,
            running_max, running_sum, acc, scale,
            WINDOW, SOFT_CAP, PAGE_SIZE, DIM_K, DIM_V, BLOCK_DIM_K, BLOCK_DIM_V,
            BLOCK_ROWS, BLOCK_KEYS, WIDEN,
            MASKED=False,
        )  # fmt: skip
    for start in range(full_end, end, BLOCK_KEYS):
        running_max, running_sum, acc = _attend_keys(
            start, end, query_position, q, k_head_ptr, v_head_ptr, page_row_ptr,
            stride_k_page, stride_k_slot, stride_v_page, stride_v_slot,
            running_max, running_sum, acc, scale,
            WINDOW, SOFT_CAP, PAGE_SIZE, DIM_K, DIM_V, BLOCK_DIM_K, BLOCK_DIM_V,
            BLOCK_ROWS, BLOCK_KEYS, WIDEN,
            MASKED=True,
        )  # fmt: skip

    out, lse = softmax_finish(running_max, running_sum, acc)
    cols_v = tl.arange(0, BLOCK_DIM_V)
    tl.store(
        out_ptr + (token * stride_out_token + head * stride_out_head)[:, None] + cols_v[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=row_live[:, None] & (cols_v < DIM_V)[None, :],
    )
    tl.store(lse_ptr + token * heads + head, lse * 0.6931471805599453, mask=row_live)


def extend_config(
    max_rows: int, head_dim: int, v_head_dim: int, *, dtype: torch.dtype, shared_bytes: int
) -> TileConfig:
    """Static tile table of paged_extend; `max_rows` is max_extend_len * group."""
    widest = max(block_dim(head_dim), block_dim(v_head_dim))
    if dtype == torch.float32:
        largest = 16
    else:
        largest = 128 if widest <= 128 else 64
    block_rows = max(16, min(largest, triton.next_power_of_2(max_rows)))
    return TileConfig(
        block_rows=block_rows,
        block_keys=min(64, keys_per_stage(head_dim, v_head_dim, dtype.itemsize)),
        num_warps=8 if block_rows * widest >= 16384 else 4,
        num_stages=3 if shared_bytes >= 131072 else 2,
    )


def launch_paged_extend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    prefix_lens: Tensor,
    kv_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    max_extend_len: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    prefix_only: bool,
    out: Tensor,
    lse: Tensor,
    config: TileConfig | None = None,
) -> None:
    """One program per tile of rows, KV head and request; `config` overrides the tile table."""
    require_runnable("paged_extend", q, _extend_kernel)
    _, heads, head_dim = q.shape
    _, page_size, kv_heads, v_head_dim = v_cache.shape
    group = heads // kv_heads
    max_rows = max_extend_len * group
    if config is None:
        shared_bytes = shared_memory_bytes(q.device)
        config = extend_config(
            max_rows, head_dim, v_head_dim, dtype=q.dtype, shared_bytes=shared_bytes
        )
    grid = (triton.cdiv(max_rows, config.block_rows), kv_heads, page_table.shape[0])
    _extend_kernel[grid](
        q,
        k_cache,
        v_cache,
        page_table,
        prefix_lens,
        kv_lens,
        cu_seqlens_q,
        out,
        lse,
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        page_table.stride(0),
        *out.stride()[:2],
        heads,
        scale,
        WINDOW=window,
        SOFT_CAP=soft_cap,
        PREFIX_ONLY=prefix_only,
        GROUP=group,
        PAGE_SIZE=page_size,
        DIM_K=head_dim,
        DIM_V=v_head_dim,
        BLOCK_DIM_K=block_dim(head_dim),
        BLOCK_DIM_V=block_dim(v_head_dim),
        BLOCK_ROWS=config.block_rows,
        BLOCK_KEYS=config.block_keys,
        WIDEN=q.dtype == torch.bfloat16 and interpreted(_extend_kernel),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
