"""skinny_linear: x W^T + b for a few tokens on a GPU, optionally with the gated activation behind.

A decode step's products read all weights for a handful of tokens, so they take the time of reading
the weights once.  cuBLAS gets 2.5 to 3.8 TB/s of an H200's 4.2 there and adds a pass over split
sums; these kernels get 3.0 to 4.4 (docs/decisions/020-skinny-products.md).
"""

from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from paceline.kernels._check import reject, require_triton
from paceline.kernels.act_and_mul import act_and_mul_reference, check_activation
from paceline.kernels.custom_op import define_op
from paceline.kernels.stand_in import device_type

MAX_TOKENS = 64
_DTYPES = (torch.bfloat16, torch.float16)
_MAX_INNER = 32768  # one row of one token's tile is held in registers
_ENOUGH_TILES = 96  # programs of a product that reads the weight at full speed on 132 processors
_MOST_SPLITS = 4
_SMALLEST_FEATURES = 64
_STEP, _WIDE_STEP = 128, 256  # of the inner dimension; the wide one fills a processor's memory
_FEW_TILES = 132  # one a processor, or fewer: each then has more on its way


class SkinnyTile(NamedTuple):
    """What one program of a product for more than one token computes."""

    tokens: int  # a power of two, at least 16
    features: int
    inner: int  # of the inner dimension, at a time


def skinny_linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    """The definition.  x: [tokens, inner]; weight: [out, inner]; bias: [out]; with an activation
    weight and bias hold gate rows, then up rows.  Returns [tokens, out], rounded after the product.
    """
    product = torch.nn.functional.linear(x, weight, bias)
    return product if activation is None else act_and_mul_reference(product, activation)


def fits_skinny(x: Tensor, weight: Tensor, *, parts: int = 1) -> bool:
    """Whether `skinny_linear` takes these operands and is the faster way; shapes and dtypes only.

    x: [tokens, inner]; weight: [rows, inner]; parts: 2 of gate rows, then up rows.
    """
    return (
        device_type(x.device) == "cuda"
        and x.dim() == 2
        and 0 < x.shape[0] <= MAX_TOKENS
        and x.dtype in _DTYPES
        and x.shape[1] % _tile(x.shape[0], weight, parts).inner == 0
        and x.shape[1] <= _MAX_INNER
        and x.stride(1) == 1
        and weight.stride(1) == 1
    )


