"""Triton kernel of sigmoid_gate; see kernels/sigmoid_gate.py for the definition."""

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.runtime import cdiv

_BLOCK = 1024


@triton.jit
def _sigmoid_gate_kernel(
    x_ptr,  # [tokens, heads, DIM]
    gate_ptr,  # [tokens, heads, DIM], or with ONE [tokens, 1, 1]
    out_ptr,  # [tokens, ROW], contiguous
    stride_x_token,
    stride_x_head,
    stride_gate_token,
    stride_gate_head,
    ROW: tl.constexpr,  # heads * DIM
    DIM: tl.constexpr,
    ONE: tl.constexpr,  # gate of a token
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = place < ROW
    head, col = place // DIM, place % DIM
    gate_ptr += token * stride_gate_token
    wait_for_inputs(OVERLAPPED)
    let_next_start(OVERLAPPED)
    x = tl.load(x_ptr + token * stride_x_token + head * stride_x_head + col, mask=live, other=0.0)
    if ONE:
        gate = tl.load(gate_ptr)
    else:
        gate = tl.load(gate_ptr + head * stride_gate_head + col, mask=live, other=0.0)
    share = (1.0 / (1.0 + tl.exp(-gate.to(tl.float32)))).to(x.dtype)
    result = x.to(tl.float32) * share.to(tl.float32)
    tl.store(out_ptr + token * ROW + place, result.to(x.dtype), mask=live)


def launch_sigmoid_gate(x: Tensor, gate: Tensor, out: Tensor) -> None:
    """A program for a block of a token's row; arguments as checked by kernels/sigmoid_gate.py."""
    tokens, row = out.shape
    if tokens == 0:
        return
    launch(
        _sigmoid_gate_kernel,
        (tokens, cdiv(row, _BLOCK)),
        x,
        gate,
        out,
        x.stride(0),
        x.stride(1),
        gate.stride(0),
        gate.stride(1),
        ROW=row,
        DIM=x.shape[2],
        ONE=gate.shape != x.shape,
        BLOCK=_BLOCK,
        num_warps=4,
        **overlap_options(x.device, _sigmoid_gate_kernel),
    )
