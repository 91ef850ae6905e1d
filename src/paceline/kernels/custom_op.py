"""How an operation becomes a torch custom op, so that recorders, compilers and tests see it."""

from collections.abc import Callable
from ctypes import c_byte
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Kernel = Callable[..., None]

_LIBRARY = torch.library.Library("paceline", "FRAGMENT")
_CPU_KERNELS: dict[Any, Kernel] = {}  # filled while kernel modules are imported


def define_op(schema: str, *, cpu: Kernel | None, cuda: Kernel | None = None) -> Any:
    """Define `paceline::<schema>` with its kernels; returns the operator.

    The schema returns nothing and marks what is mutated: outputs are the caller's.
    cpu: None where the launcher runs torch's own operators on a CPU.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    operator = getattr(torch.ops.paceline, name).default
    if cpu is not None:
        _LIBRARY.impl(name, cpu, "CPU")
        _CPU_KERNELS[operator] = cpu
    if cuda is not None:
        _LIBRARY.impl(name, cuda, "CUDA")
    return operator


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator; what subclasses say in `__torch_dispatch__` runs as they wrote it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave `__torch_dispatch__` as it is: torch's wrapper imports all of torch._dynamo."""
        return False


def host_array(x: Tensor) -> NDArray[Any]:
    """x, any shape and strides from 0 on, as an array over its memory; for while a CPU kernel runs.

    `Tensor.numpy` would forbid for good that the storage is resized, which recorded graphs do.
    """
    strides = tuple(step * x.element_size() for step in x.stride())
    last = sum((size - 1) * step for size, step in zip(x.shape, strides, strict=True))
    dtype = x.new_empty(0).numpy().dtype
    if not x.numel():
        return np.empty(tuple(x.shape), dtype)
    memory = (c_byte * (last + x.element_size())).from_address(x.data_ptr())
    return np.ndarray(tuple(x.shape), dtype, buffer=memory, strides=strides)


def cpu_kernel(operator: Any) -> Kernel | None:
    """The CPU kernel behind one of our operators: what a replay calls without the dispatcher."""
    return _CPU_KERNELS.get(operator)
