"""Argument errors of the launchers: which tensor, what was expected, what it is."""

from importlib.util import find_spec
from typing import NoReturn

from torch import Tensor

from paceline.core.errors import KernelArgumentError


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
