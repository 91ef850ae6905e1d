"""scaled_linear: x W^T + b in fp8, with a scale for each row of either.

For many tokens the matrix unit is the limit, which multiplies fp8 twice as fast as bfloat16; and a
weight need not be unpacked.  Rows of x are rounded to codes as the format says (dynamic scales of
tokens), in the order that a packed weight's columns have; the library multiplies codes.
"""

from functools import cache

import torch
from torch import Tensor

from paceline.kernels._check import reject, require_triton
from paceline.kernels.custom_op import define_op
from paceline.kernels.packed_linear import MAX_TOKENS, require_packed
from paceline.kernels.packed_weight import (
    CHUNK,
    FP8,
    PackedWeight,
    Packing,
    pack_codes,
    unpack_reference,
)
from paceline.kernels.skinny_linear import require_bias
from paceline.kernels.stand_in import device_type

CODE = torch.float8_e4m3fn
_MOST = torch.finfo(CODE).max
_LEAST_SCALE = 1e-12
_MOST_COLUMNS = 32768  # a row is held in registers
_UNIT = 16  # of rows of a weight, as the library multiplies them
_FIRST_CAPABILITY = (9, 0)


def scaled_linear_reference(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, packing: Packing
) -> Tensor:
    """The definition, in float32, rounded once.  x: [tokens, columns]; bias: [rows]."""
    codes, scale = round_rows_reference(x)
    product = (codes.float() * scale) @ unpack_reference(weight, packing, x.shape[1]).T
    return (product if bias is None else product + bias.float()).to(x.dtype)


def round_rows_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """(codes [tokens, columns] e4m3, in x's order; scale [tokens, 1] float32)."""
    wide = x.float()
    scale = (wide.abs().amax(1, keepdim=True) / _MOST).clamp(min=_LEAST_SCALE)
    return (wide / scale).clamp(-_MOST, _MOST).to(CODE), scale


def fits_scaled(x: Tensor, weight: PackedWeight, packing: Packing) -> bool:
    """Whether `scaled_linear` takes these operands and is the faster way; no values."""
    return (
        device_type(x.device) == "cuda"
        and packing.rounds_inputs
        and x.shape[0] > MAX_TOKENS
        and x.dtype == torch.bfloat16
        and x.shape[1] <= _MOST_COLUMNS
        and x.stride(1) == 1
        and weight.words.shape[0] % _UNIT == 0
        and _multiplies_codes()
    )


@cache
def _multiplies_codes() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= _FIRST_CAPABILITY


def scaled_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None, packing: Packing) -> Tensor:
    """round(x) W^T + b.

    x: bfloat16 [tokens, columns], contiguous rows; weight: fp8 with a scale for each row, rows a
    multiple of 16; bias: bfloat16 [rows] or None.  Returns a new [tokens, rows] tensor of x's
    dtype.  Mutates nothing; recordable.  Raises KernelArgumentError.
    """
    rows, columns = weight.words.shape[0], x.shape[1]
    if packing.kind != FP8 or packing.group is not None or rows % _UNIT:
        reject(
            "weight",
            expected=f"fp8, a scale for a row, a multiple of {_UNIT} rows",
            got=weight.words,
            remedy="use kernels.unpack_weight and kernels.linear",
        )
    require_packed(weight, packing, columns, device=x.device)
    require_bias(bias, rows, torch.bfloat16)
    codes, scale = round_rows(x)
    product: Tensor = torch._scaled_mm(
        codes,
        weight.words.view(CODE).t(),
        scale_a=scale,
        scale_b=weight.scale.float().view(1, rows),
        bias=bias,
        out_dtype=x.dtype,
    )
    return product


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(codes [tokens, padded columns] e4m3 in the order of a packed weight, scale [tokens, 1]
    float32).

    x: bfloat16 [tokens, columns], contiguous rows of at most 32768.  Columns behind the last are 0.
    Mutates nothing.  Graph-safe.  Raises KernelArgumentError.
    """
    if x.dim() != 2 or x.dtype != torch.bfloat16 or x.shape[1] > _MOST_COLUMNS or x.stride(1) != 1:
        reject(
            "x",
            expected=f"bfloat16 [tokens, columns], contiguous rows of at most {_MOST_COLUMNS}",
            got=x,
            remedy="use kernels.unpack_weight and kernels.linear",
        )
    tokens, columns = x.shape
    padded = -(-columns // CHUNK) * CHUNK
    codes = torch.empty((tokens, padded), dtype=CODE, device=x.device)
    scale = torch.empty((tokens, 1), dtype=torch.float32, device=x.device)
    _ROUND_ROWS(x, codes.view(torch.uint8), scale)
    return codes, scale


def _round_cpu(x: Tensor, codes: Tensor, scale: Tensor) -> None:
    rounded, scales = round_rows_reference(x)
    words = pack_codes(rounded.view(torch.uint8), 8)
    codes.copy_(words.view(torch.uint8))
    scale.copy_(scales)


def _round_cuda(x: Tensor, codes: Tensor, scale: Tensor) -> None:
    require_triton("scaled_linear", otherwise="use kernels.unpack_weight and kernels.linear")
    from paceline.kernels._triton.scaled_linear import launch_round_rows

    launch_round_rows(x, codes, scale)


_ROUND_ROWS = define_op(
    "round_rows(Tensor x, Tensor(a!) codes, Tensor(b!) scale) -> ()",
    cpu=_round_cpu,
    cuda=_round_cuda,
)
