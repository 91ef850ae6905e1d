"""linear_parts: the product x W^T as parts of its sums, for who adds it to something anyway.

Of a few hundred tokens and a long inner dimension a product has fewer tiles than half of a GPU's
processors.  A library splits the sums then, and adds the parts up in a pass of its own; a norm that
adds the product to the residual stream adds them on the way
(docs/decisions/137-norms-add-the-parts-of-a-product.md).
"""

import torch
from torch import Tensor

from paceline.kernels.custom_op import define_op
from paceline.kernels.skinny_linear import MAX_TOKENS as SKINNY_TOKENS
from paceline.kernels.stand_in import is_hopper, multiprocessors

PARTS = 2
MOST_TOKENS = 256
_LEAST_INNER = 8192  # shorter sums are not worth their parts
_TILE = 128  # tokens, and features, of a library's tile
_DTYPES = (torch.bfloat16, torch.float16)


def linear_parts_reference(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """The definition; arguments as `linear_parts`, out [PARTS, tokens, out] float32, mutated."""
    torch.bmm(_columns(x).float(), _columns(weight).float().mT, out=out)


def fits_parts(x: Tensor, weight: Tensor) -> bool:
    """Whether `linear_parts` takes these operands and a norm of its result is faster than one of
    `linear`'s; shapes and dtypes only.  x: [tokens, inner]; weight: [out, inner]."""
    tokens, inner = x.shape
    if not SKINNY_TOKENS < tokens <= MOST_TOKENS:
        return False
    tiles = -(-tokens // _TILE) * -(-weight.shape[0] // _TILE)
    return (
        is_hopper(x.device)
        and inner >= _LEAST_INNER
        and inner % (_TILE * PARTS) == 0
        and PARTS * tiles <= multiprocessors(x.device)
        and x.dtype in _DTYPES
    )


def linear_parts(x: Tensor, weight: Tensor) -> Tensor:
    """Products of the first and the second half of the inner dimension.

    x: [tokens, inner]; weight: [out, inner]; one dtype, 16 bits, contiguous.  Returns
    [PARTS, tokens, out] float32, whose sum is x W^T.  Mutates nothing; recordable.
    """
    out = x.new_empty(PARTS, x.shape[0], weight.shape[0], dtype=torch.float32)
    _LINEAR_PARTS(x, weight, out)
    return out


def _columns(x: Tensor) -> Tensor:
    """x [rows, inner] -> [PARTS, rows, inner / PARTS], a view."""
    return x.view(x.shape[0], PARTS, -1).transpose(0, 1)


def _by_library(x: Tensor, weight: Tensor, out: Tensor) -> None:
    torch.bmm(_columns(x), _columns(weight).mT, out_dtype=torch.float32, out=out)


_LINEAR_PARTS = define_op(
    "linear_parts(Tensor x, Tensor weight, Tensor(a!) out) -> ()",
    cpu=linear_parts_reference,
    cuda=_by_library,
)
