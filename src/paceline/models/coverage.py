"""Whether the tensors of a checkpoint fill every number of every parameter, each once."""

from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor, nn

from paceline.core.errors import WeightsError
from paceline.layers.weights.weight_format import Named


def require_filled_once(module: nn.Module, named: Named, *, model: str) -> None:
    """Reads no data.  named: of `module`; model: the name the error speaks of.

    Raises WeightsError about the first parameter of which a number is filled by no tensor, or by
    two.
    """
    views: dict[int, list[Tensor]] = {}
    for view in [block.into for target in named.values() for block in target.blocks]:
        views.setdefault(view.untyped_storage().data_ptr(), []).append(view)
    for name, parameter in module.named_parameters():
        filling = views.get(parameter.untyped_storage().data_ptr(), [])
        least, most = _times_filled(parameter.numel(), filling)
        if (least, most) != (1, 1):
            raise WeightsError.about(
                f"parameter '{name}' of '{model}'",
                expected="each number filled by one tensor of the checkpoint",
                got="some that none fills" if least == 0 else f"some that {most} fill",
                remedy="name the tensors of this part in models/ as its format holds them",
            )


class _Runs(NamedTuple):
    """Where the numbers of a view lie in its storage."""

    first: int
    length: int  # numbers in a row
    sizes: tuple[int, ...]  # how many such runs
    strides: tuple[int, ...]  # from run to run

    @property
    def unit(self) -> int:
        return gcd(self.first, self.length, *self.strides)


def _times_filled(total: int, views: list[Tensor]) -> tuple[int, int]:
    """How often a number of a storage is filled: least and most.

    Counted are not its `total` numbers but pieces, of the largest size of which all views consist.
    """
    runs = [_runs(view) for view in views]
    unit = gcd(total, *(each.unit for each in runs))
    counts = torch.zeros(total // unit, dtype=torch.uint8)
    for each in runs:
        sizes = (*each.sizes, each.length // unit)
        strides = (*(stride // unit for stride in each.strides), 1)
        counts.as_strided(sizes, strides, each.first // unit).add_(1)
    return int(counts.min()), int(counts.max())


def _runs(view: Tensor) -> _Runs:
    """Example: rows 0, 2, 4 of a [6, 8] matrix are 3 runs of 8, 16 apart."""
    by_stride = zip(view.stride(), view.shape, strict=True)
    dims = sorted((stride, size) for stride, size in by_stride if size != 1)
    length = 1
    while dims and dims[0][0] == length:
        length *= dims.pop(0)[1]
    sizes = tuple(size for _, size in dims)
    return _Runs(int(view.storage_offset()), length, sizes, tuple(stride for stride, _ in dims))
