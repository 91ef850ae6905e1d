"""linear_cpu: products of 16-bit numbers on a CPU that has no instructions for them.

There torch's own product widens every number again for each row of x.  Here a few rows are products
with a vector, and from some rows on a block of the weight, small enough for a core's cache, is
widened once for all of them and goes through the float32 product.  Sums are float32, as in torch's.

A vector's product is fastest with the weight stored column by column, where torch does it with one
thread; so weights are stored where one thread computes, and row by row where several share them.
`benchmarks/cpu_linear.py` measures both.
"""

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from paceline.kernels.custom_op import Run, define_op

Product = Callable[[Tensor, Tensor, Tensor], None]  # of float32 x and a weight, into a float32 out

_BLOCK = 1 << 19  # numbers widened at a time
_VECTORS = {True: 3, False: 2}  # rows of x up to which they go one by one; weights by columns


@cache
def is_emulated(dtype: torch.dtype) -> bool:
    """Whether this CPU computes products of `dtype` by widening each number."""
    if not torch.backends.mkldnn.is_available():
        return dtype == torch.bfloat16
    return dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def is_by_columns(weight: Tensor) -> bool:
    """Whether `weight` [out, in] is stored column by column."""
    return weight.stride(0) == 1 and weight.stride(1) >= weight.shape[0] > 1


def _bind_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Run:
    by_columns = is_by_columns(weight)
    rounds_twice = by_columns and bias is not None  # in torch's product with a vector
    if x.shape[0] <= _VECTORS[by_columns] and not rounds_twice:
        return _bind_vectors(x, weight, bias, out)
    product = _by_columns if by_columns else _by_rows
    return partial(_widened, product, x, weight, bias, out)


def _bind_vectors(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Run:
    pairs = list(zip(x.unbind(0), out.unbind(0), strict=True))

    def run() -> None:
        for row, result in pairs:
            if bias is None:
                torch.mv(weight, row, out=result)
            else:
                torch.addmv(bias, weight, row, out=result)

    return run


def _widened(product: Product, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out = x W^T + b by a float32 product, rounded once."""
    wide = torch.empty(out.shape, dtype=torch.float32)
    product(x.float(), weight, wide)
    if bias is None:
        out.copy_(wide)
    else:
        torch.add(wide, bias, out=out)


def _by_rows(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Blocks of outputs.  x, out: float32 [tokens, in], [tokens, out]; weight stored by rows."""
    num_out, num_in = weight.shape
    size = min(num_out, max(1, _BLOCK // num_in))
    room = torch.empty(size, num_in)
    for start in range(0, num_out, size):
        part = weight[start : start + size]
        block = room[: part.shape[0]].copy_(part)
        torch.mm(x, block.t(), out=out[:, start : start + size])


def _by_columns(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Blocks of inputs, whose products add up.  As `_by_rows`; weight stored by columns."""
    num_out, num_in = weight.shape
    size = min(num_in, max(1, _BLOCK // num_out))
    room, columns = torch.empty(size, num_out), weight.t()
    out.zero_()
    for start in range(0, num_in, size):
        part = columns[start : start + size]
        block = room[: part.shape[0]].copy_(part)
        out.addmm_(x[:, start : start + size], block)


_LINEAR_CPU = define_op(
    "linear_cpu(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) out) -> ()",
    bind=_bind_linear,
)


def linear_cpu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b in x's dtype, a 16-bit one.

    x: [tokens, in]; weight: [out, in], stored by rows or by columns; bias: [out] or None.  Returns
    [tokens, out].  Mutates nothing; recordable.
    """
    out = x.new_empty(x.shape[0], weight.shape[0])
    _LINEAR_CPU(x, weight, bias, out)
    return out
