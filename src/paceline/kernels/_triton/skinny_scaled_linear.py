"""Triton kernel of skinny_scaled_linear; see kernels/skinny_scaled_linear.py for the definition.

The product is taken transposed, [rows, tokens] = W x^T.  Of fp8 the matrix unit keeps some 14 bits
of a running sum, and cuts the rest off: each chunk's sum begins at 0, and is added in float32.
Before it waits for x, a program asks for its first words, so that they are in the second cache once
it may begin.  Split sums meet as in packed_linear.
"""

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.packed_linear import meet, write_product
from paceline.kernels._triton.primitives import ask_ahead
from paceline.kernels._triton.runtime import cdiv, require_runnable
from paceline.kernels.packed_weight import CHUNK
from paceline.kernels.round_rows import RoundedRows
from paceline.kernels.skinny_scaled_linear import ScaledTile

_CHUNK = tl.constexpr(CHUNK)
_ASKED = tl.constexpr(4)  # chunks of a row, before x is there


@triton.jit(do_not_specialize=["tokens", "x_rows"])
def _skinny_scaled_kernel(
    x_ptr,  # [x_rows, chunks * CHUNK] float8e4nv
    x_scale_ptr,  # [groups, x_rows] float32
    weight_ptr,  # [rows, chunks * CHUNK] float8e4nv
    scale_ptr,  # [rows, groups]
    bias_ptr,  # [rows] or None
    out_ptr,  # [tokens, out_features]
    partial_ptr,  # [SPLITS, tiles, ROWS, TOKENS] float32, or None
    counters_ptr,  # [tiles] int32, all 0, or None
    tokens,
    x_rows,
    out_features,  # rows, or half of them with ACTIVATION: those of ups lie behind
    chunks,
    groups,
    chunks_per_split,
    ACTIVATION: tl.constexpr,
    GROUPED: tl.constexpr,  # a scale for each chunk
    SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    IS_GATED: tl.constexpr = ACTIVATION is not None
    tile = tl.program_id(0)
    split = tl.program_id(1)
    first = split * chunks_per_split
    features = tile * ROWS + tl.arange(0, ROWS)
    # Rows and tokens behind the last are the last again: what they give is not written.
    row = tl.minimum(features, out_features - 1).to(tl.int64)
    up_row = row + out_features
    token = tl.arange(0, TOKENS)
    live = tl.minimum(token, tokens - 1)
    padded = chunks * _CHUNK
    column = first * _CHUNK + tl.arange(0, _CHUNK)
    row_ptrs = weight_ptr + row[:, None] * padded + column[None, :]
    up_ptrs = weight_ptr + up_row[:, None] * padded + column[None, :]
    x_ptrs = x_ptr + live[:, None] * padded + column[None, :]
    let_next_start(OVERLAPPED)
    if OVERLAPPED:
        for ahead in tl.static_range(_ASKED):
            line = tl.minimum(first + ahead, chunks - 1) * _CHUNK
            ask_ahead(weight_ptr + row * padded + line)
            if IS_GATED:
                ask_ahead(weight_ptr + up_row * padded + line)
    wait_for_inputs(OVERLAPPED)

    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    acc_up = acc
    for step in range(chunks_per_split):
        x = tl.trans(tl.load(x_ptrs + step * _CHUNK))
        weight = tl.load(row_ptrs + step * _CHUNK, eviction_policy="evict_first")
        if GROUPED:
            x_scale = tl.load(x_scale_ptr + (first + step) * x_rows + live)[None, :]
            scale = tl.load(scale_ptr + row * groups + first + step).to(tl.float32)[:, None]
            acc += tl.dot(weight, x) * (scale * x_scale)
        else:
            acc += tl.dot(weight, x)
        if IS_GATED:
            up = tl.load(up_ptrs + step * _CHUNK, eviction_policy="evict_first")
            if GROUPED:
                scale = tl.load(scale_ptr + up_row * groups + first + step).to(tl.float32)[:, None]
                acc_up += tl.dot(up, x) * (scale * x_scale)
            else:
                acc_up += tl.dot(up, x)
    if not GROUPED:
        x_scale = tl.load(x_scale_ptr + live)[None, :]
        acc *= tl.load(scale_ptr + row).to(tl.float32)[:, None] * x_scale
        if IS_GATED:
            acc_up *= tl.load(scale_ptr + up_row).to(tl.float32)[:, None] * x_scale
    is_last = True
    if SPLITS > 1:
        acc, is_last = meet(acc, partial_ptr, counters_ptr, tile, split, SPLITS, ROWS, TOKENS)
    if is_last:
        write_product(
            acc, acc_up, bias_ptr, out_ptr, features, tokens, out_features, ACTIVATION, TOKENS
        )


def launch_skinny_scaled_linear(
    x: RoundedRows,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    activation: str | None,
    *,
    tile: ScaledTile,
    splits: int,
    out: Tensor,
    partial: Tensor | None,
    counters: Tensor | None,
) -> None:
    """One kernel; arguments as checked by kernels/skinny_scaled_linear.py.  weight: codes [rows,
    padded columns]; scale: [rows, groups]."""
    require_runnable(
        "x of skinny_scaled_linear", out, _skinny_scaled_kernel, otherwise="use packed_linear"
    )
    (tokens, out_features), groups = out.shape, scale.shape[1]
    chunks = weight.shape[1] // CHUNK
    launch(
        _skinny_scaled_kernel,
        (cdiv(out_features, tile.rows), splits),
        *x,
        weight,
        scale,
        bias,
        out,
        partial,
        counters,
        tokens,
        x.codes.shape[0],
        out_features,
        chunks,
        groups,
        chunks // splits,
        ACTIVATION=activation,
        GROUPED=groups > 1,
        SPLITS=splits,
        TOKENS=tile.tokens,
        ROWS=tile.rows,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **overlap_options(out.device, _skinny_scaled_kernel),
    )
