"""unpack_weight: the numbers that a packed weight stands for, for products of many rows.

There the product takes longer than writing the weight and reading it again.
"""

import torch
from torch import Tensor

from paceline.kernels.custom_op import define_op
from paceline.kernels.packed_linear import require_packed
from paceline.kernels.packed_weight import PackedWeight, Packing, unpack_reference


def unpack_weight(
    weight: PackedWeight, packing: Packing, columns: int, dtype: torch.dtype
) -> Tensor:
    """A new [rows, columns] tensor of `dtype`, each number rounded once.

    Mutates nothing.  Graph-safe: the grid depends on shapes only.  Raises KernelArgumentError.
    """
    device = weight.words.device
    require_packed(weight, packing, columns, device=device)
    out = torch.empty((weight.words.shape[0], columns), dtype=dtype, device=device)
    _UNPACK_WEIGHT(*weight, packing.kind, packing.group or columns, out)
    return out


def _unpack_cpu(
    words: Tensor, scale: Tensor, zero: Tensor | None, kind: str, group: int, out: Tensor
) -> None:
    columns = out.shape[1]
    packing = Packing(kind, None if group == columns else group, zero is not None, scale.dtype)
    out.copy_(unpack_reference(PackedWeight(words, scale, zero), packing, columns))


def _unpack_cuda(
    words: Tensor, scale: Tensor, zero: Tensor | None, kind: str, group: int, out: Tensor
) -> None:
    from paceline.kernels._triton.unpack_weight import launch_unpack_weight

    launch_unpack_weight(PackedWeight(words, scale, zero), kind=kind, group=group, out=out)


_UNPACK_WEIGHT = define_op(
    "unpack_weight(Tensor words, Tensor scale, Tensor? zero, str kind, int group, Tensor(a!) out) "
    "-> ()",
    cpu=_unpack_cpu,
    cuda=_unpack_cuda,
)
