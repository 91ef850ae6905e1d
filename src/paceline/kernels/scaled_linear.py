"""scaled_linear: x W^T + b in fp8, with scales of rows, or of 128 columns, of either.

For many tokens the matrix unit is the limit, which multiplies fp8 twice as fast as bfloat16; and a
weight need not be unpacked.  Rows of x are rounded to codes as the format says (`round_rows`), and
the library multiplies codes.
"""

from functools import cache

import torch
from torch import Tensor

from paceline.kernels._check import reject
from paceline.kernels.packed_linear import MAX_TOKENS, require_packed
from paceline.kernels.packed_weight import (
    CHUNK,
    FP8,
    PackedWeight,
    Packing,
    unpack_reference,
)
from paceline.kernels.round_rows import CODE, fits_rounded, round_rows, round_rows_reference
from paceline.kernels.skinny_linear import require_bias
from paceline.kernels.stand_in import device_type

_UNIT = 16  # of rows of a weight, as the library multiplies them
_FIRST_CAPABILITY = (9, 0)


def scaled_linear_reference(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, packing: Packing
) -> Tensor:
    """The definition, in float32, rounded once.  x: [tokens, columns]; bias: [rows]."""
    columns = x.shape[1]
    codes, scale = round_rows_reference(x, packing.group)
    by_column = scale.repeat_interleave(packing.group or columns, dim=1)[:, :columns]
    product = (codes.float() * by_column) @ unpack_reference(weight, packing, columns).T
    return (product if bias is None else product + bias.float()).to(x.dtype)


def fits_scaled(x: Tensor, weight: PackedWeight, packing: Packing) -> bool:
    """Whether `scaled_linear` takes these operands and is the faster way; no values."""
    return (
        device_type(x.device) == "cuda"
        and packing.rounds_inputs
        and x.shape[0] > MAX_TOKENS
        and fits_rounded(x)
        and weight.words.shape[0] % _UNIT == 0
        and multiplies_codes(packing.group)
    )


@cache
def multiplies_codes(group: int | None) -> bool:
    """Whether the GPU's matrix unit does; with scales of groups, whether the library's does."""
    if not torch.cuda.is_available():
        return False
    capability = torch.cuda.get_device_capability()
    return capability >= _FIRST_CAPABILITY if group is None else capability == _FIRST_CAPABILITY


def scaled_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None, packing: Packing) -> Tensor:
    """round(x) W^T + b.

    x: bfloat16 [tokens, columns], contiguous rows; weight: fp8 with a scale for each row, or for
    128 columns of each, rows a multiple of 16; bias: bfloat16 [rows] or None.  Returns a new
    [tokens, rows] tensor of x's dtype.  Mutates nothing; recordable.  Raises KernelArgumentError.
    """
    rows, (tokens, columns) = weight.words.shape[0], x.shape
    if packing.kind != FP8 or packing.group not in (None, CHUNK) or rows % _UNIT:
        reject(
            "weight",
            expected=f"fp8, a scale for a row or {CHUNK} columns, a multiple of {_UNIT} rows",
            got=weight.words,
            remedy="use kernels.unpack_weight and kernels.linear",
        )
    require_packed(weight, packing, columns, device=x.device)
    require_bias(bias, rows, torch.bfloat16)
    rounded = round_rows(x, packing.group)
    # Of groups the library wants a group's scales of all rows beside each other, and no bias.
    of_groups = packing.group is not None
    product: Tensor = torch._scaled_mm(
        rounded.codes,
        weight.words.view(CODE).t(),
        scale_a=rounded.scale.t() if of_groups else rounded.scale.view(-1, 1),
        scale_b=weight.scale.float().t().contiguous(),
        bias=None if of_groups else bias,
        out_dtype=x.dtype,
    )
    product = product[:tokens]
    return product if bias is None or not of_groups else product.add_(bias)
