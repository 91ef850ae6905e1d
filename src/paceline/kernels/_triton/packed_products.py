"""What kernels share that multiply with packed weights: numbers, scales and products of a chunk.

Products are taken transposed, [rows, tokens] = W x^T, chunk by chunk.  A packed weight lies as the
matrix unit reads its left operand, so that words go from memory through two or three instructions
into it, and each group's part of the sum is scaled in float32.
"""

import triton
import triton.language as tl

from paceline.kernels._triton.packed_codes import chunk_numbers, group_of_word, part_of
from paceline.kernels._triton.primitives import biased_activation, dot
from paceline.kernels.packed_weight import CHUNK

_CHUNK = tl.constexpr(CHUNK)


@triton.jit
def read_scales(
    weight_scale_ptr,  # [rows, groups]
    places,  # [ROWS] of each row's first group of the chunks
    groups_left,  # [ROWS] from there on
    COUNT: tl.constexpr,  # of groups
):
    """COUNT groups' scales, [ROWS] each.  Read like words, before they are needed: behind a product
    they would be waited for once per chunk."""
    scales = ()
    for part in tl.static_range(COUNT):
        scale = tl.load(weight_scale_ptr + places + part, mask=part < groups_left, other=0.0)
        scales = scales + (scale,)  # noqa: RUF005
    return scales


@triton.jit
def chunk_scales(
    weight_scale_ptr,  # [rows, groups]
    places,  # [ROWS] of a row's first group
    live_rows,  # [ROWS]
    groups,
    chunk,
    GROUP: tl.constexpr,
):
    """A chunk's scales; there are none behind the last chunk."""
    PARTS: tl.constexpr = 1 if GROUP == 0 else _CHUNK // GROUP
    group = chunk * PARTS if GROUP > 0 else 0
    left = tl.where(live_rows, groups - group, 0)
    return read_scales(weight_scale_ptr, places + group, left, PARTS)


@triton.jit
def code_numbers(
    words,  # [ROWS, WORDS // 16, 16]
    zero_ptr,  # [rows, groups], or None
    places,  # [ROWS] of each row's first group in the chunk
    groups_left,  # [ROWS], or a number: from the chunk's first on
    ROWS: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    WORDS: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """[ROWS, CHUNK] codes less their zeros."""
    if zero_ptr is None:
        zero = tl.full((1, 1, 1), 8 if KIND == "int4" else 128, tl.int32)
    else:
        group = group_of_word(GROUP, WORDS)[None, :, :]
        held = group < groups_left[:, None, None]
        zero = tl.load(zero_ptr + places[:, None, None] + group, mask=held, other=0).to(tl.int32)
    return chunk_numbers(words, zero, ROWS, KIND, DTYPE, INTERPRETED)


@triton.jit
def add_products(
    acc,  # [ROWS, columns of the tile] float32
    numbers,  # [ROWS, CHUNK]
    xs,  # [columns of the tile, GROUP] each
    scales,  # [ROWS] each, as xs; one where a row has one
    FIRST: tl.constexpr,  # of xs
    FIRST_SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """acc and what one chunk adds to it."""
    PARTS: tl.constexpr = 1 if GROUP == 0 else _CHUNK // GROUP
    nothing = tl.zeros(acc.shape, tl.float32)
    for part in tl.static_range(PARTS):
        of_part = part_of(numbers, part, PARTS, ROWS)
        product = dot(of_part, tl.trans(xs[FIRST + part]), nothing, INTERPRETED)
        scale = scales[FIRST_SCALE + part] if GROUP > 0 else scales[0]
        acc += product * scale.to(tl.float32)[:, None]
    return acc


@triton.jit
def add_chunk(
    acc,  # [ROWS, TOKENS] float32
    row_ptrs,  # [ROWS, WORDS] of a row's first chunk
    xs,  # [TOKENS, GROUP] each, of this chunk
    scales,  # [ROWS] each, of this chunk
    zero_ptr,
    places,  # [ROWS] of a row's first group
    live_rows,  # [ROWS]
    groups,
    chunk,
    ROWS: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    WORDS: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """acc and what one chunk adds to it."""
    PARTS: tl.constexpr = 1 if GROUP == 0 else _CHUNK // GROUP
    words = tl.load(
        row_ptrs + chunk * WORDS, mask=live_rows[:, None], other=0, eviction_policy="evict_first"
    )
    words = tl.reshape(words, (ROWS, WORDS // 16, 16))
    group = chunk * PARTS if GROUP > 0 else 0
    left = tl.where(live_rows, groups - group, 0)
    numbers = code_numbers(
        words, zero_ptr, places + group, left, ROWS, KIND, GROUP, WORDS, DTYPE, INTERPRETED
    )
    return add_products(acc, numbers, xs, scales, 0, 0, ROWS, GROUP, INTERPRETED)


@triton.jit
def write_product(
    acc,  # [features, TOKENS] float32
    up,  # like acc
    bias_ptr,
    out_ptr,  # [tokens, out_features]
    features,  # [features]
    tokens,
    out_features,
    ACTIVATION: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = tl.arange(0, TOKENS)
    live = (features < out_features)[:, None]
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    result = biased_activation(
        acc, up, bias_ptr, features[:, None], live, out_features, ACTIVATION, DTYPE
    )
    out_ptrs = out_ptr + token.to(tl.int64)[None, :] * out_features + features[:, None]
    tl.store(out_ptrs, result, mask=live & (token < tokens)[None, :])
