"""Triton kernel of skinny_scaled_linear; see kernels/skinny_scaled_linear.py for the definition.

The product is taken transposed, [rows, tokens] = W x^T.  Of fp8 the matrix unit keeps some 14 bits
of a running sum, and cuts the rest off: what a chunk adds begins at 0, and is added in float32.
Split sums meet as in skinny_linear.
"""

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.packed_products import write_product
from paceline.kernels._triton.runtime import cdiv, require_runnable, shared_memory_bytes
from paceline.kernels._triton.skinny_linear import meet
from paceline.kernels.packed_weight import CHUNK
from paceline.kernels.skinny_scaled_linear import ScaledTile

_CHUNK = tl.constexpr(CHUNK)


@triton.jit(do_not_specialize=["tokens"])
def _skinny_scaled_kernel(
    x_ptr,  # [tokens, chunks * CHUNK] float8e4nv
    x_scale_ptr,  # [tokens] float32
    weight_ptr,  # [rows, chunks * CHUNK] float8e4nv
    weight_scale_ptr,  # [rows]
    bias_ptr,  # [rows] or None
    out_ptr,  # [tokens, out_features]
    partial_ptr,  # [SPLITS, tiles, ROWS, TOKENS] float32, or None
    counters_ptr,  # [tiles] int32, all 0, or None
    tokens,
    out_features,  # rows, or half of them with ACTIVATION: those of ups lie behind
    chunks,
    chunks_per_split,
    ACTIVATION: tl.constexpr,
    SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    IS_GATED: tl.constexpr = ACTIVATION is not None
    tile = tl.program_id(0)
    split = tl.program_id(1)
    features = tile * ROWS + tl.arange(0, ROWS)
    # Rows and tokens behind the last are the last again: what they give is not written.
    row = tl.minimum(features, out_features - 1).to(tl.int64)
    up_row = row + out_features
    live = tl.minimum(tl.arange(0, TOKENS), tokens - 1)
    column = split * chunks_per_split * _CHUNK + tl.arange(0, _CHUNK)
    row_ptrs = weight_ptr + row[:, None] * (chunks * _CHUNK) + column[None, :]
    up_ptrs = weight_ptr + up_row[:, None] * (chunks * _CHUNK) + column[None, :]
    x_ptrs = x_ptr + live[:, None] * (chunks * _CHUNK) + column[None, :]
    wait_for_inputs(OVERLAPPED)

    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    acc_up = acc
    for step in range(chunks_per_split):
        x = tl.trans(tl.load(x_ptrs + step * _CHUNK))
        codes = tl.load(row_ptrs + step * _CHUNK, eviction_policy="evict_first")
        acc = tl.dot(codes, x, acc, max_num_imprecise_acc=_CHUNK)
        if IS_GATED:
            codes = tl.load(up_ptrs + step * _CHUNK, eviction_policy="evict_first")
            acc_up = tl.dot(codes, x, acc_up, max_num_imprecise_acc=_CHUNK)
    let_next_start(OVERLAPPED)
    x_scale = tl.load(x_scale_ptr + live)[None, :]
    acc *= tl.load(weight_scale_ptr + row).to(tl.float32)[:, None] * x_scale
    if IS_GATED:
        acc_up *= tl.load(weight_scale_ptr + up_row).to(tl.float32)[:, None] * x_scale
    is_last = True
    if SPLITS > 1:
        acc, is_last = meet(acc, partial_ptr, counters_ptr, tile, split, SPLITS, ROWS, TOKENS)
    if is_last:
        write_product(
            acc, acc_up, bias_ptr, out_ptr, features, tokens, out_features, ACTIVATION, TOKENS
        )


def launch_skinny_scaled_linear(
    codes: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    activation: str | None,
    *,
    tile: ScaledTile,
    splits: int,
    out: Tensor,
    partial: Tensor | None,
    counters: Tensor | None,
) -> None:
    """One kernel; arguments as checked by kernels/skinny_scaled_linear.py.  codes, weight: e4m3
    [tokens, padded columns] and [rows, padded columns]; scales: [tokens, 1] and [rows, 1]."""
    require_runnable(
        "x of skinny_scaled_linear", out, _skinny_scaled_kernel, otherwise="use packed_linear"
    )
    tokens, out_features = out.shape
    chunks = weight.shape[1] // CHUNK
    weight_rows = tile.rows if activation is None else 2 * tile.rows
    stage_bytes = (weight_rows + tile.tokens) * CHUNK
    launch(
        _skinny_scaled_kernel,
        (cdiv(out_features, tile.rows), splits),
        codes,
        x_scale,
        weight,
        weight_scale,
        bias,
        out,
        partial,
        counters,
        tokens,
        out_features,
        chunks,
        chunks // splits,
        ACTIVATION=activation,
        SPLITS=splits,
        TOKENS=tile.tokens,
        ROWS=tile.rows,
        num_warps=tile.warps,
        num_stages=min(tile.stages, shared_memory_bytes(out.device) // stage_bytes),
        **overlap_options(out.device, _skinny_scaled_kernel),
    )
