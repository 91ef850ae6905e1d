"""Triton kernel of packed_linear for few tokens; see kernels/packed_linear.py for the definition.

A program holds whole rows of words in registers, asked for in one go, before it waits for x.  So
that its warps have work, a row's chunks are cut into slices, and the matrix unit gets slices of
rows as rows and slices of tokens as tokens; of all products those of equal slices are taken, and
added.  Worked example, 2 slices of 8 rows and of 8 tokens: rows 0..7 of the tile hold
the left halves of the weight's rows, 8..15 their right halves, columns 0..7 the tokens' left
halves; out[r, t] is tile[r, t] + tile[8 + r, 8 + t].  Split sums meet as in skinny_linear.
"""

import triton
import triton.language as tl

from paceline.kernels._triton.launch import let_next_start, wait_for_inputs
from paceline.kernels._triton.packed_products import (
    add_products,
    code_numbers,
    read_scales,
    write_product,
)
from paceline.kernels._triton.skinny_linear import meet
from paceline.kernels.packed_weight import CHUNK

_CHUNK = tl.constexpr(CHUNK)


@triton.jit
def _feature(
    local,  # of a tile's FEATURES rows
    tile,
    out_features,
    FEATURES: tl.constexpr,
    IS_GATED: tl.constexpr,
):
    """(row of the weight, whether there is one); a gated tile has rows of gates, then of ups."""
    if IS_GATED:
        HALF: tl.constexpr = FEATURES // 2
        feature = tile * HALF + local % HALF
        row = feature + (local // HALF) * out_features
    else:
        feature = tile * FEATURES + local
        row = feature
    return row, feature < out_features


@triton.jit
def _read_words(
    weight_ptr,  # [ROWS // 2, 2, WORDS // 16, 16]
    words_left,  # [ROWS // 2, 2] from there on
    first,  # chunk
    COUNT: tl.constexpr,
    WORDS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """COUNT chunks' words."""
    words = ()
    for u in tl.static_range(COUNT):
        ahead = (first + u) * WORDS
        if MASKED:
            live = (ahead < words_left)[:, :, None, None]
            read = tl.load(weight_ptr + ahead, mask=live, other=0, eviction_policy="evict_first")
        else:
            read = tl.load(weight_ptr + ahead, eviction_policy="evict_first")
        words = words + (read,)  # noqa: RUF005  Triton knows no stars
    return words


@triton.jit
def _read_inputs(
    x_ptrs,  # [columns of the tile] of a token's slice
    live,  # [columns of the tile]
    columns_left,  # [columns of the tile] from there on
    first,  # chunk
    COUNT: tl.constexpr,
    GROUP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """COUNT chunks of x, in parts that share a scale: [columns of the tile, GROUP] each."""
    PART: tl.constexpr = _CHUNK if GROUP == 0 else GROUP
    xs = ()
    for part in tl.static_range(COUNT * (_CHUNK // PART)):
        ahead = first * _CHUNK + part * PART + tl.arange(0, PART)
        mask = live[:, None]
        if MASKED:
            mask = mask & (ahead[None, :] < columns_left[:, None])
        x = tl.load(x_ptrs[:, None] + ahead[None, :], mask=mask, other=0.0)
        xs = xs + (x,)  # noqa: RUF005
    return xs


@triton.jit(do_not_specialize=["tokens"])
def packed_few_kernel(
    x_ptr,  # [tokens, columns]
    weight_ptr,  # [rows, num_words] int32
    weight_scale_ptr,  # [rows, groups]
    zero_ptr,  # [rows, groups] uint8, or None
    bias_ptr,  # [rows] or None
    out_ptr,  # [tokens, out_features]
    partial_ptr,  # [SPLITS, tiles, FEATURES, TOKENS] float32, or None
    counters_ptr,  # [tiles] int32, all 0, or None
    stride_x_token,
    tokens,
    out_features,  # rows, or half of them with ACTIVATION: those of ups lie behind
    columns,
    num_words,
    groups,
    steps,  # of a slice
    ACTIVATION: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,  # columns; 0: all
    WORDS: tl.constexpr,  # of a chunk
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,  # of the tile: SLICES times those of the weight
    SLICES: tl.constexpr,  # of the columns of a split
    SPLITS: tl.constexpr,
    STEP: tl.constexpr,  # chunks at a time
    MASKED: tl.constexpr,  # slices end behind the last column, or tiles behind the last row
    IS_AHEAD: tl.constexpr,  # scales are read a step ahead
    OVERLAPPED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    FEATURES: tl.constexpr = ROWS // SLICES  # rows of the weight
    IS_GATED: tl.constexpr = ACTIVATION is not None
    PARTS: tl.constexpr = 1 if GROUP == 0 else _CHUNK // GROUP  # of a chunk
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    tile = tl.program_id(0)
    split = tl.program_id(1)
    # A warp of the matrix unit has 16 rows, of which a thread reads two: r and r + 8.
    pair = tl.arange(0, ROWS // 2)
    of_pair = (pair // 8 * 16 + pair % 8)[:, None] + tl.arange(0, 2)[None, :] * 8
    rows, live = _feature(of_pair % FEATURES, tile, out_features, FEATURES, IS_GATED)
    first_chunk = (split * SLICES + of_pair // FEATURES) * (steps * STEP)
    words_left = tl.where(live, num_words - first_chunk * WORDS, 0)
    word = tl.arange(0, WORDS // 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    row_ptrs = weight_ptr + (rows.to(tl.int64) * num_words + first_chunk * WORDS)[:, :, None, None]
    row_ptrs += word[None, None, :, :]
    words = _read_words(row_ptrs, words_left, 0, STEP, WORDS, MASKED)
    row = tl.arange(0, ROWS)
    rows, live_rows = _feature(row % FEATURES, tile, out_features, FEATURES, IS_GATED)
    of_row = (split * SLICES + row // FEATURES) * (steps * STEP)  # first chunk
    first_group = of_row * PARTS if GROUP > 0 else 0 * of_row
    places = rows.to(tl.int64) * groups + first_group
    groups_left = tl.where(live_rows, groups - first_group, 0)
    SCALES: tl.constexpr = STEP * PARTS if GROUP > 0 else 1  # of a step
    scales = read_scales(weight_scale_ptr, places, groups_left, SCALES if IS_AHEAD else 1)
    let_next_start(OVERLAPPED)
    wait_for_inputs(OVERLAPPED)

    column = tl.arange(0, SLICES * TOKENS)
    token = column % TOKENS
    first_column = (split * SLICES + column // TOKENS) * (steps * STEP * _CHUNK)
    x_ptrs = x_ptr + token.to(tl.int64) * stride_x_token + first_column
    acc = tl.zeros([ROWS, SLICES * TOKENS], tl.float32)
    for step in range(steps):
        ahead = step * STEP  # chunks
        xs = _read_inputs(
            x_ptrs, token < tokens, columns - first_column, ahead, STEP, GROUP, MASKED
        )
        following, following_scales = words, scales
        if step + 1 < steps:
            following = _read_words(row_ptrs, words_left, ahead + STEP, STEP, WORDS, MASKED)
            if GROUP > 0 and IS_AHEAD:
                group = (ahead + STEP) * PARTS
                following_scales = read_scales(
                    weight_scale_ptr, places + group, groups_left - group, SCALES
                )
        for u in tl.static_range(STEP):
            group = (ahead + u) * PARTS if GROUP > 0 else 0
            by_row = tl.reshape(words[u], (ROWS // 16, 8, 2, WORDS // 16, 16))
            by_row = tl.reshape(tl.permute(by_row, (0, 2, 1, 3, 4)), (ROWS, WORDS // 16, 16))
            numbers = code_numbers(
                by_row,
                zero_ptr,
                places + group,
                groups_left - group,
                ROWS,
                KIND,
                GROUP,
                WORDS,
                DTYPE,
                INTERPRETED,
            )
            of_chunk = scales
            if not IS_AHEAD:
                of_chunk = read_scales(weight_scale_ptr, places + group, groups_left - group, PARTS)
            acc = add_products(
                acc, numbers, xs, of_chunk, u * PARTS, u * PARTS if IS_AHEAD else 0, ROWS, GROUP,
                INTERPRETED,
            )  # fmt: skip
        words, scales = following, following_scales

    if SLICES > 1:
        is_own = (row // FEATURES)[:, None] == (column // TOKENS)[None, :]
        acc = tl.reshape(tl.where(is_own, acc, 0.0), (ROWS, SLICES, TOKENS))
        acc = tl.reshape(tl.sum(acc, axis=1), (SLICES, FEATURES, TOKENS))
        acc = tl.sum(acc, axis=0)
    is_last = True
    if SPLITS > 1:
        acc, is_last = meet(acc, partial_ptr, counters_ptr, tile, split, SPLITS, FEATURES, TOKENS)
    if is_last:
        if IS_GATED:
            by_part = tl.reshape(acc, (2, FEATURES // 2, TOKENS))
            gate, up = tl.split(tl.permute(by_part, (1, 2, 0)))
            features = tile * (FEATURES // 2) + tl.arange(0, FEATURES // 2)
            write_product(
                gate, up, bias_ptr, out_ptr, features, tokens, out_features, ACTIVATION, TOKENS
            )
        else:
            features = tile * FEATURES + tl.arange(0, FEATURES)
            write_product(acc, acc, bias_ptr, out_ptr, features, tokens, out_features, None, TOKENS)
