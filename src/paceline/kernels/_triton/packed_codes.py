"""From words of codes to numbers, in registers and by their bits; see kernels/packed_weight.py.

An integer of a few bits, put into the mantissa of a float whose exponent is known, makes that float
a known number plus the code: an `and` with an `or`, which are one instruction, and a subtraction.
Both halves of a word are subtracted from at once, in the place where the matrix unit reads them.
"""

import triton
import triton.language as tl
from triton.language import target_info

from paceline.kernels.packed_weight import CHUNK

_CHUNK = tl.constexpr(CHUNK)


@triton.jit
def chunk_numbers(
    words,  # [ROWS, WORDS // 16, 16] int32 of one chunk
    zero,  # int32, to broadcast with words: of integers, which code is 0
    ROWS: tl.constexpr,
    KIND: tl.constexpr,
    DTYPE: tl.constexpr,  # tl.bfloat16 or tl.float16
    INTERPRETED: tl.constexpr,
):
    """[ROWS, CHUNK] codes less their zero, exact in DTYPE; the interpreter, which computes no
    bfloat16, has float32.  As words lie, no number leaves the thread that read it."""
    if KIND == "int4":
        a = _pair(words, zero, 0, KIND, DTYPE, INTERPRETED)
        b = _pair(words, zero, 1, KIND, DTYPE, INTERPRETED)
        c = _pair(words, zero, 2, KIND, DTYPE, INTERPRETED)
        d = _pair(words, zero, 3, KIND, DTYPE, INTERPRETED)
        fields = tl.join(tl.join(a, c), tl.join(b, d))  # h, 16, p, high of j, low of j
        fields = tl.reshape(fields, (ROWS, 4, 4, 2, 2, 2))
        fields = tl.permute(fields, (0, 2, 4, 5, 1, 3))  # i, j, t, p
    else:
        a = _pair(words, zero, 0, KIND, DTYPE, INTERPRETED)
        b = _pair(words, zero, 1, KIND, DTYPE, INTERPRETED)
        fields = tl.reshape(tl.join(a, b), (ROWS, 2, 4, 4, 2, 2))  # h, t, i, p, j
        fields = tl.permute(fields, (0, 1, 3, 5, 2, 4))
    return tl.reshape(fields, (ROWS, _CHUNK))


