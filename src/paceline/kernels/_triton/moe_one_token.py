"""Triton kernels of moe_experts for one token: its experts are read once, as fast as memory gives
them, as one token's product of `skinny_linear` is.

Two launches: gate and up of each expert, whose programs hold whole rows in registers; and down,
whose programs have the same few rows of every expert, so that they add up the experts too.  These
programs are of few warps, with many bytes on their way for each thread.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.primitives import swiglu, taken
from paceline.kernels._triton.runtime import next_power_of_2
from paceline.kernels.moe_experts import ExpertWeights, SwiGLU
from paceline.kernels.moe_route import Routing

_ROW_ELEMENTS = 4096  # of one program's gate rows, at least, and of its up rows
# Of one program's down rows of an expert, at least; rows only where they fit _ROW_ELEMENTS.
_DOWN_ELEMENTS, _DOWN_ROWS, _DOWN_WARPS = 2048, 2, 2
_MOST_ELEMENTS = 32768  # of one program at a time
_WARP_ELEMENTS = 2048  # of one of its warps
# Rows of a matrix in one program at most, and columns of each of its warps at least: warps that lie
# along rows would hand each other the sums.
_MOST_ROWS, _WARP_COLS = 4, 256
_STEPS = 2  # of a program of gate and up: it waits for its expert's id once


@triton.jit
def _one_gate_up_kernel(
    x_ptr,  # [HIDDEN]
    weight_ptr,  # [num_experts, 2 * INTER, HIDDEN] gate and up rows interleaved
    bias_ptr,  # [num_experts, 2 * INTER] or None
    expert_ids_ptr,  # [experts_per_token] int32
    out_ptr,  # [experts_per_token, INTER]
    alpha,
    up_offset,
    LIMIT: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr,
    STEPS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    slot = tl.program_id(1)
    expert = tl.load(expert_ids_ptr + slot).to(tl.int64)
    cols = tl.arange(0, BLOCK_HIDDEN)
    inside = cols < HIDDEN
    for step in tl.static_range(STEPS):
        first = (tl.program_id(0) * STEPS + step) * BLOCK_ROWS
        both = 2 * first + tl.arange(0, 2 * BLOCK_ROWS)  # gate and up rows
        at = expert * (2 * INTER) + both
        weight = tl.load(
            weight_ptr + at[:, None] * HIDDEN + cols[None, :],
            mask=inside[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        if step == STEPS - 1:
            let_next_start(OVERLAPPED)
        x = tl.load(x_ptr + cols, mask=inside, other=0.0).to(tl.float32)
        product = tl.sum(weight.to(tl.float32) * x[None, :], axis=1)
        if bias_ptr is not None:
            product += tl.load(bias_ptr + at).to(tl.float32)
        for row in tl.static_range(BLOCK_ROWS):
            gate, up = taken(product, 2 * row), taken(product, 2 * row + 1)
            gated = swiglu(gate, up, alpha, up_offset, LIMIT).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + slot * INTER + first + row, gated)


@triton.jit
def _one_down_kernel(
    gated_ptr,  # [SLOTS, INTER]
    weight_ptr,  # [num_experts, HIDDEN, INTER]
    bias_ptr,  # [num_experts, HIDDEN] or None
    routing_weights_ptr,  # [SLOTS] float32
    expert_ids_ptr,  # [SLOTS] int32
    plus_ptr,  # [HIDDEN] or None
    out_ptr,  # [HIDDEN]
    SLOTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_INTER: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    first = tl.program_id(0) * BLOCK_ROWS
    row = first + tl.arange(0, BLOCK_ROWS)
    cols = tl.arange(0, BLOCK_INTER)
    inside = cols < INTER
    acc = tl.zeros([BLOCK_ROWS, BLOCK_INTER], tl.float32)
    bias = tl.zeros([BLOCK_ROWS], tl.float32)
    # Unrolled: the rows of all experts are asked for before the first is waited for.
    for slot in tl.static_range(SLOTS):
        at = tl.load(expert_ids_ptr + slot).to(tl.int64) * HIDDEN + row
        weight = tl.load(
            weight_ptr + at[:, None] * INTER + cols[None, :],
            mask=inside[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        share = tl.load(routing_weights_ptr + slot)
        gated = tl.load(gated_ptr + slot * INTER + cols, mask=inside, other=0.0)
        acc += weight.to(tl.float32) * (gated.to(tl.float32) * share)[None, :]
        if bias_ptr is not None:
            bias += tl.load(bias_ptr + at).to(tl.float32) * share
    let_next_start(OVERLAPPED)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    totals = tl.sum(acc, axis=1) + bias
    for index in tl.static_range(BLOCK_ROWS):
        total = taken(totals, index).to(DTYPE)
        if plus_ptr is not None:
            plus = tl.load(plus_ptr + first + index)
            total = (total.to(tl.float32) + plus.to(tl.float32)).to(DTYPE)
        tl.store(out_ptr + first + index, total)


def fits_one_token(x: Tensor, weights: ExpertWeights) -> bool:
    """Whether these are the kernels for it: one token, and rows that registers hold."""
    _, hidden, inter = weights.down.shape
    largest = max(2 * next_power_of_2(hidden), next_power_of_2(inter))
    return x.shape[0] == 1 and largest <= _MOST_ELEMENTS


def launch_one_token(
    x: Tensor,
    routing: Routing,
    weights: ExpertWeights,
    *,
    gate: SwiGLU,
    plus: Tensor | None,
    out: Tensor,
) -> None:
    """Arguments as checked by kernels/moe_experts.py, of one token."""
    slots, (_, hidden, inter) = routing.expert_ids.shape[1], weights.down.shape
    gated = torch.empty(slots, inter, dtype=x.dtype, device=x.device)
    block_hidden = next_power_of_2(hidden)
    block_rows = math.gcd(min(max(1, _ROW_ELEMENTS // block_hidden), _MOST_ROWS), inter)
    warps = 2 * block_rows * block_hidden // _WARP_ELEMENTS
    steps = math.gcd(_STEPS, inter // block_rows)
    launch(
        _one_gate_up_kernel,
        (inter // (block_rows * steps), slots),
        x,
        weights.gate_up,
        weights.gate_up_bias,
        routing.expert_ids,
        gated,
        gate.alpha,
        gate.up_offset,
        LIMIT=gate.limit,
        HIDDEN=hidden,
        INTER=inter,
        BLOCK_ROWS=block_rows,
        BLOCK_HIDDEN=block_hidden,
        STEPS=steps,
        num_warps=max(1, min(warps, block_hidden // _WARP_COLS)),
        **overlap_options(x.device, _one_gate_up_kernel),
    )
    block_inter = next_power_of_2(inter)
    few_rows = max(1, min(_DOWN_ROWS, _ROW_ELEMENTS // block_inter))
    block_rows = math.gcd(min(max(few_rows, _DOWN_ELEMENTS // block_inter), _MOST_ROWS), hidden)
    warps = max(_DOWN_WARPS, block_rows * block_inter // _WARP_ELEMENTS)
    launch(
        _one_down_kernel,
        (hidden // block_rows,),
        gated,
        weights.down,
        weights.down_bias,
        routing.weights,
        routing.expert_ids,
        plus,
        out,
        SLOTS=slots,
        HIDDEN=hidden,
        INTER=inter,
        BLOCK_ROWS=block_rows,
        BLOCK_INTER=block_inter,
        num_warps=max(1, min(warps, block_inter // _WARP_COLS)),
        **overlap_options(x.device, _one_down_kernel),
    )
