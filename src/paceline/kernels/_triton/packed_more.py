"""Triton kernel of packed_linear for more tokens than a few; see kernels/packed_linear.py.

A loop with chunks on their way.  Split sums meet as in skinny_linear.
"""

import triton
import triton.language as tl

from paceline.kernels._triton.launch import let_next_start, wait_for_inputs
from paceline.kernels._triton.packed_products import add_chunk, chunk_scales, write_product
from paceline.kernels._triton.skinny_linear import meet
from paceline.kernels.packed_weight import CHUNK

_CHUNK = tl.constexpr(CHUNK)


@triton.jit
def _ask_for_lines(
    weight_ptr,  # [ROWS] int32: of one word each
):
    """Have the second cache read the 128 bytes around each word.  Nothing waits for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [weight_ptr.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["tokens"])
def packed_more_kernel(
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
    if OVERLAPPED and KIND == "int4":
        # Of two chunks a row has 128 bytes (docs/decisions/134-two-chunks-before-x.md).
        last = tl.minimum(features, out_features - 1).to(tl.int64)
        wanted = weight_ptr + last * num_words + first_chunk * WORDS
        _ask_for_lines(wanted)
        if ACTIVATION is not None:
            _ask_for_lines(wanted + tl.cast(out_features, tl.int64) * num_words)
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
        write_product(
            acc, acc_up, bias_ptr, out_ptr, features, tokens, out_features, ACTIVATION, TOKENS
        )
