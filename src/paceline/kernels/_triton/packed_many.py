"""Triton kernel of packed_linear for more tokens than a decode has; see kernels/packed_linear.py.

The product is taken transposed, [rows, tokens] = W x^T, in tiles of TOKENS tokens.  Here the matrix
unit is the limit: a scale is multiplied into its numbers, which are then those that unpack_weight
would write, so that a tile is one sum from its first chunk to its last and chunks become numbers
while the unit multiplies those before.  Gates and ups of a gated tile lie in turns of 8 rows, which
one thread has both of.  Split sums meet as in skinny_linear.
"""

import triton
import triton.language as tl

from paceline.kernels._triton.launch import let_next_start, wait_for_inputs
from paceline.kernels._triton.packed_products import code_numbers
from paceline.kernels._triton.primitives import biased_activation, dot
from paceline.kernels._triton.skinny_linear import meet
from paceline.kernels.packed_weight import CHUNK

_CHUNK = tl.constexpr(CHUNK)


@triton.jit(do_not_specialize=["tokens", "token_tiles"])
def packed_many_kernel(
    x_ptr,  # [tokens, columns]
    weight_ptr,  # [rows, num_words] int32
    weight_scale_ptr,  # [rows, groups]
    zero_ptr,  # [rows, groups] uint8, or None
    bias_ptr,  # [rows] or None
    out_ptr,  # [tokens, out_features]
    partial_ptr,  # [SPLITS, tiles, ROWS, TOKENS] float32, or None
    counters_ptr,  # [tiles] int32, all 0, or None
    stride_x_token,
    tokens,
    token_tiles,
    out_features,  # rows, or half of them with ACTIVATION: those of ups lie behind
    columns,
    num_words,
    groups,
    chunks_per_split,
    ACTIVATION: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,  # columns: a chunk's; 0: all
    WORDS: tl.constexpr,  # of a chunk
    SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    MASKED: tl.constexpr,  # the last chunk is partial
    OVERLAPPED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    IS_GATED: tl.constexpr = ACTIVATION is not None
    FEATURES: tl.constexpr = ROWS // 2 if IS_GATED else ROWS
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    IS_GROUPED: tl.constexpr = GROUP > 0  # a scale for each chunk; else for a row
    tile = tl.program_id(0)
    split = tl.program_id(1)
    first_feature = tile // token_tiles * FEATURES
    first_token = tile % token_tiles * TOKENS
    local = tl.arange(0, ROWS)
    if IS_GATED:
        feature = first_feature + local // 16 * 8 + local % 8
        row = tl.minimum(feature, out_features - 1) + local // 8 % 2 * out_features
    else:
        row = tl.minimum(first_feature + local, out_features - 1)
    # Rows and tokens behind the last are the last again: what they give is not written.
    row = row.to(tl.int64)
    token = tl.minimum(first_token + tl.arange(0, TOKENS), tokens - 1).to(tl.int64)
    first = split * chunks_per_split
    row_ptrs = weight_ptr + row[:, None] * num_words + tl.arange(0, WORDS)[None, :]
    x_ptrs = x_ptr + token[:, None] * stride_x_token + tl.arange(0, _CHUNK)[None, :]
    places = row * groups
    every = tl.full([ROWS], 1, tl.int32)
    scale = tl.load(weight_scale_ptr + places + (first if IS_GROUPED else 0))
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    wait_for_inputs(OVERLAPPED)
    for chunk in range(first, first + chunks_per_split):
        if MASKED:
            inside = tl.arange(0, _CHUNK) < columns - chunk * _CHUNK
            x = tl.load(x_ptrs + chunk * _CHUNK, mask=inside[None, :], other=0.0)
        else:
            x = tl.load(x_ptrs + chunk * _CHUNK)
        words = tl.load(row_ptrs + chunk * WORDS)
        group = chunk if IS_GROUPED else 0
        following = scale
        if IS_GROUPED:
            following = tl.load(weight_scale_ptr + places + tl.minimum(chunk + 1, groups - 1))
        numbers = code_numbers(
            tl.reshape(words, (ROWS, WORDS // 16, 16)), zero_ptr, places + group, every, ROWS, KIND,
            GROUP, WORDS, DTYPE, INTERPRETED,
        )  # fmt: skip
        if IS_GROUPED:
            numbers = numbers * scale.to(numbers.dtype)[:, None]
        acc = dot(numbers, tl.trans(x), acc, INTERPRETED)
        scale = following
    let_next_start(OVERLAPPED)
    is_last = True
    if SPLITS > 1:
        acc, is_last = meet(acc, partial_ptr, counters_ptr, tile, split, SPLITS, ROWS, TOKENS)
    if is_last:
        if not IS_GROUPED:
            acc *= scale.to(tl.float32)[:, None]
        features = first_feature + tl.arange(0, FEATURES)
        if IS_GATED:
            by_part = tl.permute(tl.reshape(acc, (ROWS // 16, 2, 8, TOKENS)), (0, 2, 3, 1))
            gate, up = tl.split(by_part)
            gate = tl.reshape(gate, (FEATURES, TOKENS))
            up = tl.reshape(up, (FEATURES, TOKENS))
        else:
            gate = acc
            up = acc
        live = features < out_features
        result = biased_activation(
            gate, up, bias_ptr, features[:, None], live[:, None], out_features, ACTIVATION, DTYPE
        )
        written = first_token + tl.arange(0, TOKENS)
        out_ptrs = out_ptr + written.to(tl.int64)[:, None] * out_features + features[None, :]
        tl.store(out_ptrs, tl.trans(result), mask=(written < tokens)[:, None] & live[None, :])
