"""Triton kernel of rope_inplace; see kernels/rope.py for the definition."""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK_HEADS = 8


@triton.jit
def _rotate_heads(
    row_ptr,  # [heads, dim] one token
    stride_head,
    heads,
    first_head,
    cos,  # [BLOCK_HALF]
    sin,  # [BLOCK_HALF]
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    head = first_head + tl.arange(0, BLOCK_HEADS)
    cols = tl.arange(0, BLOCK_HALF)
    mask = (head < heads)[:, None] & (cols < HALF)[None, :]
    first_ptrs = row_ptr + head[:, None] * stride_head + cols[None, :]
    a = tl.load(first_ptrs, mask=mask, other=0.0)
    b = tl.load(first_ptrs + HALF, mask=mask, other=0.0)
    a32 = a.to(tl.float32)
    b32 = b.to(tl.float32)
    new_a = a32 * cos[None, :] - b32 * sin[None, :]
    new_b = b32 * cos[None, :] + a32 * sin[None, :]
    tl.store(first_ptrs, new_a.to(a.dtype), mask=mask)
    tl.store(first_ptrs + HALF, new_b.to(a.dtype), mask=mask)


@triton.jit
def _rope_kernel(
    q_ptr,  # [tokens, heads, dim]
    k_ptr,  # [tokens, kv_heads, dim]
    cos_sin_ptr,  # [max_position, 2 * HALF] float32
    positions_ptr,  # [tokens] int64
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    heads,
    kv_heads,
    HALF: tl.constexpr,
    Q_BLOCKS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    position = tl.load(positions_ptr + token)
    cols = tl.arange(0, BLOCK_HALF)
    table_ptr = cos_sin_ptr + position * (2 * HALF)
    cos = tl.load(table_ptr + cols, mask=cols < HALF, other=0.0)
    sin = tl.load(table_ptr + HALF + cols, mask=cols < HALF, other=0.0)
    if block < Q_BLOCKS:
        _rotate_heads(
            q_ptr + token * stride_q_token,
            stride_q_head,
            heads,
            block * BLOCK_HEADS,
            cos,
            sin,
            HALF,
            BLOCK_HEADS,
            BLOCK_HALF,
        )
    else:
        _rotate_heads(
            k_ptr + token * stride_k_token,
            stride_k_head,
            kv_heads,
            (block - Q_BLOCKS) * BLOCK_HEADS,
            cos,
            sin,
            HALF,
            BLOCK_HEADS,
            BLOCK_HALF,
        )


def launch_rope(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
    """One program per token and block of heads, q's blocks before k's."""
    tokens, heads, _ = q.shape
    if tokens == 0:
        return
    kv_heads = k.shape[1]
    half = cos_sin.shape[1] // 2
    q_blocks = triton.cdiv(heads, _BLOCK_HEADS)
    k_blocks = triton.cdiv(kv_heads, _BLOCK_HEADS)
    _rope_kernel[(tokens, q_blocks + k_blocks)](
        q,
        k,
        cos_sin,
        positions,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        heads,
        kv_heads,
        HALF=half,
        Q_BLOCKS=q_blocks,
        BLOCK_HEADS=_BLOCK_HEADS,
        BLOCK_HALF=triton.next_power_of_2(half),
        num_warps=2,
    )
