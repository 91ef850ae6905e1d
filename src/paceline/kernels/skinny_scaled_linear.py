"""skinny_scaled_linear: scaled_linear for the tokens of a large decode step, on a GPU.

Codes of either operand go to the matrix unit as they lie, so that no instruction turns one into a
number: the time is that of reading the weight once.  The library is slow there, and no kernel of
its can start early (docs/decisions/123-one-token-without.md).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels._check import reject, require_triton
from paceline.kernels.act_and_mul import act_and_mul_reference, check_activation
from paceline.kernels.custom_op import define_op
from paceline.kernels.packed_linear import MAX_TOKENS, require_packed
from paceline.kernels.packed_weight import FP8, PackedWeight, Packing
from paceline.kernels.scaled_linear import CODE, fits_rounding, round_rows, scaled_linear_reference
from paceline.kernels.skinny_linear import column_splits, require_bias, require_counters

_FEWEST_TOKENS = 33  # fewer: words become numbers in registers, and rows need no kernel before
_ENOUGH_PROGRAMS = 128
_MOST_SPLITS = 2
_ONE_EACH = 132  # programs: a multiprocessor has one, and room for more stages


class ScaledTile(NamedTuple):
    """What one program computes."""

    tokens: int  # a power of two, at least 16
    rows: int
    warps: int
    stages: int  # of chunks on their way, or as many as the GPU's shared memory holds


def skinny_scaled_linear_reference(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, packing: Packing, activation: str | None
) -> Tensor:
    """The definition: scaled_linear, and an activation of it.  x: [tokens, columns]."""
    product = scaled_linear_reference(x, weight, bias, packing)
    return product if activation is None else act_and_mul_reference(product, activation)


def fits_skinny_scaled(x: Tensor, packing: Packing) -> bool:
    """Whether `skinny_scaled_linear` takes these rows and is the faster way; no values."""
    return (
        packing.rounds_inputs
        and packing.group is None
        and _FEWEST_TOKENS <= x.shape[0] <= MAX_TOKENS
        and fits_rounding(x, None)
    )


def skinny_scaled_linear(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    packing: Packing,
    *,
    activation: str | None = None,
    counters: Tensor | None = None,
) -> Tensor:
    """round(x) W^T + b, and with `activation` act(gate) * up of it.

    x: bfloat16 [tokens, columns], 1 to 64 tokens with contiguous rows; weight: fp8 with a scale for
    each row; with an activation gate rows, then up rows; bias: bfloat16 [rows] or None; counters:
    the layer's own `arrival_counters`; without them the columns are never split.  Mutates counters,
    which are 0 again when the kernel ends.  Returns [tokens, rows], or half the rows with an
    activation.  Deterministic.  Graph-safe: the grid depends on shapes only.  Raises
    KernelArgumentError.
    """
    if activation is not None:
        check_activation("activation", activation)
    parts = 1 if activation is None else 2
    rows = weight.words.shape[0]
    if packing.kind != FP8 or packing.group is not None or rows % parts:
        reject(
            "weight",
            expected="fp8, a scale for a row, as many gate rows as up rows",
            got=weight.words,
            remedy="use kernels.packed_linear",
        )
    if x.dim() != 2 or not 0 < x.shape[0] <= MAX_TOKENS:
        reject(
            "x",
            expected=f"[1..{MAX_TOKENS}, columns]",
            got=x,
            remedy="use kernels.scaled_linear",
        )
    tokens = x.shape[0]
    require_packed(weight, packing, x.shape[1], device=x.device)
    require_bias(bias, rows, torch.bfloat16)
    codes, scale = round_rows(x, None)
    out = torch.empty((tokens, rows // parts), dtype=x.dtype, device=x.device)
    tile = ScaledTile(max(16, 1 << (tokens - 1).bit_length()), 64, 4, 4)
    tiles = -(-out.shape[1] // tile.rows)
    splits, partial = 1, None
    if counters is not None and activation is None:
        chunks = packing.num_words(x.shape[1]) // packing.words
        splits = column_splits(tiles, chunks, enough=_ENOUGH_PROGRAMS, most=_MOST_SPLITS)
        require_counters(counters, tiles, device=x.device)
    if tiles * splits <= _ONE_EACH:
        tile = tile._replace(stages=8)
    if splits > 1:
        size = splits * tiles * tile.rows * tile.tokens
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
    scaled = (weight.words, weight.scale)
    _SKINNY_SCALED(codes, scale, *scaled, bias, activation, tile, splits, out, partial, counters)
    return out


def _launch(
    codes: Tensor,
    x_scale: Tensor,
    words: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    activation: str | None,
    tile: list[int],
    splits: int,
    out: Tensor,
    partial: Tensor | None,
    counters: Tensor | None,
) -> None:
    require_triton("skinny_scaled_linear", otherwise="use kernels.packed_linear")
    from paceline.kernels._triton.skinny_scaled_linear import launch_skinny_scaled_linear

    launch_skinny_scaled_linear(
        codes,
        x_scale,
        words.view(CODE),
        weight_scale,
        bias,
        activation,
        tile=ScaledTile(*tile),
        splits=splits,
        out=out,
        partial=partial,
        counters=counters,
    )


_SKINNY_SCALED = define_op(
    "skinny_scaled_linear(Tensor codes, Tensor x_scale, Tensor words, Tensor weight_scale, "
    "Tensor? bias, str? activation, int[] tile, int splits, Tensor(a!) out, Tensor(b!)? partial, "
    "Tensor(c!)? counters) -> ()",
    cpu=_launch,
    cuda=_launch,
)
