"""Triton kernel of scaled_linear; see kernels/scaled_linear.py for the definition."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.launch import launch, overlap_options, wait_for_inputs
from paceline.kernels._triton.runtime import next_power_of_2, require_runnable


@triton.jit
def _round_rows_kernel(
    x_ptr,  # [tokens, columns]
    codes_ptr,  # [tokens, padded] float8e4nv
    scale_ptr,  # [tokens]
    stride_x_token,
    columns,
    padded,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    # Byte j + 2 p of word 16 h + 4 t + i of a chunk is column 16 (4 h + i) + 8 j + 2 t + p.
    word = at // 4 % 32
    run = word // 16 * 4 + word % 4
    column = at // 128 * 128 + run * 16 + at % 2 * 8 + word // 4 % 4 * 2 + at // 2 % 2
    x_ptrs = x_ptr + row * stride_x_token
    x = tl.load(x_ptrs + at, mask=at < columns, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), axis=0) / 448.0, 1e-12)
    moved = tl.load(x_ptrs + column, mask=column < columns, other=0.0).to(tl.float32) / scale
    moved = tl.where(moved > 448.0, 448.0, tl.where(moved < -448.0, -448.0, moved))
    tl.store(codes_ptr + row * padded + at, moved.to(tl.float8e4nv), mask=at < padded)
    tl.store(scale_ptr + row, scale)


def launch_round_rows(x: Tensor, codes: Tensor, scale: Tensor) -> None:
    """One kernel; arguments as checked by kernels/scaled_linear.py."""
    require_runnable("x of scaled_linear", x, _round_rows_kernel, otherwise="use unpack_weight")
    tokens, columns = x.shape
    block = next_power_of_2(codes.shape[1])
    launch(
        _round_rows_kernel,
        (tokens,),
        x,
        codes.view(torch.float8_e4m3fn),
        scale,
        x.stride(0),
        columns,
        codes.shape[1],
        BLOCK=block,
        num_warps=8 if block > 2048 else 4,
        **overlap_options(x.device, _round_rows_kernel),
    )
