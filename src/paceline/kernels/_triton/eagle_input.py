"""Triton kernel of eagle_input; see kernels/eagle_input.py for the definition."""

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.runtime import next_power_of_2

if TYPE_CHECKING:
    from paceline.kernels.eagle_input import HalfNorms


@triton.jit
def _eagle_input_norm_kernel(
    input_ids_ptr,  # [tokens]  int64
    table_ptr,  # [vocab, dim]
    features_ptr,  # [tokens, dim]
    embedding_norm_ptr,  # [dim]
    feature_norm_ptr,  # [dim]
    out_ptr,  # [tokens, 2 * dim]
    stride_table_row,
    stride_features_token,
    stride_out_token,
    eps,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    let_next_start(OVERLAPPED)
    token = tl.program_id(0).to(tl.int64)
    half = tl.program_id(1)
    cols = tl.arange(0, BLOCK_DIM)
    mask = cols < DIM
    if half == 0:
        row = tl.load(input_ids_ptr + token)
        x = tl.load(table_ptr + row * stride_table_row + cols, mask=mask, other=0.0)
        weight = tl.load(embedding_norm_ptr + cols, mask=mask, other=0.0)
    else:
        x = tl.load(features_ptr + token * stride_features_token + cols, mask=mask, other=0.0)
        weight = tl.load(feature_norm_ptr + cols, mask=mask, other=0.0)
    wide = x.to(tl.float32)
    mean_square = tl.sum(wide * wide, axis=0) / DIM
    normed = (wide * (1.0 / tl.sqrt(mean_square + eps))).to(x.dtype)
    result = normed.to(tl.float32) * weight.to(tl.float32)
    out_ptrs = out_ptr + token * stride_out_token + half * DIM + cols
    tl.store(out_ptrs, result.to(x.dtype), mask=mask)


def launch_eagle_input(
    input_ids: Tensor, table: Tensor, features: Tensor, norms: "HalfNorms", *, out: Tensor
) -> None:
    """One program per half of a row; arguments as checked by kernels/eagle_input.py."""
    tokens, dim = features.shape
    if tokens == 0:
        return
    block_dim = next_power_of_2(dim)
    launch(
        _eagle_input_norm_kernel,
        (tokens, 2),
        input_ids,
        table,
        features,
        norms.embedding,
        norms.feature,
        out,
        table.stride(0),
        features.stride(0),
        out.stride(0),
        norms.eps,
        DIM=dim,
        BLOCK_DIM=block_dim,
        num_warps=min(max(block_dim // 512, 1), 16),
        **overlap_options(features.device, _eagle_input_norm_kernel),
    )
