"""Triton kernel of add_layer_norm; see kernels/add_layer_norm.py for the definition."""

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.runtime import cdiv, next_power_of_2


@triton.jit(do_not_specialize=["num_rows"])
def _add_layer_norm_kernel(
    x_ptr,  # [tokens, dim]
    residual_ptr,  # [tokens, dim]
    weight_ptr,  # [dim]
    bias_ptr,  # [dim], or None
    out_ptr,  # [tokens, dim]
    stride_x_token,
    stride_residual_token,
    stride_out_token,
    num_rows,
    eps,
    DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = tl.arange(0, BLOCK_DIM)
    is_col = cols < DIM
    mask = (rows < num_rows)[:, None] & is_col[None, :]
    weight = tl.load(weight_ptr + cols, mask=is_col, other=0.0).to(tl.float32)[None, :]
    wait_for_inputs(OVERLAPPED)
    let_next_start(OVERLAPPED)
    places = rows[:, None] * stride_x_token + cols[None, :]
    x = tl.load(x_ptr + places, mask=mask, other=0.0)
    places = rows[:, None] * stride_residual_token + cols[None, :]
    residual = tl.load(residual_ptr + places, mask=mask, other=0.0)
    row = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype).to(tl.float32)
    mean = tl.sum(row, axis=1) / DIM
    centred = tl.where(is_col[None, :], row - mean[:, None], 0.0)
    variance = tl.sum(centred * centred, axis=1) / DIM
    result = centred * (1.0 / tl.sqrt(variance + eps))[:, None] * weight
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + cols, mask=is_col, other=0.0)
        result += bias.to(tl.float32)[None, :]
    places = rows[:, None] * stride_out_token + cols[None, :]
    tl.store(out_ptr + places, result.to(x.dtype), mask=mask)


def launch_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor
) -> None:
    """One program per block of rows; arguments as checked by kernels/add_layer_norm.py."""
    num_rows, dim = x.shape
    if num_rows == 0:
        return
    block_dim = next_power_of_2(dim)
    block_rows = max(1, 1024 // block_dim)
    launch(
        _add_layer_norm_kernel,
        (cdiv(num_rows, block_rows),),
        x,
        residual,
        weight,
        bias,
        out,
        x.stride(0),
        residual.stride(0),
        out.stride(0),
        num_rows,
        eps,
        DIM=dim,
        BLOCK_ROWS=block_rows,
        BLOCK_DIM=block_dim,
        num_warps=min(max(block_rows * block_dim // 512, 1), 16),
        **overlap_options(x.device, _add_layer_norm_kernel),
    )
