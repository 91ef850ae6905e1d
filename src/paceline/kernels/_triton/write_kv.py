"""Triton kernel of write_kv; see kernels/write_kv.py for the definition."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _copy_row(
    source_ptr,  # [kv_heads, dim] one token
    target_ptr,  # [kv_heads, dim] one slot
    stride_source_head,
    stride_target_head,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    heads = tl.arange(0, BLOCK_HEADS)[:, None]
    cols = tl.arange(0, BLOCK_DIM)[None, :]
    mask = (heads < KV_HEADS) & (cols < DIM)
    row = tl.load(source_ptr + heads * stride_source_head + cols, mask=mask, other=0.0)
    tl.store(target_ptr + heads * stride_target_head + cols, row, mask=mask)


@triton.jit
def _write_kv_kernel(
    k_ptr,  # [tokens, kv_heads, head_dim]
    v_ptr,  # [tokens, kv_heads, v_head_dim]
    k_cache_ptr,  # [num_pages, page_size, kv_heads, head_dim]
    v_cache_ptr,  # [num_pages, page_size, kv_heads, v_head_dim]
    out_cache_loc_ptr,  # [tokens] int64
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
    PAGE_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM_K: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM_K: tl.constexpr,
    BLOCK_DIM_V: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(out_cache_loc_ptr + token)
    page = slot // PAGE_SIZE
    place = slot % PAGE_SIZE
    _copy_row(
        k_ptr + token * stride_k_token,
        k_cache_ptr + page * stride_k_page + place * stride_k_slot,
        stride_k_head,
        stride_k_cache_head,
        KV_HEADS,
        DIM_K,
        BLOCK_HEADS,
        BLOCK_DIM_K,
    )
    _copy_row(
        v_ptr + token * stride_v_token,
        v_cache_ptr + page * stride_v_page + place * stride_v_slot,
        stride_v_head,
        stride_v_cache_head,
        KV_HEADS,
        DIM_V,
        BLOCK_HEADS,
        BLOCK_DIM_V,
    )


def launch_write_kv(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, out_cache_loc: Tensor
) -> None:
    """One program per token."""
    tokens, kv_heads, dim_k = k.shape
    if tokens == 0:
        return
    _write_kv_kernel[(tokens,)](
        k,
        v,
        k_cache,
        v_cache,
        out_cache_loc,
        *k.stride()[:2],
        *v.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        PAGE_SIZE=k_cache.shape[1],
        KV_HEADS=kv_heads,
        DIM_K=dim_k,
        DIM_V=v.shape[2],
        BLOCK_HEADS=triton.next_power_of_2(kv_heads),
        BLOCK_DIM_K=triton.next_power_of_2(dim_k),
        BLOCK_DIM_V=triton.next_power_of_2(v.shape[2]),
        num_warps=4,
    )
