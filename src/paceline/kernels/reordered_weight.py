"""A weight in the order in which a CPU's own instructions for bfloat16 read it.

oneDNN multiplies with a weight whose numbers lie in tiles; it rearranges one that lies row by row
in each call, which for a few rows of x takes as long as the product.  Here that is done once
(decision 115).  The numbers and their sums are the same, bit for bit.
"""

import ctypes

import torch
from torch import Tensor

from paceline.kernels.linear_cpu import is_emulated
from paceline.kernels.stand_in import device_type

_ROWS = 16  # of x, for which oneDNN chooses the order; others read it as it is, too


class Reordered:
    """A place for what `reorder` makes of a weight, once that is filled."""

    __slots__ = ("weight",)

    def __init__(self) -> None:
        self.weight: Tensor | None = None  # [out, in]  opaque to all but oneDNN


def gains_by_order(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products with weights of `dtype` are quicker in oneDNN's order."""
    is_cpu = device_type(device) == "cpu" and dtype == torch.bfloat16
    return is_cpu and torch.backends.mkldnn.is_available() and not is_emulated(dtype)


@torch.no_grad()
def reorder(weight: Tensor, into: Reordered) -> None:
    """Put the numbers of `weight` in order, for `reordered_linear`; nobody else can read them then.

    weight: [out, in] bfloat16 on a CPU, contiguous.  Mutates it: its memory becomes that of the
    result, so that there is one copy once nobody else looks at the old.  One that oneDNN would pad,
    or without rows, stays as it is, and `into` empty.
    """
    if not weight.numel():
        return
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)
    nbytes = torch.ops.mkldnn._nbytes(packed)
    if nbytes != weight.nbytes:
        return
    # What looks at the memory keeps it.
    memory = (ctypes.c_char * nbytes).from_address(torch.ops.mkldnn.data_ptr(packed))
    memory.owner = packed
    weight.data = torch.frombuffer(memory, dtype=weight.dtype).view(weight.shape)
    into.weight = packed


def reordered_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b.  x: [tokens, in] bfloat16; weight: of a `Reordered`; bias: [out] or None.  Returns
    [tokens, out].  Mutates nothing; recordable."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product
