"""Triton kernel of moe_route; see kernels/moe_route.py for the definition."""

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.runtime import next_power_of_2


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
    row_ptr = logits_ptr + token * stride_logits_token
    logits = tl.load(row_ptr + experts, mask=is_real, other=float("-inf")).to(tl.float32)
    # Above -inf even for a NaN, so that a padded column is never chosen.
    lowest = -3.4028234663852886e38
    keys = tl.where(is_real, tl.where(logits > lowest, logits, lowest), float("-inf"))
    top = tl.max(keys, axis=0)
    chosen = tl.full((BLOCK_SLOTS,), float("-inf"), tl.float32)
    ids = tl.zeros((BLOCK_SLOTS,), tl.int32)
    for slot in tl.static_range(EXPERTS_PER_TOKEN):
        best = tl.argmax(keys, axis=0)
        is_best = experts == best
        chosen = tl.where(slots == slot, tl.sum(tl.where(is_best, logits, 0.0), axis=0), chosen)
        ids = tl.where(slots == slot, best, ids)
        keys = tl.where(is_best, float("-inf"), keys)
    if RENORMALIZE:
        total = tl.sum(tl.exp(chosen - top), axis=0)
    else:
        total = tl.sum(tl.exp(logits - top), axis=0)
    weights = tl.exp(chosen - top) / total
    at = token * EXPERTS_PER_TOKEN + slots
    tl.store(weights_ptr + at, weights, mask=slots < EXPERTS_PER_TOKEN)
    tl.store(expert_ids_ptr + at, ids, mask=slots < EXPERTS_PER_TOKEN)


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
        num_warps=max(1, min(4, block_experts // 128)),
        **overlap_options(logits.device, _moe_route_kernel),
    )
