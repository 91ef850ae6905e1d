"""scaled_linear: x W^T + b in fp8, with scales of rows, or of 128 columns, of either.

For many tokens the matrix unit is the limit, which multiplies fp8 twice as fast as bfloat16; and a
weight need not be unpacked.  Rows of x are rounded to codes as the format says,

    s[t, g] = max(max over k in g of |x[t, k]| / 448, 1e-12),  code[t, k] = e4m3(x[t, k] / s[t, g])

with one group g for a row (dynamic scales of tokens), or one for 128 columns (those of blocks:
DeepSeek-V3, inference/kernel.py), in the order that a packed weight's columns have, which stay
within their chunk; the library multiplies codes.
"""

import torch
from torch import Tensor

from paceline.kernels._check import reject, require_triton
from paceline.kernels.custom_op import define_op
from paceline.kernels.packed_linear import MAX_TOKENS, require_packed
from paceline.kernels.packed_weight import (
    CHUNK,
    PackedWeight,
    Packing,
    pack_codes,
    unpack_reference,
)
from paceline.kernels.skinny_linear import require_bias
from paceline.kernels.stand_in import capability, device_type

CODE = torch.float8_e4m3fn
_MOST = torch.finfo(CODE).max
_LEAST_SCALE = 1e-12
_MOST_COLUMNS = 32768  # a row is held in registers
_UNIT = 16  # of rows of a weight, as the library multiplies them
_TOKENS_UNIT = 4  # of rows of x with scales of groups, likewise
_FIRST_CAPABILITY = (9, 0)  # and the only one of which the library takes scales of groups
_FIRST_CUDA = (12, 9)  # of a torch that takes them
_GROUPS_UNIT = 4  # of groups: torch 2.11 refuses others where their scales are aligned, and reads
# beside them where they are not


def scaled_linear_reference(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, packing: Packing
) -> Tensor:
    """The definition, in float32, rounded once.  x: [tokens, columns]; bias: [rows]."""
    columns = x.shape[1]
    codes, scale = round_rows_reference(x, packing.group)
    by_column = scale.repeat_interleave(packing.group or columns, dim=1)[:, :columns]
    product = (codes.float() * by_column) @ unpack_reference(weight, packing, columns).T
    return (product if bias is None else product + bias.float()).to(x.dtype)


def round_rows_reference(x: Tensor, group: int | None) -> tuple[Tensor, Tensor]:
    """(codes [tokens, columns] e4m3, in x's order; scale [tokens, groups] float32).

    group: 128 columns, or None: all."""
    tokens, columns = x.shape
    size = group or columns
    padded = torch.nn.functional.pad(x.float(), (0, -columns % size)).view(tokens, -1, size)
    scale = (padded.abs().amax(2) / _MOST).clamp(min=_LEAST_SCALE)
    codes = (padded / scale.unsqueeze(2)).clamp(-_MOST, _MOST).to(CODE)
    return codes.flatten(1)[:, :columns], scale


def fits_scaled(x: Tensor, weight: PackedWeight, packing: Packing) -> bool:
    """Whether `scaled_linear` takes these operands and is the faster way; no values."""
    return (
        packing.rounds_inputs
        and x.shape[0] > MAX_TOKENS
        and _has_whole_units(weight, packing)
        and fits_rounding(x, packing.group)
    )


def fits_rounding(x: Tensor, group: int | None) -> bool:
    """Whether `round_rows` takes these rows, and the GPU multiplies their codes; no values."""
    return (
        device_type(x.device) == "cuda"
        and x.dtype == torch.bfloat16
        and x.shape[1] <= _MOST_COLUMNS
        and x.stride(1) == 1
        and _multiplies_codes(x.device, group)
    )


def _has_whole_units(weight: PackedWeight, packing: Packing) -> bool:
    """Whether the library takes so many rows, and groups of columns."""
    has_groups = packing.group is None or weight.scale.shape[1] % _GROUPS_UNIT == 0
    return has_groups and weight.words.shape[0] % max(_UNIT, packing.shared_rows) == 0


def _multiplies_codes(device: torch.device, group: int | None) -> bool:
    """Whether the library does there."""
    found = capability(device)
    if found is None:
        return False
    if group is None:
        return found >= _FIRST_CAPABILITY
    build = torch.version.cuda  # None: a GPU is planned for where none is
    is_new = build is None or tuple(map(int, build.split("."))) >= _FIRST_CUDA
    return found == _FIRST_CAPABILITY and is_new


