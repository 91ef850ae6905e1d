"""Triton kernel of head_products; see kernels/head_products.py for the definition.

A program has some columns of one head's matrix, whole, and asks for them before it waits for x.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.primitives import dot
from paceline.kernels._triton.runtime import block_dim, cdiv, interpreted, next_power_of_2

_ELEMENTS = 8192  # of one program's part of a matrix
_FEWEST = 16  # rows and columns of a tile that the matrix unit takes
_MANY_TOKENS = 16  # more take as many registers again


@triton.jit(do_not_specialize=["tokens"])
def _head_products_kernel(
    x_ptr,  # [tokens, heads, INNER]
    weight_ptr,  # [heads, INNER, COLUMNS]
    out_ptr,  # [tokens, heads, COLUMNS]
    stride_x_token,
    stride_x_head,
    stride_weight_head,
    stride_weight_inner,
    stride_weight_column,
    stride_out_token,
    stride_out_head,
    tokens,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WIDEN: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inner = tl.arange(0, BLOCK_INNER)
    is_column = columns < COLUMNS
    is_inner = inner < INNER
    column_ptrs = weight_ptr + head * stride_weight_head + columns * stride_weight_column
    weight = tl.load(
        column_ptrs[:, None] + (inner * stride_weight_inner)[None, :],
        mask=is_column[:, None] & is_inner[None, :],
        other=0.0,
    )
    let_next_start(OVERLAPPED)
    wait_for_inputs(OVERLAPPED)
    x_head_ptr = x_ptr + head * stride_x_head
    out_head_ptr = out_ptr + head * stride_out_head
    if BLOCK_TOKENS == 1:
        x = tl.load(x_head_ptr + inner, mask=is_inner, other=0.0).to(tl.float32)
        product = tl.sum(weight.to(tl.float32) * x[None, :], axis=1)
        tl.store(out_head_ptr + columns, product.to(out_ptr.dtype.element_ty), mask=is_column)
    else:
        token = tl.arange(0, BLOCK_TOKENS)
        is_token = token < tokens
        x = tl.load(
            x_head_ptr + (token * stride_x_token)[:, None] + inner[None, :],
            mask=is_token[:, None] & is_inner[None, :],
            other=0.0,
        )
        zeros = tl.zeros([BLOCK_COLUMNS, BLOCK_TOKENS], tl.float32)
        product = dot(weight, tl.trans(x), zeros, WIDEN)
        tl.store(
            out_head_ptr + (token * stride_out_token)[None, :] + columns[:, None],
            product.to(out_ptr.dtype.element_ty),
            mask=is_column[:, None] & is_token[None, :],
        )


def launch_head_products(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """One program for each block of a head's columns; arguments as checked by
    kernels/head_products.py."""
    tokens, heads, inner = x.shape
    columns = out.shape[2]
    block_inner = block_dim(inner)
    block_columns = max(_FEWEST, _ELEMENTS // block_inner)
    launch(
        _head_products_kernel,
        (cdiv(columns, block_columns), heads),
        x,
        weight,
        out,
        *x.stride()[:2],
        *weight.stride(),
        *out.stride()[:2],
        tokens,
        INNER=inner,
        COLUMNS=columns,
        BLOCK_INNER=block_inner,
        BLOCK_COLUMNS=block_columns,
        BLOCK_TOKENS=1 if tokens == 1 else max(_FEWEST, next_power_of_2(tokens)),
        WIDEN=x.dtype == torch.bfloat16 and interpreted(_head_products_kernel),
        num_warps=4 if tokens <= _MANY_TOKENS else 8,
        **overlap_options(x.device, _head_products_kernel),
    )
