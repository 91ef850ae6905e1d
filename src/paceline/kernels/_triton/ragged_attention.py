"""The Triton kernel of ragged_attention; see kernels/ragged_attention.py for the definition.

A program has BLOCK_ROWS queries of one request and head.  Programs are found in slots: request r
has those from cu_q[r] // BLOCK_ROWS + r on, enough for its tiles, so that the grid is of padded
sizes.  Rows behind cu_q[-1] are one more request, without keys.  Worked example, BLOCK_ROWS 4, 13
tokens, cu_q [0, 6, 7, 12]:

    slot      0 1 2 3 4 5 6 7
    request   0 0 1 2 2 - 3 -   first slots 0, 6 // 4 + 1 = 2, 7 // 4 + 2 = 3, 12 // 4 + 3 = 6
    queries   0 4 0 0 4   0
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.primitives import dot, scores_log2, softmax_finish, softmax_step
from paceline.kernels._triton.runtime import (
    block_dim,
    cdiv,
    interpreted,
    keys_per_stage,
    next_power_of_2,
)

_ROWS, _KEYS = 64, 64
_WIDE = 128  # columns of a head above which a tile has fewer keys


@triton.jit
def _ragged_attention_kernel(
    q_ptr,  # [tokens, heads, head_dim]
    k_ptr,  # [keys, kv_heads, head_dim]
    v_ptr,  # [keys, kv_heads, v_head_dim]
    cu_q_ptr,  # [reqs + 1] int32
    cu_k_ptr,  # [reqs + 1] int32
    prefix_ptr,  # [reqs] int32, or None
    visible_end_ptr,  # [tokens] int32, or None
    out_ptr,  # [tokens, heads, v_head_dim]
    lse_ptr,  # [tokens, heads] float32
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_out_token,
    stride_out_head,
    stride_lse_token,
    tokens,
    reqs,
    group,  # query heads of a KV head
    scale,
    BACK: tl.constexpr,
    AHEAD: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    DIM_K: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_DIM_K: tl.constexpr,
    BLOCK_DIM_V: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_REQS: tl.constexpr,
    WIDEN: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    slot, head = tl.program_id(0), tl.program_id(1)
    requests = tl.arange(0, BLOCK_REQS)
    first_slots = tl.load(cu_q_ptr + requests, mask=requests <= reqs, other=0) // BLOCK_ROWS
    begun = (first_slots + requests <= slot) & (requests <= reqs)
    request = tl.sum(begun.to(tl.int32), 0) - 1
    begin_q, begin_k = tl.load(cu_q_ptr + request), tl.load(cu_k_ptr + request)
    end_q = tl.load(cu_q_ptr + request + 1, mask=request < reqs, other=tokens)
    end_k = tl.load(cu_k_ptr + request + 1, mask=request < reqs, other=begin_k)
    let_next_start(OVERLAPPED)
    num_q, num_k = end_q - begin_q, end_k - begin_k
    first = (slot - begin_q // BLOCK_ROWS - request) * BLOCK_ROWS
    if first < num_q:
        rows = first + tl.arange(0, BLOCK_ROWS)
        row_live = rows < num_q
        position = rows + num_k - num_q
        token = (begin_q + rows).to(tl.int64)
        dims_k, dims_v = tl.arange(0, BLOCK_DIM_K), tl.arange(0, BLOCK_DIM_V)
        q = tl.load(
            q_ptr + token[:, None] * stride_q_token + head * stride_q_head + dims_k[None, :],
            mask=row_live[:, None] & (dims_k < DIM_K)[None, :],
            other=0.0,
        )
        k_head_ptr = k_ptr + (head // group) * stride_k_head
        v_head_ptr = v_ptr + (head // group) * stride_v_head
        lowest, stop = 0, num_k
        if BACK is not None:
            low = tl.maximum(first + num_k - num_q - BACK + 1, 0)
            lowest = low // BLOCK_KEYS * BLOCK_KEYS
        if AHEAD is not None:
            stop = tl.minimum(num_k, first + BLOCK_ROWS + num_k - num_q + AHEAD - 1)
        if visible_end_ptr is not None:
            prefix = tl.load(prefix_ptr + request, mask=request < reqs, other=0)
            end = tl.load(visible_end_ptr + token, mask=row_live, other=0) - prefix
            stop = tl.minimum(num_k, tl.max(end, 0))
        running_max = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
        running_sum = tl.zeros([BLOCK_ROWS], tl.float32)
        acc = tl.zeros([BLOCK_ROWS, BLOCK_DIM_V], tl.float32)
        for start in range(lowest, stop, BLOCK_KEYS):
            keys = start + tl.arange(0, BLOCK_KEYS)
            live = keys < num_k
            place = (begin_k + keys).to(tl.int64)[:, None]
            k = tl.load(
                k_head_ptr + place * stride_k_token + dims_k[None, :],
                mask=live[:, None] & (dims_k < DIM_K)[None, :],
                other=0.0,
            )
            products = dot(q, tl.trans(k), tl.zeros([BLOCK_ROWS, BLOCK_KEYS], tl.float32), WIDEN)
            visible = live[None, :] & row_live[:, None]
            ahead = keys[None, :] - position[:, None]
            if BACK is not None:
                visible = visible & (ahead > -BACK)
            if AHEAD is not None:
                visible = visible & (ahead < AHEAD)
            if visible_end_ptr is not None:
                visible = visible & (keys[None, :] < end[:, None])
            scores = tl.where(visible, scores_log2(products, scale, SOFT_CAP), float("-inf"))
            v = tl.load(
                v_head_ptr + place * stride_v_token + dims_v[None, :],
                mask=live[:, None] & (dims_v < DIM_V)[None, :],
                other=0.0,
            )
            running_max, running_sum, acc = softmax_step(
                scores, v, running_max, running_sum, acc, WIDEN
            )
        out, lse = softmax_finish(running_max, running_sum, acc)
        tl.store(
            out_ptr + token[:, None] * stride_out_token + head * stride_out_head + dims_v[None, :],
            out.to(out_ptr.dtype.element_ty),
            mask=row_live[:, None] & (dims_v < DIM_V)[None, :],
        )
        lse_places = lse_ptr + token * stride_lse_token + head
        tl.store(lse_places, lse * 0.6931471805599453, mask=row_live)


def launch_ragged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    prefix_lens: Tensor | None,
    visible_end: Tensor | None,
    scale: float,
    soft_cap: float | None,
    back: int | None,
    ahead: int | None,
    out: Tensor,
    lse: Tensor,
) -> None:
    """One program per head and slot of BLOCK_ROWS queries."""
    (tokens, heads, dim), reqs, v_dim = q.shape, cu_q.shape[0] - 1, v.shape[2]
    if not tokens:
        return
    is_wide = max(dim, v_dim) > _WIDE
    launch(
        _ragged_attention_kernel,
        (cdiv(tokens, _ROWS) + reqs + 1, heads),
        q,
        k,
        v,
        cu_q,
        cu_k,
        prefix_lens,
        visible_end,
        out,
        lse,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        out.stride(0),
        out.stride(1),
        lse.stride(0),
        tokens,
        reqs,
        heads // k.shape[1],
        scale,
        BACK=back,
        AHEAD=ahead,
        SOFT_CAP=soft_cap,
        DIM_K=dim,
        DIM_V=v_dim,
        BLOCK_DIM_K=block_dim(dim),
        BLOCK_DIM_V=block_dim(v_dim),
        BLOCK_ROWS=_ROWS,
        BLOCK_KEYS=keys_per_stage(dim, v_dim, q.element_size()) if is_wide else _KEYS,
        BLOCK_REQS=next_power_of_2(reqs + 1),
        WIDEN=q.dtype == torch.bfloat16 and interpreted(_ragged_attention_kernel),
        num_warps=4,
        num_stages=2,
        **overlap_options(q.device, _ragged_attention_kernel),
    )
