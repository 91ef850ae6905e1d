"""Argument errors of the launchers: which tensor, what was expected, what it is."""

from importlib.util import find_spec
from typing import NoReturn

import torch
from torch import Tensor

from paceline.core.errors import KernelArgumentError

COPY_ALIGNMENT = 16  # bytes, of what the copy engine reads: first numbers of rows


def reject(name: str, *, expected: str, got: Tensor | None, remedy: str) -> NoReturn:
    """Raise KernelArgumentError about tensor argument `name`."""
    raise KernelArgumentError.about(name, expected=expected, got=describe(got), remedy=remedy)


def describe(tensor: Tensor | None) -> str:
    """dtype, shape, strides and device of a tensor, for an error text."""
    if tensor is None:
        return "None"
    dtype = str(tensor.dtype).removeprefix("torch.")
    strides = list(tensor.stride())
    return f"{dtype} {list(tensor.shape)} with strides {strides} on {tensor.device}"


def is_copyable(x: Tensor) -> bool:
    """Whether the copy engine reads tiles of x: numbers of 16 bits in aligned rows."""
    return x.dtype in (torch.bfloat16, torch.float16) and has_aligned_rows(x)


def has_aligned_rows(x: Tensor) -> bool:
    """Whether the last dimension is contiguous, and rows begin at multiples of COPY_ALIGNMENT."""
    places = (*x.stride()[:-1], x.storage_offset())
    return x.stride(-1) == 1 and all(
        place * x.element_size() % COPY_ALIGNMENT == 0 for place in places
    )


def require_triton(op: str, *, otherwise: str) -> None:
    """Refuse to launch where triton, which CPU builds of torch do not bring, is not installed.

    otherwise: what the caller can do without it.
    """
    if find_spec("triton") is None:
        raise KernelArgumentError.about(
            op,
            expected="run where triton is installed",
            got="no module named triton",
            remedy=f"install triton, or {otherwise}",
        )
