"""Triton kernel of tree_attention; see kernels/tree_attention.py for the definition.

As in paged_extend, rows of a tile are (query, head of the group) pairs, so one tile of keys serves
the whole group: worked example, extend_len 5, GROUP 4, BLOCK_ROWS 16: tile 0 holds queries 0..3 and
tile 1 query 4 alone.  Wide keys are two tiles: 576 columns, of a latent row, would be one of 1,024.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.primitives import (
    dot,
    load_rows,
    scores_log2,
    softmax_finish,
    softmax_step,
)
from paceline.kernels._triton.runtime import (
    TileConfig,
    block_dim,
    cdiv,
    interpreted,
    keys_per_stage,
    next_power_of_2,
    require_runnable,
)

WIDEST = 256  # columns of K in one tile, whatever their number


@triton.jit
def _tree_attention_kernel(
    q_ptr,  # [tokens, heads, head_dim]
    k_ptr,  # [tokens, kv_heads, head_dim]
    v_ptr,  # [tokens, kv_heads, v_head_dim]
    tree_mask_ptr,  # [tokens, >= extend_len] bool
    out_ptr,  # [tokens, heads, v_head_dim]
    lse_ptr,  # [tokens, heads] float32
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_tree_token,
    stride_out_token,
    stride_out_head,
    heads,
    extend_len,
    scale,
    SOFT_CAP: tl.constexpr,
    GROUP: tl.constexpr,
    DIM_K: tl.constexpr,  # columns of K's first tile
    DIM_REST: tl.constexpr,  # and of a second behind it, or 0
    DIM_V: tl.constexpr,
    BLOCK_DIM_K: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_DIM_V: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    WIDEN: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    kv_head = tl.program_id(1).to(tl.int64)
    first_token = tl.program_id(2).to(tl.int64) * extend_len
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_live = row < extend_len * GROUP
    token = first_token + row // GROUP
    head = kv_head * GROUP + row % GROUP
    cols_k = tl.arange(0, BLOCK_DIM_K)
    q_rows = q_ptr + (token * stride_q_token + head * stride_q_head)[:, None]
    q = tl.load(
        q_rows + cols_k[None, :], mask=row_live[:, None] & (cols_k < DIM_K)[None, :], other=0.0
    )
    if DIM_REST > 0:
        cols_rest = tl.arange(0, BLOCK_REST)
        is_rest = row_live[:, None] & (cols_rest < DIM_REST)[None, :]
        q_rest = tl.load(q_rows + (DIM_K + cols_rest)[None, :], mask=is_rest, other=0.0)
    k_head_ptr = k_ptr + kv_head * stride_k_head
    v_head_ptr = v_ptr + kv_head * stride_v_head
    running_max = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_ROWS], tl.float32)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_DIM_V], tl.float32)
    for start in range(0, extend_len, BLOCK_KEYS):
        node = start + tl.arange(0, BLOCK_KEYS)
        node_live = node < extend_len
        key_token = first_token + node
        key_rows = key_token * stride_k_token
        k = load_rows(k_head_ptr, key_rows, node_live, DIM_K, BLOCK_DIM_K, True)
        products = dot(q, tl.trans(k), tl.zeros([BLOCK_ROWS, BLOCK_KEYS], tl.float32), WIDEN)
        if DIM_REST > 0:
            rest = load_rows(k_head_ptr + DIM_K, key_rows, node_live, DIM_REST, BLOCK_REST, True)
            products = dot(q_rest, tl.trans(rest), products, WIDEN)
        is_ancestor = tl.load(
            tree_mask_ptr + token[:, None] * stride_tree_token + node[None, :],
            mask=row_live[:, None] & node_live[None, :],
            other=0,
        )
        scores = scores_log2(products, scale, SOFT_CAP)
        scores = tl.where(is_ancestor != 0, scores, float("-inf"))
        v = load_rows(v_head_ptr, key_token * stride_v_token, node_live, DIM_V, BLOCK_DIM_V, True)
        running_max, running_sum, acc = softmax_step(
            scores, v, running_max, running_sum, acc, WIDEN
        )
    let_next_start(OVERLAPPED)
    out, lse = softmax_finish(running_max, running_sum, acc)
    cols = tl.arange(0, BLOCK_DIM_V)
    tl.store(
        out_ptr + (token * stride_out_token + head * stride_out_head)[:, None] + cols[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=row_live[:, None] & (cols < DIM_V)[None, :],
    )
    tl.store(lse_ptr + token * heads + head, lse * 0.6931471805599453, mask=row_live)


def column_tiles(head_dim: int) -> tuple[int, int]:
    """Columns of K's first tile, of wide keys the largest power of two, and of one behind it."""
    most = next_power_of_2(head_dim)
    if head_dim <= WIDEST or head_dim == most:
        return head_dim, 0
    return most // 2, head_dim - most // 2


def tree_config(
    extend_len: int, group: int, *, head_dim: int, v_head_dim: int, dtype: torch.dtype
) -> TileConfig:
    """Tile table: one tile of rows and keys where a tree is small, at most 64 by 64."""
    most_rows = 16 if dtype == torch.float32 or head_dim > WIDEST else 64
    most_keys = min(64, keys_per_stage(head_dim, v_head_dim, dtype.itemsize))
    return TileConfig(
        block_rows=max(16, min(most_rows, next_power_of_2(extend_len * group))),
        block_keys=max(16, min(most_keys, next_power_of_2(extend_len))),
        num_warps=4,
        num_stages=2,
    )


def launch_tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tree_mask: Tensor,
    *,
    extend_len: int,
    scale: float,
    soft_cap: float | None,
    out: Tensor,
    lse: Tensor,
) -> None:
    """One program per tile of rows, KV head and request; arguments as kernels/tree_attention.py
    checks them.
    """
    require_runnable(
        "q of tree_attention",
        q,
        _tree_attention_kernel,
        otherwise="call kernels.tree_attention.tree_attention",
    )
    tokens, heads, head_dim = q.shape
    kv_heads, v_head_dim = v.shape[1:]
    group = heads // kv_heads
    config = tree_config(extend_len, group, head_dim=head_dim, v_head_dim=v_head_dim, dtype=q.dtype)
    tiles = cdiv(extend_len * group, config.block_rows)
    dim_k, dim_rest = column_tiles(head_dim)
    launch(
        _tree_attention_kernel,
        (tiles, kv_heads, tokens // extend_len),
        q,
        k,
        v,
        tree_mask,
        out,
        lse,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        tree_mask.stride(0),
        *out.stride()[:2],
        heads,
        extend_len,
        scale,
        SOFT_CAP=soft_cap,
        GROUP=group,
        DIM_K=dim_k,
        DIM_REST=dim_rest,
        DIM_V=v_head_dim,
        BLOCK_DIM_K=block_dim(dim_k),
        BLOCK_REST=block_dim(dim_rest) if dim_rest else 0,
        BLOCK_DIM_V=block_dim(v_head_dim),
        BLOCK_ROWS=config.block_rows,
        BLOCK_KEYS=config.block_keys,
        WIDEN=q.dtype == torch.bfloat16 and interpreted(_tree_attention_kernel),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **overlap_options(q.device, _tree_attention_kernel),
    )
