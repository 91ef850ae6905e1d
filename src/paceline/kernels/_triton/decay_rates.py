"""Triton kernel of decay_rates; see kernels/decay_rates.py for the definition."""

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.runtime import cdiv

_BLOCK = 128  # heads of tokens of a program


@triton.jit
def step_of(
    a,  # float32  a token's, with the bias of its head
    least,
    most,
):
    """softplus(a), within limits."""
    # log(1 + e) where 1 + e is rounded: Kahan's correction (Goldberg 1991, theorem 4).
    e = tl.exp(tl.where(a > 20.0, 20.0, a))
    wide = 1.0 + e
    step = tl.where(wide == 1.0, e, tl.log(wide) * (e / tl.where(wide == 1.0, 1.0, wide - 1.0)))
    step = tl.where(a > 20.0, a, step)
    # Compared, not clamped: NaN stays NaN.
    return tl.where(step < least, least, tl.where(step > most, most, step))


@triton.jit(do_not_specialize=["num"])
def _decay_rates_kernel(
    given_ptr,  # [tokens, parts, PER_PART or 2 * PER_PART]
    bias_ptr,  # [heads] float32
    log_ptr,  # [heads] float32
    decay_ptr,  # [tokens, heads] float32
    rate_ptr,  # [tokens, heads] float32
    stride_token,
    stride_part,
    num,
    least,
    most,
    HEADS: tl.constexpr,
    PER_PART: tl.constexpr,
    HAS_BETA: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = place < num
    token, head = place // HEADS, place % HEADS
    bias = tl.load(bias_ptr + head, mask=live, other=0.0)
    speed = tl.exp(tl.load(log_ptr + head, mask=live, other=0.0))
    wait_for_inputs(OVERLAPPED)
    let_next_start(OVERLAPPED)
    given_ptr += token * stride_token + head // PER_PART * stride_part + head % PER_PART
    a = tl.load(given_ptr + (PER_PART if HAS_BETA else 0), mask=live, other=0.0).to(tl.float32)
    step = step_of(a + bias, least, most)
    tl.store(decay_ptr + place, -speed * step, mask=live)
    if HAS_BETA:
        b = tl.load(given_ptr, mask=live, other=0.0).to(tl.float32)
        tl.store(rate_ptr + place, 1.0 / (1.0 + tl.exp(-b)), mask=live)
    else:
        tl.store(rate_ptr + place, step, mask=live)


def launch_decay_rates(
    given: Tensor,
    bias: Tensor,
    log: Tensor,
    least: float,
    most: float,
    has_beta: bool,
    decay: Tensor,
    rate: Tensor,
) -> None:
    """A program for some heads of tokens; arguments as checked by kernels/decay_rates.py."""
    heads, parts = bias.shape[0], given.shape[1]
    launch(
        _decay_rates_kernel,
        (cdiv(decay.numel(), _BLOCK),),
        given,
        bias,
        log,
        decay,
        rate,
        given.stride(0),
        given.stride(1),
        decay.numel(),
        least,
        most,
        HEADS=heads,
        PER_PART=heads // parts,
        HAS_BETA=has_beta,
        BLOCK=_BLOCK,
        num_warps=4,
        **overlap_options(given.device, _decay_rates_kernel),
    )
