"""Triton kernels of moe_experts for one token: its experts are read once, as fast as memory gives
them, as one token's product of `skinny_linear` is.

Two launches: gate and up of each expert, whose programs hold whole rows in registers; and down,
whose programs hold a row of every expert at once, so that they add up the experts too.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.primitives import swiglu
from paceline.kernels._triton.runtime import cdiv, next_power_of_2
from paceline.kernels.moe_experts import ExpertWeights, SwiGLU
from paceline.kernels.moe_route import Routing

_WARPS = 8
_ROW_ELEMENTS = 4096  # of one program's gate rows, at least, and of its up rows
_MOST_ELEMENTS = 32768  # of one program


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
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    slot = tl.program_id(1)
    expert = tl.load(expert_ids_ptr + slot).to(tl.int64)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = tl.arange(0, BLOCK_HIDDEN)
    live = row < INTER
    mask = live[:, None] & (cols < HIDDEN)[None, :]
    gate_ptrs = weight_ptr + (expert * (2 * INTER) + 2 * row)[:, None] * HIDDEN + cols[None, :]
    gate = tl.load(gate_ptrs, mask=mask, other=0.0, eviction_policy="evict_first")
    up = tl.load(gate_ptrs + HIDDEN, mask=mask, other=0.0, eviction_policy="evict_first")
    let_next_start(OVERLAPPED)
    x = tl.load(x_ptr + cols, mask=cols < HIDDEN, other=0.0).to(tl.float32)[None, :]
    gate = tl.sum(gate.to(tl.float32) * x, axis=1)
    up = tl.sum(up.to(tl.float32) * x, axis=1)
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + expert * (2 * INTER) + 2 * row
        gate += tl.load(bias_ptrs, mask=live, other=0.0).to(tl.float32)
        up += tl.load(bias_ptrs + 1, mask=live, other=0.0).to(tl.float32)
    gated = swiglu(gate, up, alpha, up_offset, LIMIT)
    tl.store(out_ptr + slot * INTER + row, gated.to(out_ptr.dtype.element_ty), mask=live)


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
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_INTER: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    row = tl.program_id(0)
    slot = tl.arange(0, BLOCK_SLOTS)
    cols = tl.arange(0, BLOCK_INTER)
    live = slot < SLOTS
    expert = tl.load(expert_ids_ptr + slot, mask=live, other=0).to(tl.int64)
    at = expert * HIDDEN + row
    mask = live[:, None] & (cols < INTER)[None, :]
    weight = tl.load(
        weight_ptr + at[:, None] * INTER + cols[None, :],
        mask=mask,
        other=0.0,
        eviction_policy="evict_first",
    )
    let_next_start(OVERLAPPED)
    gated = tl.load(gated_ptr + slot[:, None] * INTER + cols[None, :], mask=mask, other=0.0)
    share = tl.load(routing_weights_ptr + slot, mask=live, other=0.0)
    product = tl.sum(weight.to(tl.float32) * gated.to(tl.float32), axis=1)
    if bias_ptr is not None:
        product += tl.load(bias_ptr + at, mask=live, other=0.0).to(tl.float32)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    total = tl.sum(product * share, axis=0).to(DTYPE)
    if plus_ptr is not None:
        total = (total.to(tl.float32) + tl.load(plus_ptr + row).to(tl.float32)).to(DTYPE)
    tl.store(out_ptr + row, total)


def fits_one_token(x: Tensor, routing: Routing, weights: ExpertWeights) -> bool:
    """Whether these are the kernels for it: one token, and rows that registers hold."""
    slots, (_, hidden, inter) = routing.expert_ids.shape[1], weights.down.shape
    largest = max(2 * next_power_of_2(hidden), next_power_of_2(slots) * next_power_of_2(inter))
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
    block_rows = max(1, _ROW_ELEMENTS // block_hidden)
    launch(
        _one_gate_up_kernel,
        (cdiv(inter, block_rows), slots),
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
        num_warps=_WARPS,
        **overlap_options(x.device, _one_gate_up_kernel),
    )
    launch(
        _one_down_kernel,
        (hidden,),
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
        BLOCK_SLOTS=next_power_of_2(slots),
        BLOCK_INTER=next_power_of_2(inter),
        num_warps=_WARPS,
        **overlap_options(x.device, _one_down_kernel),
    )
