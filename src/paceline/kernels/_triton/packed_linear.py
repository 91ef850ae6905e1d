"""Triton kernels of packed_linear; see kernels/packed_linear.py for the definition.

One token: each program holds whole rows of words in registers, asked for in one go, before it waits
for x.  Words are seen in fours, which one load brings and in which a row of x lies without gaps.
More tokens: the product is taken transposed, [features, tokens] = W x^T, chunk by chunk; each field
of a chunk's words is a tile of neighbouring columns.  Split sums meet as in skinny_linear.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.packed_codes import half_numbers, raised
from paceline.kernels._triton.primitives import biased_activation, dot
from paceline.kernels._triton.runtime import cdiv, interpreted, next_power_of_2, require_runnable
from paceline.kernels.packed_linear import PackedTile
from paceline.kernels.packed_weight import CHUNK, PackedWeight

_QUADS_HELD = 16  # by one thread, for one token
_MOST_FEATURES = 64


@triton.jit
def _packed_row_kernel(
    x_ptr,  # [columns]
    weight_ptr,  # [rows, num_words] int32
    scale_ptr,  # [rows, groups]
    zero_ptr,  # [rows, groups] uint8, or None
    bias_ptr,  # [rows] or None
    out_ptr,  # [out_features]
    out_features,  # rows, or half of them with ACTIVATION: those of ups lie behind
    columns,
    num_words,
    groups,
    ACTIVATION: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,  # columns; 0: all
    WORDS: tl.constexpr,  # of a chunk
    FIELDS: tl.constexpr,  # of a word
    FEATURES: tl.constexpr,
    BLOCK_QUADS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    PARTS: tl.constexpr = 1 if ACTIVATION is None else 2
    local = tl.arange(0, PARTS * FEATURES)
    features = tl.program_id(0) * FEATURES + local % FEATURES
    live = features < out_features
    rows = (features + (local // FEATURES) * out_features).to(tl.int64)
    quads = tl.arange(0, BLOCK_QUADS)
    four = tl.arange(0, 4)
    inside = quads * 4 < num_words
    # Quads come first: Triton gives the first dimension of equals to threads, and rows, which share
    # x, stay within one.
    at = quads[:, None, None] * 4 + four[None, None, :]
    words = tl.load(
        weight_ptr + rows[None, :, None] * num_words + at,
        mask=inside[:, None, None] & live[None, :, None],
        other=0,
        eviction_policy="evict_first",
    )
    let_next_start(OVERLAPPED)
    wait_for_inputs(OVERLAPPED)

    CHUNK_COLUMNS: tl.constexpr = WORDS * FIELDS
    IN_GROUP: tl.constexpr = FIELDS if GROUP == 0 else GROUP // WORDS  # fields of one group
    chunk = quads // (WORDS // 4)
    first = chunk * CHUNK_COLUMNS + (quads % (WORDS // 4)) * 4  # column of field 0
    cols = first[:, None, None] + four[None, None, :]
    HALF: tl.constexpr = 8.0 if KIND == "int4" else 128.0
    acc = tl.zeros([BLOCK_QUADS, PARTS * FEATURES], tl.float32)
    for part in tl.static_range(FIELDS // IN_GROUP):
        products = tl.zeros([BLOCK_QUADS, PARTS * FEATURES, 4], tl.float32)
        sums = tl.zeros([BLOCK_QUADS, 1, 4], tl.float32)  # of x
        too_high = tl.zeros([BLOCK_QUADS, 1, 4], tl.float32)
        for step in tl.static_range(IN_GROUP):
            value, factor = raised(words, part * IN_GROUP + step, KIND)
            column = cols + (part * IN_GROUP + step) * WORDS
            x = tl.load(x_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
            scaled = x * factor
            products += value * scaled
            if zero_ptr is not None:
                sums += x
                too_high += scaled
            else:
                too_high += x * (factor + HALF)
        total = tl.sum(products, axis=2)
        place = rows[None, :] * groups
        held = inside[:, None] & live[None, :]
        if GROUP > 0:
            group = chunk * (CHUNK_COLUMNS // GROUP) + part
            place += group[:, None]
            held = held & (group < groups)[:, None]
        if KIND != "fp8":
            if zero_ptr is not None:
                zero = tl.load(zero_ptr + place, mask=held, other=0).to(tl.float32)
                total -= zero * tl.sum(sums, axis=2)
            total -= tl.sum(too_high, axis=2)
        if GROUP > 0:
            total *= tl.load(scale_ptr + place, mask=held, other=0.0).to(tl.float32)
        acc += total
    product = tl.sum(acc, axis=0)
    if GROUP == 0:
        product *= tl.load(scale_ptr + rows, mask=live, other=0.0).to(tl.float32)
    if KIND == "fp8":
        product *= 1048576.0  # 2 ** 20, what `raised` leaves of 2 ** 120
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    if ACTIVATION is not None:
        gate, up = tl.split(tl.trans(tl.reshape(product, (2, FEATURES))))
        at_out = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
        is_out = at_out < out_features
        result = biased_activation(
            gate, up, bias_ptr, at_out, is_out, out_features, ACTIVATION, DTYPE
        )
        tl.store(out_ptr + at_out, result, mask=is_out)
    else:
        result = biased_activation(
            product, product, bias_ptr, features, live, out_features, None, DTYPE
        )
        tl.store(out_ptr + features, result, mask=live)


@triton.jit
def _chunk_product(
    words,  # [BLOCK_FEATURES, WORDS] int32
    x_ptrs,  # [BLOCK_TOKENS, WORDS] where field 0's columns of the chunk are
    acc,  # [BLOCK_FEATURES, BLOCK_TOKENS] float32
    scale_ptrs,  # [BLOCK_FEATURES] of the chunk's first group
    zero_ptrs,  # [BLOCK_FEATURES], or None
    live_rows,  # [BLOCK_FEATURES]
    live_tokens,  # [BLOCK_TOKENS]
    columns_left,  # from the chunk's first on
    groups_left,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    WORDS: tl.constexpr,
    FIELDS: tl.constexpr,
    DTYPE: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """acc and what one chunk adds to it."""
    IN_GROUP: tl.constexpr = FIELDS if GROUP == 0 else GROUP // WORDS
    HALF: tl.constexpr = 8.0 if KIND == "int4" else 128.0
    word = tl.arange(0, WORDS)
    for part in tl.static_range(FIELDS // IN_GROUP):
        held = live_rows & (tl.full((1,), part, tl.int32) < groups_left)
        zero = tl.full((1, 1), HALF, tl.float32)
        if zero_ptrs is not None:
            zero = tl.load(zero_ptrs + part, mask=held, other=0).to(tl.float32)[:, None]
        total = tl.zeros(acc.shape, tl.float32) if GROUP > 0 else acc
        for step in tl.static_range(IN_GROUP):
            field = part * IN_GROUP + step
            inside = (field * WORDS + word < columns_left)[None, :]
            x = tl.load(x_ptrs + field * WORDS, mask=live_tokens[:, None] & inside, other=0.0)
            numbers = half_numbers(words, zero, field, KIND, DTYPE, WIDEN)
            total = dot(numbers, tl.trans(x), total, WIDEN)
        if GROUP > 0:
            scale = tl.load(scale_ptrs + part, mask=held, other=0.0).to(tl.float32)
            acc += total * scale[:, None]
        else:
            acc = total
    return acc


@triton.jit(do_not_specialize=["tokens"])
def _packed_rows_kernel(
    x_ptr,  # [tokens, columns]
    weight_ptr,  # [rows, num_words] int32
    scale_ptr,  # [rows, groups]
    zero_ptr,  # [rows, groups] uint8, or None
    bias_ptr,  # [rows] or None
    out_ptr,  # [tokens, out_features]
    partial_ptr,  # [SPLITS, tiles, BLOCK_FEATURES, BLOCK_TOKENS] float32, or None
    counters_ptr,  # [tiles] int32, all 0, or None
    stride_x_token,
    tokens,
    out_features,
    columns,
    num_words,
    groups,
    chunks_per_split,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,  # columns; 0: all
    WORDS: tl.constexpr,  # of a chunk
    FIELDS: tl.constexpr,  # of a word
    SPLITS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
    OVERLAPPED: tl.constexpr,
    WIDEN: tl.constexpr,
):
    tile = tl.program_id(0)
    split = tl.program_id(1)
    local = tl.arange(0, BLOCK_FEATURES)
    features = tile * BLOCK_FEATURES + local
    token = tl.arange(0, BLOCK_TOKENS)
    word = tl.arange(0, WORDS)
    live_rows = features < out_features
    live_tokens = token < tokens
    rows = features.to(tl.int64)
    row_ptrs = weight_ptr + rows[:, None] * num_words + word[None, :]
    x_ptrs = x_ptr + token[:, None] * stride_x_token + word[None, :]
    CHUNK_COLUMNS: tl.constexpr = WORDS * FIELDS
    GROUPS: tl.constexpr = 0 if GROUP == 0 else CHUNK_COLUMNS // GROUP  # of a chunk
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    acc = tl.zeros([BLOCK_FEATURES, BLOCK_TOKENS], tl.float32)
    wait_for_inputs(OVERLAPPED)
    for chunk in range(split * chunks_per_split, (split + 1) * chunks_per_split):
        left = columns - chunk * CHUNK_COLUMNS
        groups_left = groups - chunk * GROUPS
        scales = scale_ptr + chunk * GROUPS
        zeros = None if zero_ptr is None else zero_ptr + chunk * GROUPS
        words = tl.load(
            row_ptrs + chunk * WORDS,
            mask=live_rows[:, None],
            other=0,
            eviction_policy="evict_first",
        )
        acc = _chunk_product(
            words,
            x_ptrs + chunk * CHUNK_COLUMNS,
            acc,
            scales + rows * groups,
            None if zero_ptr is None else zeros + rows * groups,
            live_rows,
            live_tokens,
            left,
            groups_left,
            KIND,
            GROUP,
            WORDS,
            FIELDS,
            DTYPE,
            WIDEN,
        )
    let_next_start(OVERLAPPED)
    if GROUP == 0:
        acc *= tl.load(scale_ptr + rows, mask=live_rows, other=0.0).to(tl.float32)[:, None]

    is_last = True
    if SPLITS > 1:
        tiles = tl.num_programs(0)
        place = local[:, None] * BLOCK_TOKENS + token[None, :]
        part_size: tl.constexpr = BLOCK_FEATURES * BLOCK_TOKENS
        tl.store(partial_ptr + (split * tiles + tile) * part_size + place, acc)
        tl.debug_barrier()  # every thread's part is written before the arrival is counted
        is_last = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel") == SPLITS - 1
        if is_last:
            acc = tl.zeros([BLOCK_FEATURES, BLOCK_TOKENS], tl.float32)
            for part in tl.static_range(SPLITS):
                part_ptr = partial_ptr + (part * tiles + tile) * part_size
                acc += tl.load(part_ptr + place, cache_modifier=".cg")
            tl.store(counters_ptr + tile, 0)
    if is_last:
        live = live_rows[:, None] & live_tokens[None, :]
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + features, mask=live_rows, other=0.0).to(tl.float32)
            acc += bias[:, None]
        out_ptrs = out_ptr + token.to(tl.int64)[None, :] * out_features + features[:, None]
        tl.store(out_ptrs, acc.to(DTYPE), mask=live)


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
    require_runnable("x of packed_linear", x, _packed_rows_kernel, otherwise="use unpack_weight")
    (tokens, columns), out_features = x.shape, out.shape[1]
    fields = 8 if kind == "int4" else 4
    num_words = weight.words.shape[1]
    shape = (columns, num_words, weight.scale.shape[1])
    stored = {
        "KIND": kind,
        "GROUP": 0 if group >= columns else group,
        "WORDS": CHUNK // fields,
        "FIELDS": fields,
    }
    if tokens == 1:
        quads = next_power_of_2(num_words // 4)
        parts = 1 if activation is None else 2
        warps = 2 if quads <= 256 else min(16, quads // 128)
        features = _QUADS_HELD * 32 * warps // quads // parts
        features = max(1, min(_MOST_FEATURES, features))
        launch(
            _packed_row_kernel,
            (cdiv(out_features, features),),
            x,
            *weight,
            bias,
            out,
            out_features,
            *shape,
            ACTIVATION=activation,
            **stored,
            FEATURES=features,
            BLOCK_QUADS=quads,
            num_warps=warps,
            **overlap_options(x.device, _packed_row_kernel),
        )
        return
    launch(
        _packed_rows_kernel,
        (cdiv(out_features, tile.features), splits),
        x,
        *weight,
        bias,
        out,
        partial,
        counters,
        x.stride(0),
        tokens,
        out_features,
        *shape,
        cdiv(columns, CHUNK) // splits,
        **stored,
        SPLITS=splits,
        BLOCK_TOKENS=tile.tokens,
        BLOCK_FEATURES=tile.features,
        WIDEN=x.dtype == torch.bfloat16 and interpreted(_packed_rows_kernel),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **overlap_options(x.device, _packed_rows_kernel),
    )
