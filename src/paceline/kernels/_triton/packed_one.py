"""Triton kernel of packed_linear for one token, of codes of 4 bits or fp8; see
kernels/packed_linear.py.

A thread has 16 bytes of each of a few rows, always of the same columns, and reads these of x
itself.  fp8 becomes float32.  Of codes of 4 bits, 32 columns, x becomes integers of 16 bits, so
that two products of a number and a code are one instruction.  Example: 32 numbers of which the
largest is 3.5 = 1.75 * 2^1 are multiplied by 2^(14 - 1), so that it becomes 28672.  A bfloat16 of 8
significant bits stays exact down to 2^-7 of the largest, a float16 of 11 down to 2^-4; what is
smaller loses at most 2^-15 of the largest.  The sum of 32 products is exact in 32 bits, and is
scaled and added in float32.
"""

import triton
import triton.language as tl
from triton.language import target_info

from paceline.kernels._triton.launch import let_next_start, wait_for_inputs
from paceline.kernels._triton.primitives import biased_activation
from paceline.kernels.packed_weight import CHUNK

_CHUNK = tl.constexpr(CHUNK)


@triton.jit
def _number(pair, DTYPE: tl.constexpr):
    """float32 of the lower half."""
    if tl.bfloat16 == DTYPE:
        number = (pair << 16).to(tl.float32, bitcast=True)
    else:
        number = pair.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return number


@triton.jit
def _fixed(
    number,  # float32
    unit,
):
    """number * unit, an integer of 16 bits in the lower half: below 1.5 * 2^23 a float32 counts in
    ones."""
    return (number * unit + 12582912.0).to(tl.int32, bitcast=True)


@triton.jit
def _both(low, high, INTERPRETED: tl.constexpr):
    """Their lower halves in one int32."""
    if INTERPRETED:
        both = (low & 0xFFFF) | (high << 16)
    else:
        both = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x5410;",
            "=r,r,r",
            [low, high],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return both


