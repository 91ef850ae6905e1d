"""Packed weights of every kind, whose scales differ by 8x from group to group; of integers some are
negative."""

import torch
from torch import Tensor

from paceline.core.parallel import Span
from paceline.kernels.packed_experts import PackedExpertWeights
from paceline.kernels.packed_weight import FP8, INT4, INT8, PackedWeight, Packing, pack_codes

KINDS = {
    "int4-g128": Packing(INT4, 128, False, torch.float16),
    "int4-g32-zeros": Packing(INT4, 32, True, torch.float16),
    "int4-g64": Packing(INT4, 64, False, torch.bfloat16),
    "int4-row": Packing(INT4, None, True, torch.float32),
    "int4-row-plain": Packing(INT4, None, False, torch.float32),
    "int8-g32": Packing(INT8, 32, False, torch.bfloat16),
    "int8-g128-zeros": Packing(INT8, 128, True, torch.float16),
    "int8-row": Packing(INT8, None, False, torch.float32),
    "fp8-row": Packing(FP8, None, False, torch.float32),
    "fp8-g128": Packing(FP8, 128, False, torch.float32),
}


def random_weight(
    rows: int, columns: int, packing: Packing, *, seed: int = 0
) -> tuple[PackedWeight, Tensor]:
    """A weight, and the numbers that it stands for by the sentence that defines them, float64."""
    rng = torch.Generator().manual_seed(seed)
    groups = packing.num_groups(columns)
    scale = 0.01 * torch.exp2(3 * torch.rand(rows, groups, generator=rng))
    scale = scale.to(packing.scale_dtype)
    of_column = torch.arange(columns) // (packing.group or columns)
    zero = None
    if packing.kind == FP8:
        codes = torch.randint(0, 256, (rows, columns), generator=rng).to(torch.uint8)
        codes[(codes & 0x7F) == 0x7F] = 1  # no NaN; 1 is subnormal
        scale = scale / 64
        numbers = codes.view(torch.float8_e4m3fn).double()
    else:
        most = 1 << packing.bits
        scale *= torch.randint(0, 2, scale.shape, generator=rng) * 2 - 1
        codes = torch.randint(0, most, (rows, columns), generator=rng).to(torch.uint8)
        numbers = codes.double() - most // 2
        if packing.has_zeros:
            zero = torch.randint(0, most, (rows, groups), generator=rng).to(torch.uint8)
            numbers = codes.double() - zero[:, of_column].double()
    weight = PackedWeight(pack_codes(codes, packing.bits), scale, zero)
    return weight, numbers * scale.double()[:, of_column]


def relative(ours: Tensor, exact: Tensor) -> float:
    """Of the Frobenius norm."""
    return float((ours.double() - exact).norm() / exact.norm())


def experts_of_rank(weights: PackedExpertWeights, held: Span) -> PackedExpertWeights:
    """Its experts alone."""
    parts = []
    for each in weights:
        rows = each.rows // weights.num_experts
        own = slice(held.first * rows, held.end * rows)
        packed = PackedWeight(*(None if part is None else part[own] for part in each.packed))
        parts.append(each._replace(packed=packed))
    return PackedExpertWeights(*parts)
