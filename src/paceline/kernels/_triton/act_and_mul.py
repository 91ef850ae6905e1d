"""Triton kernel of act_and_mul; see kernels/act_and_mul.py for the definition."""

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.primitives import gated_activation
from paceline.kernels._triton.runtime import cdiv

_BLOCK = 1024


@triton.jit
def _act_and_mul_kernel(
    x_ptr,  # [tokens, 2 * inter] gate | up
    out_ptr,  # [tokens, inter]
    stride_x_token,
    stride_out_token,
    inter,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    let_next_start(OVERLAPPED)
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < inter
    row_ptr = x_ptr + token * stride_x_token
    gate = tl.load(row_ptr + cols, mask=mask, other=0.0)
    up = tl.load(row_ptr + inter + cols, mask=mask, other=0.0)
    result = gated_activation(gate, up, ACTIVATION)
    tl.store(out_ptr + token * stride_out_token + cols, result.to(gate.dtype), mask=mask)


def launch_act_and_mul(x: Tensor, kind: str, out: Tensor) -> None:
    """One program per token and block of columns."""
    tokens, inter = out.shape
    if tokens == 0:
        return
    launch(
        _act_and_mul_kernel,
        (tokens, cdiv(inter, _BLOCK)),
        x,
        out,
        x.stride(0),
        out.stride(0),
        inter,
        ACTIVATION=kind,
        BLOCK=_BLOCK,
        num_warps=4,
        **overlap_options(x.device, _act_and_mul_kernel),
    )