def scaled_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None, packing: Packing) -> Tensor:
    """round(x) W^T + b, of groups rounded before b is added, and again.

    x: bfloat16 [tokens, columns], contiguous rows; weight: fp8 with a scale for each row, rows a
    multiple of 16, or for each block of 128 x 128, rows a multiple of 128 and blocks across them
    one of 4; bias: bfloat16 [rows] or None.  Returns a new [tokens, rows] tensor of x's dtype.
    Mutates nothing; recordable.  Raises KernelArgumentError.
    """
    _require_rows(x)
    tokens, columns = x.shape
    if not packing.can_round_inputs or not _has_whole_units(weight, packing):
        unit = max(_UNIT, packing.shared_rows)
        reject(
            "weight",
            expected=f"fp8, a scale for a row or a block, a multiple of {unit} rows and, of "
            f"blocks, {_GROUPS_UNIT} across",
            got=weight.words,
            remedy="use kernels.unpack_weight and kernels.linear",
        )
    require_packed(weight, packing, columns, device=x.device)
    require_bias(bias, weight.words.shape[0], torch.bfloat16)
    codes, scale = round_rows(x, packing.group)
    has_groups = packing.group is not None  # of which the library takes no bias
    product: Tensor = torch._scaled_mm(
        codes,
        weight.words.view(CODE).t(),
        scale_a=scale,
        scale_b=_scales_across(weight.scale.float(), packing.shared_rows),
        bias=None if has_groups else bias,
        out_dtype=x.dtype,
    )
    product = product[:tokens]
    return product.add_(bias) if has_groups and bias is not None else product


def _scales_across(scale: Tensor, shared_rows: int) -> Tensor:
    """scale [rows, groups] float32 as the library takes it: [groups, rows // shared_rows], of
    blocks with those of a row beside each other."""
    return scale[::shared_rows].contiguous().t()


def round_rows(x: Tensor, group: int | None) -> tuple[Tensor, Tensor]:
    """(codes [rows, padded columns] e4m3 in the order of a packed weight, scale [rows, groups]
    float32, a group's beside each other).

    x: bfloat16 [tokens, columns], contiguous rows of at most 32768; group: 128 columns, or None:
    all.  Columns behind the last are 0; of groups, rows are a multiple of 4, and those behind the
    tokens hold what nobody wrote.  Mutates nothing.  Graph-safe.  Raises KernelArgumentError.
    """
    _require_rows(x)
    rows, columns = x.shape
    chunks = -(-columns // CHUNK)
    if group is not None:
        rows += -rows % _TOKENS_UNIT
    codes = torch.empty((rows, chunks * CHUNK), dtype=CODE, device=x.device)
    groups = 1 if group is None else chunks
    scale = torch.empty((groups, rows), dtype=torch.float32, device=x.device)
    _ROUND_ROWS(x, group, codes.view(torch.uint8), scale)
    return codes, scale.view(rows, 1) if group is None else scale.t()


def _require_rows(x: Tensor) -> None:
    if x.dim() != 2 or x.dtype != torch.bfloat16 or x.shape[1] > _MOST_COLUMNS or x.stride(1) != 1:
        reject(
            "x",
            expected=f"bfloat16 [tokens, columns], contiguous rows of at most {_MOST_COLUMNS}",
            got=x,
            remedy="use kernels.unpack_weight and kernels.linear",
        )


def _round_cpu(x: Tensor, group: int | None, codes: Tensor, scale: Tensor) -> None:
    tokens = x.shape[0]
    rounded, scales = round_rows_reference(x, group)
    words = pack_codes(rounded.view(torch.uint8), 8)
    codes[:tokens] = words.view(torch.uint8)
    scale[:, :tokens] = scales.T


def _round_cuda(x: Tensor, group: int | None, codes: Tensor, scale: Tensor) -> None:
    require_triton("scaled_linear", otherwise="use kernels.unpack_weight and kernels.linear")
    from paceline.kernels._triton.scaled_linear import launch_round_rows

    launch_round_rows(x, codes, scale, is_grouped=group is not None)


_ROUND_ROWS = define_op(
    "round_rows(Tensor x, int? group, Tensor(a!) codes, Tensor(b!) scale) -> ()",
    cpu=_round_cpu,
    cuda=_round_cuda,
)
