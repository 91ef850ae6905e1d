"""head_products: every head's vectors times that head's matrix, as latent attention has it in front
of its keys and behind its values.

Of a few tokens a decode step reads each matrix once, which takes the time of reading; a library's
batched product is a launch that waits for all before it, and cannot write where rows lie apart.
"""

import torch
from torch import Tensor

from paceline.kernels._check import reject, require_triton
from paceline.kernels.custom_op import define_op
from paceline.kernels.stand_in import device_type

MAX_TOKENS = 64
_MAX_INNER = 512  # a program holds whole columns in registers
_DTYPES = (torch.bfloat16, torch.float16)


def head_products_reference(x: Tensor, weight: Tensor) -> Tensor:
    """The definition.  x: [tokens, heads, inner]; weight: [heads, inner, columns]; returns
    [tokens, heads, columns]."""
    return torch.einsum("thi,hic->thc", x, weight)


def head_products(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """out = x times weight, head by head.

    x: [tokens, heads, inner]; weight: [heads, inner, columns], in rows or in columns; out: [tokens,
    heads, columns]; one dtype and device; rows of x and out may lie apart, their numbers may not.
    Mutates out alone.  Recordable; graph-safe: the grid depends on shapes only.  Raises
    KernelArgumentError.
    """
    _check(x, weight, out)
    is_few = 0 < x.shape[0] <= MAX_TOKENS and x.shape[2] <= _MAX_INNER and x.dtype in _DTYPES
    if is_few and device_type(x.device) == "cuda":
        _HEAD_PRODUCTS(x, weight, out)
    else:
        torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))


def _check(x: Tensor, weight: Tensor, out: Tensor) -> None:
    if x.dim() != 3 or x.stride(2) != 1:
        reject(
            "x",
            expected="[tokens, heads, inner] with a contiguous last dimension",
            got=x,
            remedy="view the vectors as heads first",
        )
    tokens, heads, inner = x.shape
    fits = weight.dim() == 3 and weight.shape[:2] == (heads, inner) and 1 in weight.stride()[1:]
    if not fits or weight.dtype != x.dtype or weight.device != x.device:
        reject(
            "weight",
            expected=f"{x.dtype} [{heads}, {inner}, columns] on {x.device}, in rows or in columns",
            got=weight,
            remedy="give one matrix for each head of x",
        )
    shape = (tokens, heads, weight.shape[2])
    if out.shape != shape or out.dtype != x.dtype or out.device != x.device or out.stride(2) != 1:
        reject(
            "out",
            expected=f"{x.dtype} {list(shape)} on {x.device} with a contiguous last dimension",
            got=out,
            remedy="allocate a row for each token and head",
        )


def _launch(x: Tensor, weight: Tensor, out: Tensor) -> None:
    require_triton("head_products", otherwise="use torch.bmm")
    from paceline.kernels._triton.head_products import launch_head_products

    launch_head_products(x, weight, out)


_HEAD_PRODUCTS = define_op(
    "head_products(Tensor x, Tensor weight, Tensor(a!) out) -> ()", cuda=_launch
)
