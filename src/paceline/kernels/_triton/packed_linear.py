"""Triton kernels of packed_linear; see kernels/packed_linear.py for the definition.

Both take the product transposed, [rows, tokens] = W x^T, chunk by chunk.  A packed weight lies as
the matrix unit reads its left operand, so that words go from memory through two or three
instructions into it, and each group's part of the sum is scaled in float32.

Few tokens: a program holds whole rows of words in registers, asked for in one go, before it waits
for x.  So that its warps have work, a row's chunks are cut into slices, and the matrix unit gets
slices of rows as rows and slices of tokens as tokens; of all products those of equal slices are
taken, and added.  Worked example, 2 slices of 8 rows and of 8 tokens: rows 0..7 of the tile hold
the left halves of the weight's rows, 8..15 their right halves, columns 0..7 the tokens' left
halves; out[r, t] is tile[r, t] + tile[8 + r, 8 + t].

More tokens: a loop with chunks on their way.  Split sums meet as in skinny_linear.
"""

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.packed_codes import chunk_numbers, group_of_word, part_of
from paceline.kernels._triton.primitives import biased_activation, dot
from paceline.kernels._triton.runtime import cdiv, interpreted, require_runnable
from paceline.kernels._triton.skinny_linear import meet
from paceline.kernels.packed_linear import PackedTile
from paceline.kernels.packed_weight import CHUNK, FP8, PackedWeight, words_of

