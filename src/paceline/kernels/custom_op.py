"""How an operation becomes a torch custom op, so that recorders, compilers and tests see it."""

from collections.abc import Callable, Sequence
from ctypes import c_byte
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Kernel = Callable[..., None]
Run = Callable[[], None]
Bind = Callable[..., Run]  # an operator's arguments -> what computes it, now and again
# An operator's arguments -> bytes of each tensor that its GPU kernel makes for itself.
Scratch = Callable[..., tuple[int, ...]]

_LIBRARY = torch.library.Library("paceline", "FRAGMENT")
_BINDS: dict[Any, Bind] = {}  # of CPU kernels; filled while kernel modules are imported
_SCRATCH: dict[Any, Scratch] = {}  # of GPU kernels; filled likewise
_MEMORY = c_byte * (1 << 62)  # from an address on; a type for each length takes longer to make


def define_op(
    schema: str,
    *,
    cpu: Kernel | None = None,
    bind: Bind | None = None,
    cuda: Kernel | None = None,
    scratch: Scratch | None = None,
) -> Any:
    """Define `paceline::<schema>` with its kernels; returns the operator.

    The schema returns nothing and marks what is mutated: outputs are the caller's.
    cpu, bind: the CPU's kernel, at most one.  bind makes it from its arguments, views, addresses
    and scratch included, so that a replay pays for these once; a call binds and runs.  Neither: the
    launcher runs torch's own operators on a CPU.
    scratch: the sizes of what the CUDA kernel holds for itself at most, in the order of allocation,
    for the memory budget; None: nothing.
    """
    assert cpu is None or bind is None, f"{schema} has two CPU kernels"
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    operator = getattr(torch.ops.paceline, name).default
    if cpu is not None:
        _LIBRARY.impl(name, cpu, "CPU")
        _BINDS[operator] = partial(partial, cpu)
    if bind is not None:
        _LIBRARY.impl(name, partial(_run, bind), "CPU")
        _BINDS[operator] = bind
    if cuda is not None:
        _LIBRARY.impl(name, cuda, "CUDA")
    if scratch is not None:
        _SCRATCH[operator] = scratch
    _LIBRARY.impl(name, _nothing, "Meta")
    return operator


class DispatchMode(TorchDispatchMode):
    """Sees every operator; what subclasses say in `__torch_dispatch__` runs as they wrote it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave `__torch_dispatch__` as it is: torch's wrapper imports all of torch._dynamo."""
        return False


def host_array(x: Tensor) -> NDArray[Any]:
    """x, any shape and strides from 0 on, as an array over its memory; for while a CPU kernel runs.

    `Tensor.numpy` would forbid for good that the storage is resized, which recorded graphs do.
    """
    dtype = _array_dtype(x.dtype)
    if not x.numel():
        return np.empty(x.shape, dtype)
    strides = [step * dtype.itemsize for step in x.stride()]
    memory = memoryview(_MEMORY.from_address(x.data_ptr()))
    return np.ndarray(x.shape, dtype, memory, strides=strides)


@cache
def _array_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    return torch.empty(0, dtype=dtype).numpy().dtype


def _nothing(*_: Any) -> None:
    """On the meta device there is nothing to compute: outputs are the caller's."""


def _run(bind: Bind, *args: Any) -> None:
    bind(*args)()


def bind_of(operator: Any) -> Bind | None:
    """How one of our operators is bound to arguments on a CPU: a replay calls what comes of it,
    without the dispatcher."""
    return _BINDS.get(operator)


def scratch_sizes(operator: Any, args: Sequence[Any]) -> tuple[int, ...]:
    """Bytes of each tensor that one of our operators holds on a GPU while it runs, beside its
    arguments; of others none."""
    scratch = _SCRATCH.get(operator)
    return () if scratch is None else scratch(*args)
