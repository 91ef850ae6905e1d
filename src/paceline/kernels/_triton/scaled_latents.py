"""Scaled latents in kernels: what paged_extend does with a tile of them, and how they are made; see
kernels/scaled_latents.py.

A code becomes float16, in one instruction for two, and loses nothing.  Tiles of few rows read codes
two to a word of 16 bits: what loads a matrix unit's registers transposes no less.  A word is the
codes of columns 2j and 2j + 1, so queries and sums come in halves, of even and of odd columns.
"""

import triton
import triton.language as tl

from paceline.kernels._triton.primitives import dot


@triton.jit
def codes_of(
    words,  # [keys, columns] int16
    SHIFT: tl.constexpr,  # 0: of even columns; 8: of odd ones
):
    """[keys, columns] float16: the codes in the low or in the high byte."""
    return ((words >> SHIFT) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)


@triton.jit
def halves_of(
    x,  # [rows, columns]
):
    """Its even and its odd columns."""
    return tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))


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
            scores = dot(q, tl.trans(codes_of(codes, 0)), zeros, WIDEN)
            scores = dot(q_odd, tl.trans(codes_of(codes, 8)), scores, WIDEN)
        else:
            scores = dot(q, tl.trans(codes), zeros, WIDEN)
        scores = scores * scale * row_scale[None, :]
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
    held = tl.maximum(row_scale, 1.1754943508222875e-38)  # of a slot never written it is 0
    scores += tl.log2(held)[None, :]
    new_max = tl.maximum(running_max, tl.max(scores, axis=1))
    finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - finite_max[:, None])
    decay = tl.exp2(running_max - finite_max)
    running_sums = running_sums * decay[:, None] + weights / held[None, :]
    weights = weights.to(tl.float16)
    if codes.dtype == tl.int16:
        acc = dot(weights, codes_of(codes, 0), acc * decay[:, None], WIDEN)
        acc_odd = dot(weights, codes_of(codes, 8), acc_odd * decay[:, None], WIDEN)
    else:
        acc = dot(weights, codes, acc * decay[:, None], WIDEN)
    return new_max, running_sums, acc, acc_odd
