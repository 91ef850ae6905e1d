"""Triton kernel of round_rows; see kernels/round_rows.py for the definition."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.runtime import next_power_of_2, require_runnable
from paceline.kernels.packed_weight import CHUNK

_CHUNK = tl.constexpr(CHUNK)


@triton.jit
def _round_rows_kernel(
    x_ptr,  # [tokens, columns]
    codes_ptr,  # [rows, chunks * CHUNK] float8e4nv
    scale_ptr,  # [groups, rows]
    stride_x_token,
    columns,
    chunks,
    rows,
    CHUNKS: tl.constexpr,  # of one program
    GROUPED: tl.constexpr,  # a scale for each chunk
    OVERLAPPED: tl.constexpr,
):
    let_next_start(OVERLAPPED)
    wait_for_inputs(OVERLAPPED)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS)
    at = tl.arange(0, _CHUNK)
    # Byte j + 2 p of word 16 h + 4 t + i of a chunk is column 16 (4 h + i) + 8 j + 2 t + p.
    word = at // 4
    local = (word // 16 * 4 + word % 4) * 16 + at % 2 * 8 + word // 4 % 4 * 2 + at // 2 % 2
    column = chunk[:, None] * _CHUNK + local[None, :]
    x_ptrs = x_ptr + row * stride_x_token + column
    x = tl.load(x_ptrs, mask=column < columns, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(x), axis=1)
    if not GROUPED:
        largest = tl.zeros_like(largest) + tl.max(largest, axis=0)
    scale = tl.maximum(largest / 448.0, 1e-12)
    moved = x / scale[:, None]
    moved = tl.where(moved > 448.0, 448.0, tl.where(moved < -448.0, -448.0, moved))
    live = chunk < chunks
    code_ptrs = codes_ptr + row * (chunks * _CHUNK) + chunk[:, None] * _CHUNK + at[None, :]
    tl.store(code_ptrs, moved.to(tl.float8e4nv), mask=live[:, None])
    group = chunk if GROUPED else chunk * 0
    tl.store(scale_ptr + group * rows + row, scale, mask=live)


def launch_round_rows(x: Tensor, codes: Tensor, scale: Tensor) -> None:
    """One kernel; arguments as checked by kernels/round_rows.py."""
    require_runnable("x of round_rows", x, _round_rows_kernel, otherwise="use unpack_weight")
    tokens, columns = x.shape
    chunks, (groups, rows) = codes.shape[1] // CHUNK, scale.shape
    grouped = groups > 1
    per_program = min(8, next_power_of_2(chunks)) if grouped else next_power_of_2(chunks)
    launch(
        _round_rows_kernel,
        (tokens, -(-chunks // per_program)),
        x,
        codes.view(torch.float8_e4m3fn),
        scale,
        x.stride(0),
        columns,
        chunks,
        rows,
        CHUNKS=per_program,
        GROUPED=grouped,
        num_warps=8 if per_program > 16 else 4,
        **overlap_options(x.device, _round_rows_kernel),
    )
