"""Triton kernel of moe_route; see kernels/moe_route.py for the definition."""

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.runtime import next_power_of_2

_LOWEST_32 = tl.constexpr(-(2**31))
_LOWEST_64 = tl.constexpr(-(2**63))
_MOST_OF_A_WARP = 512  # experts


@triton.jit
def _ranked(
    logits,  # [experts]
    experts,  # [experts]
    is_real,  # [experts] bool
):
    """(integers in the order of logits, equal ones of the lower id first; what is below all): the
    bits of a float, those below the sign turned over where it is set, above those of the id.  NaN
    comes last, before the padding.  The largest integer of a warp is one instruction.
    """
    wide = logits.to(tl.float32)
    if logits.dtype == tl.float32:
        bits = wide.to(tl.int32, bitcast=True)
        LOWEST: tl.constexpr = _LOWEST_32
    else:
        bits = logits.to(tl.int16, bitcast=True).to(tl.int32)
        LOWEST: tl.constexpr = -32768
    bits = tl.where(wide == 0.0, 0, bits)  # of either sign
    ordered = tl.where(wide == wide, bits ^ ((bits >> 31) & ~LOWEST), LOWEST)
    if logits.dtype == tl.float32:
        ranked = (ordered.to(tl.int64) << 32) | (0xFFFFFFFF - experts.to(tl.int64))
        NEVER: tl.constexpr = _LOWEST_64
    else:
        ranked = (ordered << 16) | (0xFFFF - experts)
        NEVER: tl.constexpr = _LOWEST_32
    return tl.where(is_real, ranked, NEVER), NEVER


@triton.jit
def _unranked(
    ranked,  # of `_ranked`
    DTYPE: tl.constexpr,
):
    """(logits float32, ids)."""
    if tl.float32 == DTYPE:
        ordered = (ranked >> 32).to(tl.int32)
        bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
        logits = bits.to(tl.float32, bitcast=True)
        ids = (0xFFFFFFFF - (ranked & 0xFFFFFFFF)).to(tl.int32)
    else:
        ordered = ranked >> 16
        bits = ordered ^ ((ordered >> 31) & 0x7FFF)
        logits = bits.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        ids = 0xFFFF - (ranked & 0xFFFF)
    return logits, ids


@triton.jit
def _moe_route_kernel(
    logits_ptr,  # [tokens, num_experts]
    weights_ptr,  # [tokens, EXPERTS_PER_TOKEN] float32
    expert_ids_ptr,  # [tokens, EXPERTS_PER_TOKEN] int32
    stride_logits_token,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PER_TOKEN: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    let_next_start(OVERLAPPED)
    wait_for_inputs(OVERLAPPED)
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK_EXPERTS)
    slots = tl.arange(0, BLOCK_SLOTS)
    is_real = experts < NUM_EXPERTS
    is_slot = slots < EXPERTS_PER_TOKEN
    row_ptr = logits_ptr + token * stride_logits_token
    logits = tl.load(row_ptr + experts, mask=is_real, other=float("-inf"))
    ranked, never = _ranked(logits, experts, is_real)
    top, _ = _unranked(tl.max(ranked, axis=0), logits.dtype)
    first = tl.zeros((BLOCK_SLOTS,), ranked.dtype)
    for slot in tl.static_range(EXPERTS_PER_TOKEN):
        best = tl.max(ranked, axis=0)
        first = tl.where(slots == slot, best, first)
        ranked = tl.where(ranked == best, never, ranked)
    chosen, ids = _unranked(first, logits.dtype)
    if RENORMALIZE:
        total = tl.sum(tl.where(is_slot, tl.exp(chosen - top), 0.0), axis=0)
    else:
        total = tl.sum(tl.exp(logits.to(tl.float32) - top), axis=0)
    weights = tl.exp(chosen - top) / total
    at = token * EXPERTS_PER_TOKEN + slots
    tl.store(weights_ptr + at, weights, mask=is_slot)
    tl.store(expert_ids_ptr + at, ids, mask=is_slot)


def launch_moe_route(
    logits: Tensor, renormalize: bool, weights: Tensor, expert_ids: Tensor
) -> None:
    """One program per token; arguments as checked by kernels/moe_route.py."""
    tokens, num_experts = logits.shape
    if tokens == 0:
        return
    block_experts = next_power_of_2(num_experts)
    launch(
        _moe_route_kernel,
        (tokens,),
        logits,
        weights,
        expert_ids,
        logits.stride(0),
        NUM_EXPERTS=num_experts,
        EXPERTS_PER_TOKEN=weights.shape[1],
        RENORMALIZE=renormalize,
        BLOCK_EXPERTS=block_experts,
        BLOCK_SLOTS=next_power_of_2(weights.shape[1]),
        num_warps=max(1, block_experts // _MOST_OF_A_WARP),
        **overlap_options(logits.device, _moe_route_kernel),
    )
