"""Triton kernels of scaled_linear; see kernels/scaled_linear.py for the definition."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.launch import launch, overlap_options, wait_for_inputs
from paceline.kernels._triton.runtime import cdiv, next_power_of_2, require_runnable
from paceline.kernels.packed_weight import CHUNK

_CHUNK = tl.constexpr(CHUNK)
_CHUNKS = 8  # of a program


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


@triton.jit
def _round_groups_kernel(
    x_ptr,  # [tokens, columns]
    codes_ptr,  # [rows, chunks * CHUNK] float8e4nv
    scale_ptr,  # [chunks, rows]
    stride_x_token,
    columns,
    chunks,
    rows,
    CHUNKS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS)
    at = tl.arange(0, _CHUNK)
    column = chunk[:, None] * _CHUNK + at[None, :]
    x = tl.load(x_ptr + row * stride_x_token + column, mask=column < columns, other=0.0)
    x = x.to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), axis=1) / 448.0, 1e-12)
    moved = x / scale[:, None]
    moved = tl.where(moved > 448.0, 448.0, tl.where(moved < -448.0, -448.0, moved))
    # From columns 16 (4 h + i) + 8 j + 2 t + p to bytes j + 2 p of words 16 h + 4 t + i.
    fields = tl.reshape(moved.to(tl.float8e4nv), (CHUNKS, 2, 4, 2, 4, 2))  # h, i, j, t, p
    codes = tl.reshape(tl.permute(fields, (0, 1, 4, 2, 5, 3)), (CHUNKS, _CHUNK))
    live = chunk < chunks
    code_ptrs = codes_ptr + row * (chunks * _CHUNK) + chunk[:, None] * _CHUNK + at[None, :]
    tl.store(code_ptrs, codes, mask=live[:, None])
    tl.store(scale_ptr + chunk * rows + row, scale, mask=live)


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


def launch_round_groups(x: Tensor, codes: Tensor, scale: Tensor) -> None:
    """The same with a scale for each chunk: [chunks, rows]."""
    require_runnable("x of scaled_linear", x, _round_groups_kernel, otherwise="use unpack_weight")
    tokens, columns = x.shape
    chunks, rows = scale.shape
    launch(
        _round_groups_kernel,
        (tokens, cdiv(chunks, _CHUNKS)),
        x,
        codes.view(torch.float8_e4m3fn),
        scale,
        x.stride(0),
        columns,
        chunks,
        rows,
        CHUNKS=_CHUNKS,
        num_warps=4,
        **overlap_options(x.device, _round_groups_kernel),
    )
