"""Triton kernel of activated_linear; see kernels/activated_linear.py for the definition.

The sums of a tile go no further than registers before the activation.  Several programs share a
processor, so that some multiply while others activate.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.primitives import dot, quick_activation
from paceline.kernels._triton.runtime import cdiv, interpreted, require_runnable
from paceline.kernels.activated_linear import ProductTile
from paceline.kernels.stand_in import multiprocessors


@triton.jit
def _activate_tile(
    tile,
    x_tiles,
    weight_tiles,
    bias_ptr,
    out_tiles,
    tokens,
    features,
    INNER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One tile of the output; arguments as of the kernel."""
    DTYPE: tl.constexpr = out_tiles.dtype
    column_tiles = tl.cdiv(features, FEATURES)
    group = tile // (GROUP * column_tiles)
    size = tl.minimum(tl.cdiv(tokens, TOKENS) - group * GROUP, GROUP)
    within = tile % (GROUP * column_tiles)
    first_token = (group * GROUP + within % size) * TOKENS
    first_feature = within // size * FEATURES
    acc = tl.zeros([TOKENS, FEATURES], tl.float32)
    acc_up = tl.zeros([TOKENS, FEATURES], tl.float32)
    for start in range(0, INNER, STEP):
        x = x_tiles.load([first_token, start])
        acc = dot(x, tl.trans(weight_tiles.load([first_feature, start])), acc, WIDEN)
        if GATED:
            ups = weight_tiles.load([features + first_feature, start])
            acc_up = dot(x, tl.trans(ups), acc_up, WIDEN)
    if bias_ptr is not None:
        feature = tl.minimum(first_feature + tl.arange(0, FEATURES), features - 1)
        acc += tl.load(bias_ptr + feature).to(tl.float32)[None, :]
        if GATED:
            acc_up += tl.load(bias_ptr + features + feature).to(tl.float32)[None, :]
    result = quick_activation(acc.to(DTYPE).to(tl.float32), ACTIVATION)
    if GATED:
        result = result.to(DTYPE).to(tl.float32) * acc_up.to(DTYPE).to(tl.float32)
    out_tiles.store([first_token, first_feature], result.to(DTYPE))


@triton.jit(do_not_specialize=["tokens", "features"])
def _activated_linear_kernel(
    x_tiles,  # of [tokens, inner]
    weight_tiles,  # of [rows, inner]
    bias_ptr,  # [rows], or None
    out_tiles,  # of [tokens, features]
    tokens,
    features,  # rows, or half of them when GATED: those of ups lie behind
    INNER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    STEP: tl.constexpr,  # divides INNER
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,  # that take tiles in turns; None: one for each
    WIDEN: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    if PROGRAMS is None:
        _activate_tile(
            tl.program_id(0), x_tiles, weight_tiles, bias_ptr, out_tiles, tokens, features,
            INNER, ACTIVATION, GATED, TOKENS, FEATURES, STEP, GROUP, WIDEN,
        )  # fmt: skip
    else:
        num_tiles = tl.cdiv(tokens, TOKENS) * tl.cdiv(features, FEATURES)
        for tile in range(tl.program_id(0), num_tiles, PROGRAMS):
            _activate_tile(
                tile, x_tiles, weight_tiles, bias_ptr, out_tiles, tokens, features,
                INNER, ACTIVATION, GATED, TOKENS, FEATURES, STEP, GROUP, WIDEN,
            )  # fmt: skip
    let_next_start(OVERLAPPED)


def launch_activated_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    gated: bool,
    out: Tensor,
    *,
    tile: ProductTile,
) -> None:
    """One program for each tile; arguments as checked by kernels/activated_linear.py."""
    require_runnable(
        "x of activated_linear",
        x,
        _activated_linear_kernel,
        otherwise="take linear and act_and_mul",
    )
    tokens, features = out.shape
    if not out.numel():
        return
    num_tiles, programs = cdiv(tokens, tile.tokens) * cdiv(features, tile.features), None
    if tile.per_processor is not None:
        programs = tile.per_processor * multiprocessors(x.device)
    launch(
        _activated_linear_kernel,
        (num_tiles if programs is None else min(num_tiles, programs),),
        TensorDescriptor.from_tensor(x, [tile.tokens, tile.inner]),
        TensorDescriptor.from_tensor(weight, [tile.features, tile.inner]),
        bias,
        TensorDescriptor.from_tensor(out, [tile.tokens, tile.features]),
        tokens,
        features,
        INNER=x.shape[1],
        ACTIVATION=activation,
        GATED=gated,
        TOKENS=tile.tokens,
        FEATURES=tile.features,
        STEP=tile.inner,
        GROUP=tile.group,
        PROGRAMS=programs,
        WIDEN=interpreted(_activated_linear_kernel),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **overlap_options(x.device, _activated_linear_kernel),
    )
