"""Scaled latents in kernels: what paged_extend does with a tile of them, and how they are made; see
kernels/scaled_latents.py.

A code becomes float16, in one instruction for two, and loses nothing.  Tiles of few rows read codes
two to a word of 16 bits: what loads a matrix unit's registers transposes no less.  A word is the
codes of columns 2j and 2j + 1, so queries and sums come in halves:

    words of a register   weighed: of two keys, a and b      scored: of one key
                          (a1 a0) (b1 b0)                    (3 2) (1 0)
    sorted                (b0 a0) even, (b1 a1) odd          as they are: (1 0) first, (3 2) last

A product adds up over what a register holds.  Sums are of one column in each, so bytes are sorted,
in one instruction, and halves are of even and odd columns.  Scores are added up over columns, in
any order that queries have, too: halves of these are the first and the last two of four columns.
"""

import triton
import triton.language as tl

from paceline.kernels._triton.primitives import dot, scores_log2
from paceline.kernels._triton.runtime import interpreted

# By how much, in units of log2, a score may exceed what weights are relative to before their sums
# are scaled anew: these stay, and no weight leaves float16.
_SLACK = tl.constexpr(8.0)


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
def _twos_by_bits(
    words,  # [columns, keys] int16
):
    """As `twos_of`, in operations that the interpreter knows."""
    columns: tl.constexpr = words.shape[0]
    keys: tl.constexpr = words.shape[1]
    even, odd = tl.split(tl.reshape(tl.trans(words), [keys, columns // 2, 2]))
    first = tl.join(_number_of(even & 0xFF), _number_of((even >> 8) & 0xFF))
    last = tl.join(_number_of(odd & 0xFF), _number_of((odd >> 8) & 0xFF))
    return (
        tl.trans(tl.reshape(first, [keys, columns])),
        tl.trans(tl.reshape(last, [keys, columns])),
    )


@triton.jit
def _twos_by_registers(
    words,  # [columns, keys] int16, the right operand of a product: two columns to a register
):
    """As `twos_of`: one instruction for two numbers.  (PTX ISA, cvt.)"""
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        mov.b32 {low, high}, $2;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
        }""",
        "=r,=r,r",
        [words],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


# (first, last) [columns, keys] float16: the codes of words 0, 2, 4, ... and of 1, 3, 5, ...
twos_of = _twos_by_bits if interpreted(_twos_by_bits) else _twos_by_registers


@triton.jit
def twos_of_parts(
    x,  # PARTS of [rows, columns]
    PARTS: tl.constexpr,
):
    """The first and the last two of each four of their columns."""
    firsts = ()
    lasts = ()
    rows: tl.constexpr = x[0].shape[0]
    columns: tl.constexpr = x[0].shape[1]
    for part in tl.static_range(PARTS):
        fours = tl.reshape(x[part], [rows, columns // 4, 2, 2])
        first, last = tl.split(tl.permute(fours, (0, 1, 3, 2)))
        firsts += (tl.reshape(first, [rows, columns // 2]),)
        lasts += (tl.reshape(last, [rows, columns // 2]),)
    return firsts, lasts


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
def _exponent(
    row_scale,  # [keys] float32, powers of two; of a slot never written 0
):
    """[keys] int32, biased."""
    return tl.maximum(row_scale.to(tl.int32, bitcast=True) >> 23, 1)


@triton.jit
def scaled_scores(
    q,  # PARTS of [rows, BLOCK_DIM_K // PARTS] float16; of words the first two of four columns
    q_last,  # of words the last two
    q_rest,  # [rows, BLOCK_REST]
    codes,  # PARTS of [keys, BLOCK_DIM_K // PARTS] float16, or of words, half as many, int16
    rest,  # [keys, BLOCK_REST]
    row_scale,  # [keys] float32
    scale,  # [rows, 1] of narrowed queries
    scale_rest,
    always,  # bool, true
    SOFT_CAP: tl.constexpr,
    PARTS: tl.constexpr,
    IN_HALVES: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """As `latent_scores`, in units of log2, with row_scale in them: of weights times scales."""
    zeros = tl.zeros([q_rest.shape[0], rest.shape[0]], tl.float32)
    UNIT: tl.constexpr = 1.4426950408889634 if SOFT_CAP is None else 1.0
    if not IN_HALVES or always:
        factor = (scale * UNIT) * row_scale[None, :]
        lift = (_exponent(row_scale) - 127).to(tl.float32)[None, :]
        if codes[0].dtype == tl.int16:
            scores, lasts = zeros, zeros
            for part in tl.static_range(PARTS):
                first, last = twos_of(tl.trans(codes[part]))
                scores = dot(q[part], first, scores, WIDEN)
                lasts = dot(q_last[part], last, lasts, WIDEN)
        else:
            tl.static_assert(PARTS == 1)
            scores = dot(q[0], tl.trans(codes[0]), zeros, WIDEN)
        others = dot(q_rest, tl.trans(rest), zeros, WIDEN) * (scale_rest * UNIT)
        if SOFT_CAP is None:
            others += lift
        if codes[0].dtype == tl.int16:
            others += lasts * factor
        scores = scores * factor + others
        if SOFT_CAP is not None:
            scores = scores_log2(scores, 1.0, SOFT_CAP) + lift
    else:
        scores = dot(q_rest, tl.trans(rest), zeros, WIDEN)
    return scores


@triton.jit
def _decayed(
    sums,  # PARTS of [rows, columns] float32
    decay,  # [rows] float32
    PARTS: tl.constexpr,
):
    """Each part times decay."""
    decayed = ()
    for part in tl.static_range(PARTS):
        decayed += (sums[part] * decay[:, None],)
    return decayed


@triton.jit
def scaled_step(
    scores,  # [rows, keys] float32 of `scaled_scores`, −inf where masked
    codes,  # as there
    row_scale,  # [keys] float32
    running_max,  # [rows] float32
    running_sums,  # [rows, keys] float32
    acc,  # PARTS of [rows, BLOCK_DIM_V // PARTS] float32; of words the even columns
    acc_odd,  # of words the odd columns
    PARTS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """As `latent_step`, of weights times scales: their maximum is the running one, so that none
    leaves float16, nor is lost there for a small scale.  What the sums get is divided again.

    Of words the running maximum is one of _SLACK less or more, which seldom changes: then alone
    sums are scaled.
    """
    WORDS: tl.constexpr = codes[0].dtype == tl.int16
    largest = tl.max(scores, axis=1)
    if WORDS:
        new_max = tl.where(largest > running_max + _SLACK, largest, running_max)
    else:
        new_max = tl.maximum(running_max, largest)
    finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - finite_max[:, None])
    inverse = ((254 - _exponent(row_scale)) << 23).to(tl.float32, bitcast=True)[None, :]
    decay = tl.exp2(running_max - finite_max)
    if WORDS:
        if tl.max((new_max > running_max).to(tl.int32), axis=0) > 0:
            running_sums *= decay[:, None]
            acc = _decayed(acc, decay, PARTS)
            acc_odd = _decayed(acc_odd, decay, PARTS)
        running_sums += weights * inverse
    else:
        running_sums = running_sums * decay[:, None] + weights * inverse
        acc = _decayed(acc, decay, PARTS)
    weights = weights.to(tl.float16)
    if WORDS:
        sums = ()
        sums_odd = ()
        for part in tl.static_range(PARTS):
            even, odd = codes_of(codes[part])
            sums += (dot(weights, even, acc[part], WIDEN),)
            sums_odd += (dot(weights, odd, acc_odd[part], WIDEN),)
        return new_max, running_sums, sums, sums_odd
    else:
        tl.static_assert(PARTS == 1)
        return new_max, running_sums, (dot(weights, codes[0], acc[0], WIDEN),), acc_odd