_CHUNK = tl.constexpr(CHUNK)
_FEW_CHUNKS = 2  # on their way


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
def _add_products(
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
def _write(
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


@triton.jit(do_not_specialize=["tokens"])
def _packed_few_kernel(
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
            acc = _add_products(
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
            _write(gate, up, bias_ptr, out_ptr, features, tokens, out_features, ACTIVATION, TOKENS)
        else:
            features = tile * FEATURES + tl.arange(0, FEATURES)
            _write(acc, acc, bias_ptr, out_ptr, features, tokens, out_features, None, TOKENS)


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
    return _add_products(acc, numbers, xs, scales, 0, 0, ROWS, GROUP, INTERPRETED)


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


@triton.jit(do_not_specialize=["tokens"])
def _packed_more_kernel(
    x_ptr,  # [tokens, columns]
    weight_ptr,  # [rows, num_words] int32
    weight_scale_ptr,  # [rows, groups]
    zero_ptr,  # [rows, groups] uint8, or None
    bias_ptr,  # [rows] or None
    out_ptr,  # [tokens, rows]
    partial_ptr,  # [SPLITS, tiles, ROWS, TOKENS] float32, or None
    counters_ptr,  # [tiles] int32, all 0, or None
    stride_x_token,
    tokens,
    out_features,
    columns,
    num_words,
    groups,
    chunks_per_split,
    ACTIVATION: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,  # columns; 0: all
    WORDS: tl.constexpr,  # of a chunk
    SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    PARTS: tl.constexpr = 1 if GROUP == 0 else _CHUNK // GROUP  # of a chunk
    PART: tl.constexpr = _CHUNK // PARTS
    tile = tl.program_id(0)
    split = tl.program_id(1)
    local = tl.arange(0, ROWS)
    features = tile * ROWS + local
    rows = features.to(tl.int64)
    token = tl.arange(0, TOKENS)
    live_rows = features < out_features
    live_tokens = token < tokens
    row_ptrs = weight_ptr + rows[:, None] * num_words + tl.arange(0, WORDS)[None, :]
    up_ptrs = row_ptrs + tl.cast(out_features, tl.int64) * num_words
    x_ptrs = x_ptr + token[:, None] * stride_x_token + tl.arange(0, PART)[None, :]
    places = rows * groups
    up_places = places + tl.cast(out_features, tl.int64) * groups
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    acc_up = acc
    first_chunk = split * chunks_per_split
    scales = chunk_scales(weight_scale_ptr, places, live_rows, groups, first_chunk, GROUP)
    up_scales = scales
    if ACTIVATION is not None:
        up_scales = chunk_scales(weight_scale_ptr, up_places, live_rows, groups, first_chunk, GROUP)
    wait_for_inputs(OVERLAPPED)
    for chunk in range(first_chunk, first_chunk + chunks_per_split):
        xs = ()
        for part in tl.static_range(PARTS):
            first = chunk * _CHUNK + part * PART
            inside = (first + tl.arange(0, PART) < columns)[None, :]
            x = tl.load(x_ptrs + first, mask=live_tokens[:, None] & inside, other=0.0)
            xs = xs + (x,)  # noqa: RUF005
        following, following_up = scales, up_scales
        if GROUP > 0:
            following = chunk_scales(weight_scale_ptr, places, live_rows, groups, chunk + 1, GROUP)
        acc = add_chunk(
            acc, row_ptrs, xs, scales, zero_ptr, places, live_rows, groups, chunk, ROWS, KIND,
            GROUP, WORDS, out_ptr.dtype.element_ty, INTERPRETED,
        )  # fmt: skip
        if ACTIVATION is not None:
            if GROUP > 0:
                following_up = chunk_scales(
                    weight_scale_ptr, up_places, live_rows, groups, chunk + 1, GROUP
                )
            acc_up = add_chunk(
                acc_up, up_ptrs, xs, up_scales, zero_ptr, up_places, live_rows, groups, chunk, ROWS,
                KIND, GROUP, WORDS, out_ptr.dtype.element_ty, INTERPRETED,
            )  # fmt: skip
        scales, up_scales = following, following_up
    let_next_start(OVERLAPPED)
    is_last = True
    if SPLITS > 1:
        acc, is_last = meet(acc, partial_ptr, counters_ptr, tile, split, SPLITS, ROWS, TOKENS)
    if is_last:
        _write(acc, acc_up, bias_ptr, out_ptr, features, tokens, out_features, ACTIVATION, TOKENS)


def launch_packed_linear(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    activation: str | None,
    *,
    kind: str,
    group: int,
    tile: PackedTile,
    splits: int,
    out: Tensor,
    partial: Tensor | None,
    counters: Tensor | None,
) -> None:
    """One kernel; arguments as checked by kernels/packed_linear.py."""
    require_runnable("x of packed_linear", x, _packed_more_kernel, otherwise="use unpack_weight")
    (tokens, columns), out_features = x.shape, out.shape[1]
    words = words_of(kind)
    chunks = cdiv(columns, CHUNK)
    shape = (columns, weight.words.shape[1], weight.scale.shape[1])
    common = {
        "ACTIVATION": activation,
        "SPLITS": splits,
        "KIND": kind,
        "GROUP": 0 if group >= columns else group,
        "WORDS": words,
        "TOKENS": tile.tokens,
        "ROWS": tile.rows,
        "INTERPRETED": interpreted(_packed_more_kernel),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    operands = (x, *weight, bias, out, partial, counters, x.stride(0), tokens, out_features, *shape)
    if tile.slices > 0:
        features = tile.rows // tile.slices // (1 if activation is None else 2)
        steps = cdiv(chunks, splits * tile.slices * tile.step)
        is_whole = splits * tile.slices * steps * tile.step * CHUNK == columns
        launch(
            _packed_few_kernel,
            (cdiv(out_features, features), splits),
            *operands,
            steps,
            **common,
            SLICES=tile.slices,
            STEP=tile.step,
            IS_AHEAD=_reads_ahead(weight, kind, group < columns, tile),
            MASKED=not is_whole or out_features % features != 0,
            **overlap_options(x.device, _packed_few_kernel),
        )
        return
    launch(
        _packed_more_kernel,
        (cdiv(out_features, tile.rows), splits),
        *operands,
        chunks // splits,
        **common,
        **overlap_options(x.device, _packed_more_kernel),
    )


def _reads_ahead(weight: PackedWeight, kind: str, has_groups: bool, tile: PackedTile) -> bool:
    """Whether few tokens' scales are read a step ahead.  With a few chunks of fp8 and scales of
    groups, registers would be left for three programs of a multiprocessor in place of four, which
    costs more than it gains, and with zeros it was not measured."""
    is_tight = kind == FP8 and has_groups and tile.step == _FEW_CHUNKS
    return weight.zero is None and not is_tight
