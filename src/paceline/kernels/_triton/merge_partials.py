"""Triton kernel of merge_partials; see kernels/merge_partials.py for the definition."""

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.runtime import cdiv, next_power_of_2, require_runnable


@triton.jit
def _weighed(
    partial_ptr,  # [tokens, heads, v_head_dim]
    offset,  # [rows] int64 of each row's first number
    weight,  # [rows] float32
    has_keys,  # [rows] bool
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """[rows, BLOCK_DIM] float32: one part's share; 0 where it saw no key, whatever it holds."""
    cols = tl.arange(0, BLOCK_DIM)
    values = tl.load(
        partial_ptr + offset[:, None] + cols[None, :],
        mask=has_keys[:, None] & (cols < DIM)[None, :],
        other=0.0,
    )
    return values.to(tl.float32) * weight[:, None]


@triton.jit(do_not_specialize=["num_rows"])
def _merge_partials_kernel(
    out_a_ptr,  # [tokens, heads, v_head_dim]
    lse_a_ptr,  # [tokens, heads] float32
    out_b_ptr,  # [tokens, heads, v_head_dim]
    lse_b_ptr,  # [tokens, heads] float32
    sinks_ptr,  # [heads] float32 or None
    out_ptr,  # [tokens, heads, v_head_dim]
    lse_ptr,  # [tokens, heads] float32
    stride_a_token,
    stride_a_head,
    stride_b_token,
    stride_b_head,
    stride_out_token,
    stride_out_head,
    num_rows,  # tokens * heads
    heads,
    DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    live = row < num_rows
    token = row // heads
    head = row % heads
    lse_a = tl.load(lse_a_ptr + row, mask=live, other=float("-inf")) * 1.4426950408889634
    lse_b = tl.load(lse_b_ptr + row, mask=live, other=float("-inf")) * 1.4426950408889634
    largest = tl.maximum(lse_a, lse_b)
    is_empty = largest == float("-inf")
    anchor = tl.where(is_empty, 0.0, largest)
    sum_a = tl.exp2(lse_a - anchor)
    sum_b = tl.exp2(lse_b - anchor)
    total = tl.where(is_empty, 1.0, sum_a + sum_b)
    lse = tl.where(is_empty, float("-inf"), anchor + tl.log2(total))
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, mask=live, other=0.0) * 1.4426950408889634
        total += tl.exp2(sink - anchor)
    offset_a = token * stride_a_token + head * stride_a_head
    offset_b = token * stride_b_token + head * stride_b_head
    has_a = live & (lse_a != float("-inf"))
    has_b = live & (lse_b != float("-inf"))
    merged = _weighed(out_a_ptr, offset_a, sum_a / total, has_a, DIM, BLOCK_DIM)
    merged += _weighed(out_b_ptr, offset_b, sum_b / total, has_b, DIM, BLOCK_DIM)
    let_next_start(OVERLAPPED)
    cols = tl.arange(0, BLOCK_DIM)
    tl.store(
        out_ptr + (token * stride_out_token + head * stride_out_head)[:, None] + cols[None, :],
        merged.to(out_ptr.dtype.element_ty),
        mask=live[:, None] & (cols < DIM)[None, :],
    )
    tl.store(lse_ptr + row, lse * 0.6931471805599453, mask=live)


def launch_merge_partials(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> None:
    """One program per block of (token, head) rows; arguments as kernels/merge_partials.py checks
    them.
    """
    require_runnable(
        "out_a of merge_partials",
        out_a,
        _merge_partials_kernel,
        otherwise="call kernels.merge_partials.merge_partials",
    )
    tokens, heads, dim = out.shape
    block_dim = next_power_of_2(dim)
    block_rows = max(1, 2048 // block_dim)
    launch(
        _merge_partials_kernel,
        (cdiv(tokens * heads, block_rows),),
        out_a,
        lse_a,
        out_b,
        lse_b,
        sinks,
        out,
        lse,
        *out_a.stride()[:2],
        *out_b.stride()[:2],
        *out.stride()[:2],
        tokens * heads,
        heads,
        DIM=dim,
        BLOCK_ROWS=block_rows,
        BLOCK_DIM=block_dim,
        num_warps=4,
        **overlap_options(out_a.device, _merge_partials_kernel),
    )