@triton.jit
def part_of(
    numbers,  # [ROWS, CHUNK]
    PART: tl.constexpr,
    PARTS: tl.constexpr,  # 1, 2 or 4
    ROWS: tl.constexpr,
):
    """[ROWS, CHUNK // PARTS] of its columns."""
    part = numbers
    if PARTS == 4:
        part = _half(part, PART // 2, ROWS, _CHUNK)
        part = _half(part, PART % 2, ROWS, _CHUNK // 2)
    elif PARTS == 2:
        part = _half(part, PART, ROWS, _CHUNK)
    return part


@triton.jit
def group_of_word(
    GROUP: tl.constexpr,  # columns; 0: all
    WORDS: tl.constexpr,  # of a chunk
):
    """[WORDS // 16, 16], or [1, 1] where a chunk has one: its columns' group in the chunk."""
    if GROUP == 0 or GROUP == _CHUNK:
        group = tl.full((1, 1), 0, tl.int32)
    else:
        runs = tl.arange(0, WORDS // 16)[:, None] * 4 + tl.arange(0, 16)[None, :] % 4
        group = runs * (512 // WORDS) // GROUP
    return group


@triton.jit
def _half(numbers, IS_RIGHT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    by_half = tl.reshape(numbers, (ROWS, 2, COLUMNS // 2))
    left, right = tl.split(tl.permute(by_half, (0, 2, 1)))
    return right if IS_RIGHT else left


@triton.jit
def _pair(
    words,
    zero,
    J: tl.constexpr,  # of a word's pairs
    KIND: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """[..., 2] the numbers of fields j and j + q of each word."""
    IS_BF16: tl.constexpr = tl.bfloat16 == DTYPE
    BITS: tl.constexpr = 4 if KIND == "int4" else 8
    # 128 + code in bfloat16, 1024 + code in float16.
    MAGIC: tl.constexpr = 0x43004300 if IS_BF16 else 0x64006400
    less = (zero * 0x00010001) | MAGIC
    if KIND == "fp8":
        low, high = _fp8_pair(words << 8 if J == 0 else words, DTYPE, INTERPRETED)
    elif KIND == "int8" and IS_BF16:
        # 8 bits are more than a mantissa of 7 has room for: by way of float32.
        above = zero.to(tl.float32) + 8388608.0
        low = ((words >> 8 * J) & 0xFF | 0x4B000000).to(tl.float32, bitcast=True) - above
        high = ((words >> 8 * J + 16) & 0xFF | 0x4B000000).to(tl.float32, bitcast=True) - above
        if not INTERPRETED:
            low, high = low.to(DTYPE), high.to(DTYPE)
    elif INTERPRETED:
        pair = ((words >> BITS * J) & (0x00010001 * ((1 << BITS) - 1))) | MAGIC
        low, high = _low(pair, DTYPE) - _low(less, DTYPE), _high(pair, DTYPE) - _low(less, DTYPE)
    else:
        # Of `and` and `or` with two constants compilers make two instructions.
        MASK: tl.constexpr = "0x000F000F, " if KIND == "int4" else "0x00FF00FF, "
        MAGICS: tl.constexpr = "0x43004300, 0xEA; " if IS_BF16 else "0x64006400, 0xEA; "
        if not IS_BF16:
            LESSENED: tl.constexpr = "sub.rn.f16x2 r, r, $3; "
        elif target_info.cuda_capability_geq(9, 0):
            LESSENED: tl.constexpr = "sub.rn.bf16x2 r, r, $3; "
        else:  # 1 r + -less, rounded once as well
            LESSENED: tl.constexpr = (
                "mov.b32 m, 0x3F803F80; neg.bf16x2 n, $3; fma.rn.bf16x2 r, r, m, n; "
            )
        low, high = tl.inline_asm_elementwise(
            "{ .reg .b32 r, m, n; lop3.b32 r, $2, "
            + MASK
            + MAGICS
            + LESSENED
            + "mov.b32 {$0, $1}, r; }",
            "=h,=h,r,r",
            [words >> BITS * J, tl.broadcast_to(less, words.shape)],
            dtype=(tl.int16, tl.int16),
            is_pure=True,
            pack=1,
        )
        low, high = low.to(DTYPE, bitcast=True), high.to(DTYPE, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _fp8_pair(
    moved,  # int32: the codes are the upper bytes of its halves
    DTYPE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Their numbers.  e4m3's exponent in a wider one counts from another bias, which a product
    with a power of two mends."""
    IS_BF16: tl.constexpr = tl.bfloat16 == DTYPE
    if INTERPRETED:
        SIGNS: tl.constexpr = -2147450880
        pair = (moved & SIGNS) | ((moved >> 4) & 0x07F007F0)
        power = 1329227995784915872903807060280344576.0  # 2 ** 120
        if not IS_BF16:
            pair = (moved & SIGNS) | ((moved >> 1) & 0x3F803F80)
            power = 256.0
        low, high = _low(pair, DTYPE) * power, _high(pair, DTYPE) * power
    else:
        PLACED: tl.constexpr = (
            "shr.b32 r, $2, 4; and.b32 r, r, 0x07F007F0; "
            if IS_BF16
            else "shr.b32 r, $2, 1; and.b32 r, r, 0x3F803F80; "
        )
        if not IS_BF16:
            MENDED: tl.constexpr = "mov.b32 m, 0x5C005C00; mul.rn.f16x2 r, r, m; "
        elif target_info.cuda_capability_geq(9, 0):
            MENDED: tl.constexpr = "mov.b32 m, 0x7B807B80; mul.rn.bf16x2 r, r, m; "
        else:  # and -0, which keeps the sign of a 0
            MENDED: tl.constexpr = (
                "mov.b32 m, 0x7B807B80; mov.b32 n, 0x80008000; fma.rn.bf16x2 r, r, m, n; "
            )
        low, high = tl.inline_asm_elementwise(
            "{ .reg .b32 r, m, n; "
            + PLACED
            + "lop3.b32 r, $2, 0x80008000, r, 0xEA; "
            + MENDED
            + "mov.b32 {$0, $1}, r; }",
            "=h,=h,r",
            [moved],
            dtype=(tl.int16, tl.int16),
            is_pure=True,
            pack=1,
        )
        low, high = low.to(DTYPE, bitcast=True), high.to(DTYPE, bitcast=True)
    return low, high


@triton.jit
def _low(pair, DTYPE: tl.constexpr):
    """float32 of the lower halves."""
    if tl.bfloat16 == DTYPE:
        half = (pair << 16).to(tl.float32, bitcast=True)
    else:
        half = pair.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return half


@triton.jit
def _high(pair, DTYPE: tl.constexpr):
    return _low(pair >> 16, DTYPE)