@triton.jit
def _add_two(
    acc,  # int32
    fixed,  # int32: two of 16 bits
    codes,  # int32: four of 8 bits
    IS_UPPER: tl.constexpr,  # of the codes
    INTERPRETED: tl.constexpr,
):
    """acc and the products of two integers with two codes."""
    if INTERPRETED:
        moved = codes if IS_UPPER else codes << 16
        acc += (fixed << 16 >> 16) * (moved >> 16 & 0xFF) + (fixed >> 16) * (moved >> 24 & 0xFF)
    else:
        HALF: tl.constexpr = "hi" if IS_UPPER else "lo"
        acc = tl.inline_asm_elementwise(
            "dp2a." + HALF + ".s32.u32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [fixed, codes, acc],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return acc


@triton.jit
def _sums_of_int4(
    words,  # four of [CHUNKS, ROWS, 4]
    pair_ptrs,  # [CHUNKS, 4] of two numbers of x
    pairs_left,  # [CHUNKS, 4] from there on
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
    MASKED: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """[CHUNKS, ROWS, 4] float32 of 32 columns each."""
    numbers = ()
    largest = tl.zeros([CHUNKS, 4], tl.float32)
    for k in tl.static_range(16):  # k = 4 i + j
        low, high = _two_numbers(pair_ptrs + 4 * k, pairs_left - 4 * k, MASKED, DTYPE)
        numbers += (low, high)
        either = tl.maximum(tl.abs(low), tl.abs(high), propagate_nan=tl.PropagateNan.ALL)
        largest = tl.maximum(largest, either, propagate_nan=tl.PropagateNan.ALL)
    exponent = tl.maximum(largest.to(tl.int32, bitcast=True) & 0x7F800000, 0x10000000)
    # 2^14 over that power of two, and its inverse, over 16, since sums count in sixteenths.
    unit = (0x7F000000 - exponent + 0x07000000).to(tl.float32, bitcast=True)
    inverse = (exponent - 0x09000000).to(tl.float32, bitcast=True)
    inverse += largest * 0.0  # what is not finite stays so
    low = tl.zeros([CHUNKS, ROWS, 4], tl.int32)
    high = low  # sixteen times as much
    plain = tl.zeros([CHUNKS, 4], tl.int32)  # of x
    ones = tl.full([CHUNKS, 4], 0x01010101, tl.int32)
    for i in tl.static_range(4):
        for j in tl.static_range(2):
            codes = words[i] & (0x0F0F0F0F if j == 0 else -252645136)  # 0xF0F0F0F0
            for p in tl.static_range(2):
                # Bytes are fields j and j + 2 of either half.
                fixed = _both(
                    _fixed(numbers[8 * i + 2 * j + p], unit),
                    _fixed(numbers[8 * i + 2 * j + 4 + p], unit),
                    INTERPRETED,
                )
                plain = _add_two(plain, fixed, ones, False, INTERPRETED)
                fixed = tl.broadcast_to(fixed[:, None, :], low.shape)
                if j == 0:
                    low = _add_two(low, fixed, codes, p == 1, INTERPRETED)
                else:
                    high = _add_two(high, fixed, codes, p == 1, INTERPRETED)
    total = low * 16 + (high - plain[:, None, :] * 128)
    return total.to(tl.float32) * inverse[:, None, :]


@triton.jit
def _sums_of_fp8(
    words,  # four of [CHUNKS, ROWS, 8]
    pair_ptrs,  # [CHUNKS, 8] of two numbers of x
    pairs_left,  # [CHUNKS, 8] from there on
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
    MASKED: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """[CHUNKS, ROWS, 8] float32 of 16 columns each."""
    total = tl.zeros([CHUNKS, ROWS, 8], tl.float32)
    for i in tl.static_range(4):
        a, b, c, d = _four_fp8(words[i], INTERPRETED)  # fields 0 and 1 of the lower half, upper
        low, high = _two_numbers(pair_ptrs + 8 * i, pairs_left - 8 * i, MASKED, DTYPE)
        total += a * low[:, None, :]
        total += c * high[:, None, :]
        low, high = _two_numbers(pair_ptrs + 8 * i + 4, pairs_left - 8 * i - 4, MASKED, DTYPE)
        total += b * low[:, None, :]
        total += d * high[:, None, :]
    return total


@triton.jit
def _two_numbers(ptrs, left, MASKED: tl.constexpr, DTYPE: tl.constexpr):
    """float32 of pairs of numbers that lie in one int32."""
    if MASKED:
        both = tl.load(ptrs, mask=left > 0, other=0)
    else:
        both = tl.load(ptrs)
    return _number(both, DTYPE), _number(both >> 16, DTYPE)


@triton.jit
def _four_fp8(word, INTERPRETED: tl.constexpr):
    """float32 of the four bytes of each word."""
    if INTERPRETED:
        CONVERTS: tl.constexpr = False
    else:
        CONVERTS: tl.constexpr = target_info.cuda_capability_geq(8, 9)
    if not CONVERTS:
        a, b = _fp8(word), _fp8(word >> 8)
        c, d = _fp8(word >> 16), _fp8(word >> 24)
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            "{ .reg .b16 l, h, s, t, u, v; .reg .b32 p, q; mov.b32 {l, h}, $4; "
            "cvt.rn.f16x2.e4m3x2 p, l; cvt.rn.f16x2.e4m3x2 q, h; "
            "mov.b32 {s, t}, p; mov.b32 {u, v}, q; cvt.f32.f16 $0, s; cvt.f32.f16 $1, t; "
            "cvt.f32.f16 $2, u; cvt.f32.f16 $3, v; }",
            "=f,=f,=f,=f,r",
            [word],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    return a, b, c, d


@triton.jit
def _fp8(word):
    """float32 of the lowest byte: e4m3's exponent counts from 7, float32's from 127."""
    moved = (word & 0x80) << 24 | (word & 0x7F) << 20
    return moved.to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0  # 2^120


@triton.jit
def packed_one_kernel(
    x_ptr,  # [columns]
    weight_ptr,  # [rows, num_words] int32
    weight_scale_ptr,  # [rows, groups]
    bias_ptr,  # [rows] or None
    out_ptr,  # [out_features]
    out_features,  # rows, or half of them with ACTIVATION: those of ups lie behind
    columns,
    num_words,
    groups,
    ACTIVATION: tl.constexpr,
    IS_FP8: tl.constexpr,
    HAS_GROUPS: tl.constexpr,  # a scale for each chunk
    ROWS: tl.constexpr,  # of the weight
    CHUNKS: tl.constexpr,  # at least those of a row
    MASKED: tl.constexpr,  # they end behind the last column, or tiles behind the last row
    OVERLAPPED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    IS_GATED: tl.constexpr = ACTIVATION is not None
    FEATURES: tl.constexpr = ROWS // 2 if IS_GATED else ROWS
    WORDS: tl.constexpr = _CHUNK // 4 if IS_FP8 else _CHUNK // 8  # of a chunk
    THREADS: tl.constexpr = WORDS // 4  # of a chunk
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    first_feature = tl.program_id(0) * FEATURES
    row = tl.arange(0, ROWS)
    feature = first_feature + row % FEATURES
    rows = feature
    if IS_GATED:
        rows += row // FEATURES * out_features
    live_rows = (feature < out_features)[None, :, None]
    chunk = tl.arange(0, CHUNKS)
    word = chunk[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    row_ptrs = weight_ptr + rows.to(tl.int64)[None, :, None] * num_words + word[:, None, :]
    scale_ptrs = weight_scale_ptr + rows.to(tl.int64)[None, :, None] * groups
    group = (chunk if HAS_GROUPS else 0 * chunk)[:, None, None]
    if MASKED:
        live = live_rows & (word < num_words)[:, None, :]
        words = tl.load(row_ptrs, mask=live, other=0, eviction_policy="evict_first")
        scale = tl.load(scale_ptrs + group, mask=live_rows & (group < groups), other=0.0)
    else:
        words = tl.load(row_ptrs, eviction_policy="evict_first")
        scale = tl.load(scale_ptrs + group)
    let_next_start(OVERLAPPED)
    wait_for_inputs(OVERLAPPED)

    thread = tl.arange(0, THREADS)
    first_pair = chunk[:, None] * (_CHUNK // 2) + (thread // 4 * 32 + thread % 4)[None, :]
    pair_ptrs = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + first_pair
    left = columns // 2 - first_pair
    even, odd = tl.split(tl.reshape(words, (CHUNKS, ROWS, THREADS, 2, 2)))
    zeroth, second = tl.split(even)
    first, third = tl.split(odd)
    own = (zeroth, first, second, third)
    if IS_FP8:
        sums = _sums_of_fp8(own, pair_ptrs, left, CHUNKS, ROWS, MASKED, DTYPE, INTERPRETED)
    else:
        sums = _sums_of_int4(own, pair_ptrs, left, CHUNKS, ROWS, MASKED, DTYPE, INTERPRETED)
    sums *= scale.to(tl.float32)
    sums = tl.sum(tl.sum(sums, axis=2), axis=0)
    up = sums
    if IS_GATED:
        sums, up = tl.split(tl.trans(tl.reshape(sums, (2, FEATURES))))
    features = first_feature + tl.arange(0, FEATURES)
    live = features < out_features
    result = biased_activation(sums, up, bias_ptr, features, live, out_features, ACTIVATION, DTYPE)
    tl.store(out_ptr + features, result, mask=live)
