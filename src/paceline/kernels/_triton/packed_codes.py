"""From words of codes to numbers, in registers and by their bits; see kernels/packed_weight.py.

An integer of a few bits, put into the mantissa of a float whose exponent is known, makes that float
a known number plus the code: an `and` with an `or`, which are one instruction, and a subtraction.
"""

import triton
import triton.language as tl


@triton.jit
def half_numbers(
    words,  # [..., WORDS] int32
    zero,  # float32, to broadcast with words: of integers, what a code of 0 stands above
    FIELD: tl.constexpr,
    KIND: tl.constexpr,
    DTYPE: tl.constexpr,  # tl.bfloat16 or tl.float16
    WIDEN: tl.constexpr,  # the interpreter computes no bfloat16: float32 instead
):
    """The codes of one field, less their zero: exact in either dtype."""
    WIDE: tl.constexpr = tl.float32 if WIDEN else DTYPE
    if KIND == "int4":
        # Fields f and f + 4 lie in the halves of one word: 128 + code of bfloat16, whose mantissa
        # has 7 bits, 1024 + code of float16.
        MAGIC: tl.constexpr = 0x43004300 if tl.bfloat16 == DTYPE else 0x64006400
        ABOVE: tl.constexpr = 128.0 if tl.bfloat16 == DTYPE else 1024.0
        pair = ((words >> 4 * (FIELD % 4)) & 0x000F000F) | MAGIC
        number = _half(pair, FIELD // 4, DTYPE).to(WIDE) - (zero + ABOVE).to(WIDE)
    elif KIND == "int8":
        wide = (((words >> 8 * FIELD) & 0xFF) | 0x4B000000).to(tl.float32, bitcast=True)
        number = (wide - (zero + 8388608.0)).to(WIDE)
    elif WIDEN:
        number = raised(words, FIELD, KIND)[0] * 1329227995784915872903807060280344576.0
    else:
        # Fields 1 and 3 are the high bytes of the halves, 0 and 2 the low ones.  e4m3's exponent
        # in a wider one counts from another bias, which a product with a power of two mends.
        moved = words << 8 if FIELD % 2 == 0 else words
        SIGNS: tl.constexpr = -2147450880
        if tl.bfloat16 == DTYPE:
            pair = (moved & SIGNS) | ((moved >> 4) & 0x07F007F0)
            number = _half(pair, FIELD // 2, DTYPE) * 1329227995784915872903807060280344576.0
        else:
            pair = (moved & SIGNS) | ((moved >> 1) & 0x3F803F80)
            number = _half(pair, FIELD // 2, DTYPE) * 256.0
    return number


@triton.jit
def _half(pair, UPPER: tl.constexpr, DTYPE: tl.constexpr):
    bits = pair >> 16 if UPPER else pair
    return bits.to(tl.int16).to(DTYPE, bitcast=True)


@triton.jit
def raised(
    words,  # [..., WORDS] int32
    FIELD: tl.constexpr,
    KIND: tl.constexpr,
):
    """(value, factor): value * factor is the code of one field plus factor, as float32; of e4m3 the
    number itself.  Nothing is subtracted: a sum of products with x is too high by factor times the
    sum of x, which is known before."""
    if KIND == "int4":
        # Four moves of a word bring its eight fields to bits 11, 15 and 19 of a mantissa of 23.
        if FIELD == 0:
            moved = words << 19
        elif FIELD < 4:
            moved = words << 7
        elif FIELD < 7:
            moved = words >> 5
        else:
            moved = words >> 9
        PLACE: tl.constexpr = 19 if FIELD % 7 == 0 else 7 + 4 * ((FIELD - 1) % 3 + 1)
        value = ((moved & (0xF << PLACE)) | 0x3F800000).to(tl.float32, bitcast=True)
        FACTOR: tl.constexpr = 2.0 ** (23 - PLACE)
    elif KIND == "int8":
        moved = words << 15 - 8 * FIELD if FIELD < 2 else words >> 8 * FIELD - 15
        value = ((moved & 0x7F8000) | 0x3F800000).to(tl.float32, bitcast=True)
        FACTOR: tl.constexpr = 256.0
    else:
        moved = words << 24 - 8 * FIELD
        bits = (moved & -2147483648) | ((moved >> 4) & 0x07F00000)
        value = bits.to(tl.float32, bitcast=True)
        FACTOR: tl.constexpr = 1267650600228229401496703205376.0  # 2 ** 100, of 2 ** 120
    return value, FACTOR
