"""How an operation becomes a torch custom op, so that recorders, compilers and tests see it."""

from collections.abc import Callable
from typing import Any

import torch

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


def cpu_kernel(operator: Any) -> Kernel | None:
    """The CPU kernel behind one of our operators: what a replay calls without the dispatcher."""
    return _CPU_KERNELS.get(operator)