def arrival_counters(out_features: int, *, device: torch.device) -> Tensor:
    """[tiles] int32 zeros: what one layer's split products count their parts with."""
    return torch.zeros(-(-out_features // _SMALLEST_FEATURES), dtype=torch.int32, device=device)


def require_counters(counters: Tensor, tiles: int, *, device: torch.device) -> None:
    """Raise KernelArgumentError for none of `arrival_counters`, or for too few."""
    is_counters = counters.dtype == torch.int32 and counters.is_contiguous()
    if not is_counters or counters.numel() < tiles or counters.device != device:
        reject(
            "counters",
            expected=f"contiguous int32 with at least {tiles} elements on {device}",
            got=counters,
            remedy="make them with arrival_counters for the rows of weight",
        )


def column_splits(tiles: int, steps: int, *, enough: int, most: int) -> int:
    """Parts of the inner dimension, each of as many of the `steps` tiles: at most `most`, and no
    more than make `enough` programs of so many tiles of the output."""
    splits = 1
    while tiles * splits < enough and splits < most and steps % (2 * splits) == 0:
        splits *= 2
    return splits


def require_bias(bias: Tensor | None, rows: int, dtype: torch.dtype) -> None:
    """Raise KernelArgumentError for none of a product with so many rows of weight."""
    if bias is not None and (bias.shape != (rows,) or bias.dtype != dtype):
        reject(
            "bias",
            expected=f"{dtype} [{rows}]",
            got=bias,
            remedy="give one number for each row of weight",
        )


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: str | None = None,
    counters: Tensor | None = None,
) -> Tensor:
    """x W^T + b, and with `activation` act(gate) * up of it.

    x: [tokens, inner], 1 to 64 tokens; weight: [out, inner], or [2 * out, inner] gate rows then up
    rows with an activation; bias: like a column of weight, or None; one dtype, bfloat16 or float16,
    last dimensions contiguous; inner a multiple of the tile (64 to 256).  counters: the layer's own
    `arrival_counters`; without them the inner dimension is never split.  Mutates counters, which
    are 0 again when the kernel ends.  Returns [tokens, out].  Deterministic.  Graph-safe: the grid
    depends on shapes only.  Raises KernelArgumentError.
    """
    if activation is not None:
        check_activation("activation", activation)
    parts = 1 if activation is None else 2
    _check(x, weight, bias, parts)
    tokens, inner = x.shape
    out_features = weight.shape[0] // parts
    out = torch.empty((tokens, out_features), dtype=x.dtype, device=x.device)
    tile = _tile(tokens, weight, parts)
    tiles = -(-out_features // tile.features)
    splits = 1
    if counters is not None and tokens > 1 and activation is None:
        splits = column_splits(tiles, inner // tile.inner, enough=_ENOUGH_TILES, most=_MOST_SPLITS)
        require_counters(counters, tiles, device=x.device)
        if splits * tiles > _FEW_TILES:  # two share a processor
            tile = tile._replace(inner=min(tile.inner, _STEP))
    partial = None
    if splits > 1:
        size = splits * tiles * tile.features * tile.tokens
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
    _SKINNY_LINEAR(x, weight, bias, activation, tile, splits, out, partial, counters)
    return out


def _tile(tokens: int, weight: Tensor, parts: int) -> SkinnyTile:
    """One program's tile: for many tokens small enough for two of a processor, and wide where that
    is too small, over a large weight; deep for few over a small.

    weight: [rows, inner], of `parts` that one program multiplies with.
    """
    rows, inner = weight.shape[0], weight.shape[-1]
    features, step = 64, _STEP
    few_rows = _FEW_TILES * features
    if tokens > 32 and rows > parts * few_rows:
        features, step = 64 if rows <= 2 * parts * few_rows else 128, 64
    elif tokens <= 32 and rows <= few_rows and inner % _WIDE_STEP == 0:
        step = _WIDE_STEP
    return SkinnyTile(max(16, 1 << (tokens - 1).bit_length()), features, step)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, parts: int) -> None:
    if x.dim() != 2 or x.dtype not in _DTYPES or not 0 < x.shape[0] <= MAX_TOKENS:
        _reject_x(x, f"bfloat16 or float16 [1..{MAX_TOKENS}, inner]")
    rows = weight.shape[0]
    inner = _tile(x.shape[0], weight, parts).inner
    if x.shape[1] % inner or x.shape[1] > _MAX_INNER or x.stride(1) != 1:
        _reject_x(x, f"contiguous rows of a multiple of {inner}, at most {_MAX_INNER}")
    same = weight.dim() == 2 and weight.shape[1] == x.shape[1] and weight.stride(1) == 1
    if not same or rows % parts or weight.dtype != x.dtype or weight.device != x.device:
        out = "out" if parts == 1 else "2 * out"
        reject(
            "weight",
            expected=f"{x.dtype} [{out}, {x.shape[1]}] on {x.device}, rows contiguous",
            got=weight,
            remedy="load the weight in the activations' dtype",
        )
    require_bias(bias, rows, x.dtype)


def _reject_x(x: Tensor, expected: str) -> NoReturn:
    remedy = "use kernels.linear, which takes any shape and dtype"
    reject("x", expected=expected, got=x, remedy=remedy)


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    tile: list[int],
    splits: int,
    out: Tensor,
    partial: Tensor | None,
    counters: Tensor | None,
) -> None:
    require_triton("skinny_linear", otherwise="use kernels.linear")
    from paceline.kernels._triton.skinny_linear import launch_skinny_linear

    launch_skinny_linear(
        x,
        weight,
        bias,
        activation,
        tile=SkinnyTile(*tile),
        splits=splits,
        out=out,
        partial=partial,
        counters=counters,
    )


_SKINNY_LINEAR = define_op(
    "skinny_linear(Tensor x, Tensor weight, Tensor? bias, str? activation, int[] tile, "
    "int splits, Tensor(a!) out, Tensor(b!)? partial, Tensor(c!)? counters) -> ()",
    cpu=_launch,
    cuda=_launch,
)
