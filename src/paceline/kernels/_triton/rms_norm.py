"""Triton kernel of rms_norm and add_rms_norm; see kernels/rms_norm.py for the definition."""

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.runtime import cdiv, next_power_of_2
from paceline.kernels.rms_norm import UNSCALED, RowScale


@triton.jit
def weighed(
    normed,  # float32
    weight,  # float32, broadcasts
    DTYPE: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A normalised row times its weight, float32, rounded before where the definition rounds."""
    if UNIT_OFFSET:
        result = normed * (1.0 + weight)
    elif WIDE:
        result = normed * weight
    else:
        result = normed.to(DTYPE).to(tl.float32) * weight
    return result


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x_ptr,  # [tokens, heads, dim]; of PARTS [PARTS, tokens, heads, dim] float32
    residual_ptr,  # [tokens, heads, dim] or unused
    weight_ptr,  # [dim]
    squares_ptr,  # [tokens, SQUARES] float32, of one head, or None
    out_ptr,  # [tokens, heads, dim], may be x
    stride_x_part,
    stride_x_token,
    stride_x_head,
    stride_residual_token,
    stride_residual_head,
    stride_out_token,
    stride_out_head,
    num_rows,
    heads,
    eps,
    size,  # numbers whose squares those are
    scale_eps,
    DIM: tl.constexpr,
    ADD: tl.constexpr,
    PARTS: tl.constexpr,  # of x, added up and rounded; 1: x is whole
    SQUARES: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    IS_ONE: tl.constexpr,  # program
    OVERLAPPED: tl.constexpr,
):
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = tl.arange(0, BLOCK_DIM)
    token = rows // heads
    head = rows % heads
    mask = (rows < num_rows)[:, None] & (cols < DIM)[None, :]
    # Before the sum: loads behind its barrier would wait for it.
    weight = tl.load(weight_ptr + cols, mask=cols < DIM, other=0.0).to(tl.float32)[None, :]
    # A single program takes nobody's place: what follows may ask for its weights meanwhile.
    if IS_ONE:
        let_next_start(OVERLAPPED)
    wait_for_inputs(OVERLAPPED)
    if not IS_ONE:
        let_next_start(OVERLAPPED)
    x_offset = token * stride_x_token + head * stride_x_head
    x_ptrs = x_ptr + x_offset[:, None] + cols[None, :]
    x = tl.load(x_ptrs, mask=mask, other=0.0)
    for part in tl.static_range(1, PARTS):
        x += tl.load(x_ptrs + part * stride_x_part, mask=mask, other=0.0)
    x = x.to(DTYPE)
    if ADD:
        residual_offset = token * stride_residual_token + head * stride_residual_head
        residual_ptrs = residual_ptr + residual_offset[:, None] + cols[None, :]
        residual = tl.load(residual_ptrs, mask=mask, other=0.0)
        added = x.to(tl.float32)
        if squares_ptr is not None:
            # In a tile like that of x, so that the sums are where its rows are.
            is_part = (rows < num_rows)[:, None] & (cols < SQUARES)[None, :]
            squares_ptrs = squares_ptr + (rows * SQUARES)[:, None] + cols[None, :]
            squares = tl.sum(tl.load(squares_ptrs, mask=is_part, other=0.0), axis=1)
            added *= (1.0 / tl.sqrt(squares / size + scale_eps))[:, None]
        x = (added + residual.to(tl.float32)).to(x.dtype)
        tl.store(residual_ptrs, x, mask=mask)
    row = x.to(tl.float32)
    mean_square = tl.sum(row * row, axis=1) / DIM
    normed = row * (1.0 / tl.sqrt(mean_square + eps))[:, None]
    result = weighed(normed, weight, DTYPE, UNIT_OFFSET, WIDE)
    out_offset = token * stride_out_token + head * stride_out_head
    tl.store(out_ptr + out_offset[:, None] + cols[None, :], result.to(x.dtype), mask=mask)


def launch_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    *,
    eps: float,
    unit_offset: bool,
    wide: bool,
    out: Tensor,
    scale: RowScale | None = None,
) -> None:
    """One program per block of rows; arguments as checked by kernels/rms_norm.py."""
    parts, stride_part = 1, 0
    if residual is not None and x.dim() > residual.dim():  # [parts, tokens, dim]
        (parts, *_), (stride_part, *_) = x.shape, x.stride()
        x = x[0]
    dim = x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    num_rows = x.shape[0] * heads
    if num_rows == 0:
        return
    squares, size, scale_eps = scale or UNSCALED
    num_squares = 0 if squares is None else squares.shape[1]
    block_dim = next_power_of_2(max(dim, num_squares))
    block_rows = max(1, 1024 // block_dim)
    added = x if residual is None else residual
    launch(
        _rms_norm_kernel,
        (cdiv(num_rows, block_rows),),
        x,
        added,
        weight,
        squares,
        out,
        stride_part,
        x.stride(0),
        x.stride(1) if x.dim() == 3 else 0,
        added.stride(0),
        added.stride(1) if added.dim() == 3 else 0,
        out.stride(0),
        out.stride(1) if out.dim() == 3 else 0,
        num_rows,
        heads,
        eps,
        size,
        scale_eps,
        DIM=dim,
        ADD=residual is not None,
        PARTS=parts,
        SQUARES=num_squares,
        UNIT_OFFSET=unit_offset,
        WIDE=wide,
        BLOCK_ROWS=block_rows,
        BLOCK_DIM=block_dim,
        IS_ONE=num_rows <= block_rows,
        num_warps=min(max(block_rows * block_dim // 512, 1), 16),
        **overlap_options(x.device, _rms_norm_kernel),
    )
