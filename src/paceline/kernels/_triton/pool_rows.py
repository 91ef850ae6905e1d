"""Triton kernel of pool_rows; see kernels/pool_rows.py for the definition."""

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.runtime import cdiv

_COLUMNS, _TOKENS = 64, 128  # of one program; of one of its loads


@triton.jit
def _pool_rows_kernel(
    hidden_ptr,  # [tokens, width]
    cu_seqlens_q_ptr,  # [padded_reqs + 1] int32
    out_ptr,  # [padded_reqs, width] float32
    stride_hidden_token,
    stride_out_req,
    width,
    POOLING: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    let_next_start(OVERLAPPED)
    req = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = cols < width
    first = tl.load(cu_seqlens_q_ptr + req)
    stop = tl.load(cu_seqlens_q_ptr + req + 1)
    if POOLING == "last":
        first = tl.maximum(first, stop - 1)
    if POOLING == "cls":
        stop = tl.minimum(stop, first + 1)
    total = tl.zeros((BLOCK_C,), dtype=tl.float32)
    for start in range(first, stop, BLOCK_T):
        tokens = start + tl.arange(0, BLOCK_T)
        row_ptr = hidden_ptr + tokens.to(tl.int64)[:, None] * stride_hidden_token
        is_read = (tokens < stop)[:, None] & mask[None, :]
        total += tl.sum(tl.load(row_ptr + cols[None, :], mask=is_read, other=0.0).to(tl.float32), 0)
    num = tl.maximum(stop - first, 1).to(tl.float32)
    tl.store(out_ptr + req * stride_out_req + cols, total / num, mask=mask)


def launch_pool_rows(hidden: Tensor, cu_seqlens_q: Tensor, pooling: str, out: Tensor) -> None:
    """One program per request and block of columns."""
    reqs, width = out.shape
    launch(
        _pool_rows_kernel,
        (reqs, cdiv(width, _COLUMNS)),
        hidden,
        cu_seqlens_q,
        out,
        hidden.stride(0),
        out.stride(0),
        width,
        POOLING=pooling,
        BLOCK_T=_TOKENS,
        BLOCK_C=_COLUMNS,
        num_warps=4,
        **overlap_options(hidden.device, _pool_rows_kernel),
    )
