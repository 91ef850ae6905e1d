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
def _number_of(
    byte,  # [keys, columns] int16, 0..255
):
    """float16; NaN, which the interpreter takes for 480."""
    number = byte.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return tl.where((byte & 0x7F) == 0x7F, float("nan"), number)


@triton.jit
def _codes_by_bits(
    words,  # [keys, columns] int16
):
    """As `codes_of`, in operations that the interpreter knows."""
    return _number_of(words & 0xFF), _number_of((words >> 8) & 0xFF)


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
def halves_of_parts(
    x,  # PARTS of [rows, columns]
    PARTS: tl.constexpr,
):
    """Their even and their odd columns."""
    evens = ()
    odds = ()
    for part in tl.static_range(PARTS):
        here = x[part]
        even, odd = tl.split(tl.reshape(here, [here.shape[0], here.shape[1] // 2, 2]))
        evens += (even,)
        odds += (odd,)
    return evens, odds


@triton.jit
def narrow_parts(
    q,  # PARTS of [rows, columns] in the model's dtype
    scale,
    PARTS: tl.constexpr,
):
    """As `narrow_query`, of rows in parts; the power of two is the exponent's bits."""
    if q[0].dtype == tl.float32:
        return q, scale
    else:
        largest = tl.max(tl.abs(q[0].to(tl.float32)), axis=1)
        for part in tl.static_range(1, PARTS):
            largest = tl.maximum(largest, tl.max(tl.abs(q[part].to(tl.float32)), axis=1))
        exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 1), 253)
        unit = (exponent << 23).to(tl.float32, bitcast=True)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        narrowed = ()
        for part in tl.static_range(PARTS):
            wide = q[part].to(tl.float32) * inverse[:, None]
            narrowed += (wide.to(tl.float16),)
        return narrowed, scale * unit[:, None]


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
    q,  # PARTS of [rows, BLOCK_DIM_K // PARTS] float16; of words the even columns
    q_odd,  # of words the odd columns
    q_rest,  # [rows, BLOCK_REST]
    codes,  # PARTS of [keys, BLOCK_DIM_K // PARTS] float16, or of words, half as many, int16
    rest,  # [keys, BLOCK_REST]
    row_scale,  # [keys] float32
    scale,  # [rows, 1] of narrowed queries
    scale_rest,
    always,  # bool, true
    PARTS: tl.constexpr,
    IN_HALVES: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """As `latent_scores`."""
    zeros = tl.zeros([q_rest.shape[0], rest.shape[0]], tl.float32)
    if not IN_HALVES or always:
        if codes[0].dtype == tl.int16:
            evens, odds = zeros, zeros
            for part in tl.static_range(PARTS):
                even, odd = codes_of(tl.trans(codes[part]))
                evens = dot(q[part], even, evens, WIDEN)
                odds = dot(q_odd[part], odd, odds, WIDEN)
            factor = scale * row_scale[None, :]
            scores = evens * factor + odds * factor
        else:
            tl.static_assert(PARTS == 1)
            scores = dot(q[0], tl.trans(codes[0]), zeros, WIDEN) * scale * row_scale[None, :]
        scores += dot(q_rest, tl.trans(rest), zeros, WIDEN) * scale_rest
    else:
        scores = dot(q_rest, tl.trans(rest), zeros, WIDEN)
    return scores


@triton.jit
def scaled_step(
    scores,  # [rows, keys] float32 log2 units, −inf where masked
    codes,  # as of `scaled_scores`
    row_scale,  # [keys] float32
    running_max,  # [rows] float32
    running_sums,  # [rows, keys] float32
    acc,  # PARTS of [rows, BLOCK_DIM_V // PARTS] float32; of words the even columns
    acc_odd,  # of words the odd columns
    PARTS: tl.constexpr,
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
    if codes[0].dtype == tl.int16:
        sums = ()
        sums_odd = ()
        for part in tl.static_range(PARTS):
            even, odd = codes_of(codes[part])
            sums += (dot(weights, even, acc[part] * decay[:, None], WIDEN),)
            sums_odd += (dot(weights, odd, acc_odd[part] * decay[:, None], WIDEN),)
        return new_max, running_sums, sums, sums_odd
    else:
        tl.static_assert(PARTS == 1)
        acc = dot(weights, codes[0], acc[0] * decay[:, None], WIDEN)
        return new_max, running_sums, (acc,), acc_odd
