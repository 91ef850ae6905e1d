"""Float32 products of a few rows by the OpenBLAS that numpy carries, where one thread computes.

torch sends a row to MKL, which leaves the AVX-512 of other makers' processors unused and reads a
weight at half the speed of memory; oneDNN's set-up takes as long as a small product.  OpenBLAS has
threads of its own, which wait for work by spinning: where torch has several, this stands aside.
`benchmarks/cpu_linear.py` measures all of them (decision 117).
"""

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.custom_op import Run, define_op, host_array
from paceline.kernels.linear_cpu import is_by_columns
from paceline.kernels.stand_in import device_type

_NUMPYS = "numpy._core._multiarray_umath"  # what is linked against numpy's BLAS
_TWO_ROWS = 1 << 18  # products up to which two rows are faster here than in MKL
_FEW_ROWS = 1 << 21  # products up to which more rows are faster here than in oneDNN


class _Threads(NamedTuple):
    """How many threads OpenBLAS uses in this process."""

    get: Callable[[], int]
    set: Callable[[int], object]


@cache
def _threads() -> _Threads | None:
    """Of the OpenBLAS in numpy's wheels; None where numpy has another BLAS."""
    module = sys.modules.get(_NUMPYS)
    if module is None or module.__file__ is None:
        return None
    library = ctypes.CDLL(module.__file__)  # finds names of what it is linked against, too
    names = (f"scipy_openblas_{verb}_num_threads64_" for verb in ("get", "set"))
    get, put = (getattr(library, name, None) for name in names)
    return None if get is None or put is None else _Threads(get, put)


def set_num_threads(num: int) -> None:
    """Let torch compute with `num` threads, and the BLAS of numpy, where it is OpenBLAS, with no
    more: of the whole process."""
    torch.set_num_threads(num)
    if (threads := _threads()) is not None:
        threads.set(min(num, threads.get()))


def fits_openblas(x: Tensor, weight: Tensor) -> bool:
    """Whether `openblas_linear` is the fastest for x [tokens, in] and weight [out, in]."""
    if device_type(x.device) != "cpu" or x.dtype != torch.float32 or not is_by_columns(weight):
        return False
    if x.ndim != 2:
        return False
    tokens, size = x.shape[0], weight.numel()
    if tokens > 1 and tokens * size > (_TWO_ROWS if tokens == 2 else _FEW_ROWS):
        return False
    return tokens > 0 and computes_alone()


def computes_alone() -> bool:
    """Whether one thread computes, OpenBLAS is there, and the CPU is one that it is best on."""
    return has_avx512() and torch.get_num_threads() == 1 == _num_threads()


@cache
def has_avx512() -> bool:
    """Whether torch uses such instructions on this CPU."""
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def _num_threads() -> int:
    """0 where there is no OpenBLAS."""
    threads = _threads()
    return 0 if threads is None else threads.get()


def _bind_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Run:
    rows, columns, product = host_array(x), host_array(weight).T, host_array(out)
    added = None if bias is None else host_array(bias)

    def run() -> None:
        with np.errstate(all="ignore"):  # NaN and infinity are the request's, and are told of it
            np.dot(rows, columns, out=product)
            if added is not None:
                np.add(product, added, out=product)

    return run


_LINEAR = define_op(
    "openblas_linear(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) out) -> ()",
    bind=_bind_linear,
)


def openblas_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b.

    x: [tokens, in] float32; weight: [out, in], stored by columns; bias: [out] or None.  Returns
    [tokens, out].  Mutates nothing; recordable.
    """
    out = x.new_empty(x.shape[0], weight.shape[0])
    _LINEAR(x, weight, bias, out)
    return out
