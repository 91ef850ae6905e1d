"""Triton kernel of scaled_linear; see kernels/scaled_linear.py for the definition."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.launch import launch, overlap_options, wait_for_inputs
from paceline.kernels._triton.runtime import cdiv, next_power_of_2, require_runnable
from paceline.kernels.packed_weight import CHUNK

_CHUNK = tl.constexpr(CHUNK)
_CHUNKS = 8  # of a program, where each has a scale


@triton.jit
def _round_rows_kernel(
    x_ptr,  # [tokens, columns]
    codes_ptr,  # [rows, chunks * CHUNK] float8e4nv
    scale_ptr,  # [groups, rows]
    stride_x_token,
    columns,
    chunks,
    rows,
    CHUNKS: tl.constexpr,  # of a program: all, unless each has a scale
    IS_GROUPED: tl.constexpr,  # each has
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS)
    at = tl.arange(0, _CHUNK)
    column = chunk[:, None] * _CHUNK + at[None, :]
    x = tl.load(x_ptr + row * stride_x_token + column, mask=column < columns, other=0.0)
    x = x.to(tl.float32)
    largest = tl.max(tl.abs(x), axis=1)
    if not IS_GROUPED:
        largest = tl.zeros_like(largest) + tl.max(largest, axis=0)
    scale = tl.maximum(largest / 448.0, 1e-12)
    moved = x / scale[:, None]
    moved = tl.where(moved > 448.0, 448.0, tl.where(moved < -448.0, -448.0, moved))
    # From columns 16 (4 h + i) + 8 j + 2 t + p to bytes j + 2 p of words 16 h + 4 t + i.  Moving
    # codes costs less than reading x in their order.
    fields = tl.reshape(moved.to(tl.float8e4nv), (CHUNKS, 2, 4, 2, 4, 2))  # h, i, j, t, p
    codes = tl.reshape(tl.permute(fields, (0, 1, 4, 2, 5, 3)), (CHUNKS, _CHUNK))
    live = chunk < chunks
    code_ptrs = codes_ptr + row * (chunks * _CHUNK) + chunk[:, None] * _CHUNK + at[None, :]
    tl.store(code_ptrs, codes, mask=live[:, None])
    group = chunk if IS_GROUPED else 0 * chunk
    tl.store(scale_ptr + group * rows + row, scale, mask=live)


def launch_round_rows(x: Tensor, codes: Tensor, scale: Tensor, *, is_grouped: bool) -> None:
    """One kernel; arguments as checked by kernels/scaled_linear.py; scale: [groups, rows]."""
    require_runnable("x of scaled_linear", x, _round_rows_kernel, otherwise="use unpack_weight")
    (tokens, columns), (rows, padded) = x.shape, codes.shape
    chunks = padded // CHUNK
    per_program = _CHUNKS if is_grouped else next_power_of_2(chunks)
    launch(
        _round_rows_kernel,
        (tokens, cdiv(chunks, per_program)),
        x,
        codes.view(torch.float8_e4m3fn),
        scale,
        x.stride(0),
        columns,
        chunks,
        rows,
        CHUNKS=per_program,
        IS_GROUPED=is_grouped,
        num_warps=2 if is_grouped else min(max(per_program // 2, 2), 16),
        **overlap_options(x.device, _round_rows_kernel),
    )
