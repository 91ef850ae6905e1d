"""Scaled latents in kernels: what paged_extend does with a tile of them, and how they are made; see
kernels/scaled_latents.py.

A code becomes float16, in one instruction for two, and loses nothing.  Tiles of few rows read codes
two to a word of 16 bits: what loads a matrix unit's registers transposes no less.  A word is the
codes of columns 2j and 2j + 1, so queries and sums come in halves, of even and of odd columns:
two words in a register, (1 0) and (3 2), are sorted to (2 0) and (3 1), in one instruction.
"""

import triton
import triton.language as tl

from paceline.kernels._triton.primitives import dot
from paceline.kernels._triton.runtime import interpreted


@triton.jit
def _codes_by_bits(
    words,  # [keys, columns] int16
):
    """As `codes_of`, in operations that the interpreter knows."""
    even = (words & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    odd = ((words >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return even, odd


@triton.jit
def _codes_by_pairs(
    words,  # [keys, columns] int16
):
    """As `codes_of`: bytes of two words sorted in one instruction, then one for two numbers.  (PTX
    ISA, prmt and cvt.)"""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 sorted;
        .reg .b16 low, high;
        prmt.b32 sorted, $2, $2, 0x3120;
        mov.b32 {low, high}, sorted;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
        }""",
        "=r,=r,r",
        [words],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


# (even, odd) [keys, columns] float16: the codes in the low and in the high bytes of words.
codes_of = _codes_by_bits if interpreted(_codes_by_bits) else _codes_by_pairs


@triton.jit
def halves_of(
    x,  # [rows, columns]
):
    """Its even and its odd columns."""
    return tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))


@triton.jit
def laid_down(
    q,  # [rows, columns]
    places,  # [rows, columns] pointers
    mask,  # [rows, columns] bool
):
    """q, by way of memory.  The left operand of an asynchronous product lies in shared memory where
    it was loaded; one that was computed stays in registers, half of all that a thread has for 64
    rows, and for want of registers each product then waits for the one before.
    """
    tl.store(places, q, mask=mask)
    tl.debug_barrier()
    return tl.load(places, mask=mask, other=0.0)


@triton.jit
def quantised(
    latent,  # [columns], 0 behind the last
):
    """(codes [columns] float8e4nv, scale): a row of a cache."""
    wide = latent.to(tl.float32)
    magnitudes = tl.where(wide == wide, tl.abs(wide), 0.0)
    largest = tl.maximum(tl.max(magnitudes, axis=0), 6.103515625e-05)
    # As in latent_scales: 448 is 1.75 * 2 ** 8, and a larger fraction carries.
    exponent = ((largest.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    # A power of two: its inverse is one, and the product exact.
    codes = wide * ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    # Compared, not clamped: NaN stays NaN.
    codes = tl.where(codes > 448.0, 448.0, tl.where(codes < -448.0, -448.0, codes))
    return codes.to(tl.float8e4nv), scale


@triton.jit
def scaled_scores(
    q,  # [rows, BLOCK_DIM_K] float16; of words the even columns
    q_odd,  # of words the odd columns
    q_rest,  # [rows, BLOCK_REST]
    codes,  # [keys, BLOCK_DIM_K] float16, or words [keys, BLOCK_DIM_K // 2] int16
    rest,  # [keys, BLOCK_REST]
    row_scale,  # [keys] float32
    scale,  # [rows, 1] of narrowed queries
    scale_rest,
    always,  # bool, true
    IN_HALVES: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """As `latent_scores`."""
    zeros = tl.zeros([q.shape[0], codes.shape[0]], tl.float32)
    if not IN_HALVES or always:
        if codes.dtype == tl.int16:
            even, odd = codes_of(tl.trans(codes))
            factor = scale * row_scale[None, :]
            scores = dot(q, even, zeros, WIDEN) * factor + dot(q_odd, odd, zeros, WIDEN) * factor
        else:
            scores = dot(q, tl.trans(codes), zeros, WIDEN) * scale * row_scale[None, :]
        scores += dot(q_rest, tl.trans(rest), zeros, WIDEN) * scale_rest
    else:
        scores = dot(q_rest, tl.trans(rest), zeros, WIDEN)
    return scores


@triton.jit
def scaled_step(
    scores,  # [rows, keys] float32 log2 units, −inf where masked
    codes,  # [keys, BLOCK_DIM_V] float16, or words [keys, BLOCK_DIM_V // 2] int16
    row_scale,  # [keys] float32
    running_max,  # [rows] float32
    running_sums,  # [rows, keys] float32
    acc,  # [rows, BLOCK_DIM_V] float32; of words the even columns
    acc_odd,  # of words the odd columns
    WIDEN: tl.constexpr,
):
    """As `latent_step`, of weights times scales: their maximum is the running one, so that none is
    above 1, nor lost in 16 bits for a small scale.  What the sums get is divided again.
    """
    # A power of two is its exponent; of a slot never written it is 0.
    exponent = tl.maximum(row_scale.to(tl.int32, bitcast=True) >> 23, 1)
    scores += (exponent - 127).to(tl.float32)[None, :]
    new_max = tl.maximum(running_max, tl.max(scores, axis=1))
    finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - finite_max[:, None])
    decay = tl.exp2(running_max - finite_max)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    running_sums = running_sums * decay[:, None] + weights * inverse[None, :]
    weights = weights.to(tl.float16)
    if codes.dtype == tl.int16:
        even, odd = codes_of(codes)
        acc = dot(weights, even, acc * decay[:, None], WIDEN)
        acc_odd = dot(weights, odd, acc_odd * decay[:, None], WIDEN)
    else:
        acc = dot(weights, codes, acc * decay[:, None], WIDEN)
    return new_max, running_sums, acc, acc_odd
