"""activated_linear: a product of many tokens and the activation behind it, in one pass over memory:
act(x W^T + b), or of gate rows and up rows act(x G^T + b) * (x U^T + b).

A library's product writes what the activation then reads and writes again.  Here an activation is
computed of the sums of a tile while other tiles of the processor are multiplied.  Both read tiles
by the copy engine.  Of 16-bit numbers on a Hopper GPU, of tokens enough to fill it and few inputs,
and of a full decode's gates (docs/decisions/137-norms-add-the-parts-of-a-product.md); all else
stays with `linear` (docs/decisions/125-activations-in-products.md).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels._check import COPY_ALIGNMENT, is_copyable, reject, require_triton
from paceline.kernels.act_and_mul import act_and_mul, activate, check_activation
from paceline.kernels.custom_op import define_op
from paceline.kernels.skinny_linear import require_bias
from paceline.kernels.stand_in import is_hopper, multiprocessors

LEAST_TOKENS = 2048  # below, tiles are too few to fill a GPU
MOST_INNER = 1024  # of the inner dimension: longer sums want other tiles, and gain less
# Of longer sums of gates: so many tokens gain where tiles of both parts fill processors in turns.
LONG_TOKENS, LONG_INNER = 256, 4096
_LEAST_FILL = 0.8  # of the turns' processors


class ProductTile(NamedTuple):
    """What a program computes at a time, and how."""

    tokens: int
    features: int  # with gates so many of both
    inner: int  # of the inner dimension, at a time
    group: int  # tiles of tokens that take turns, so that they find weights in the L2 cache
    num_warps: int
    num_stages: int
    per_processor: int | None = None  # programs, which take tiles in turns; None: one for each tile


PLAIN_TILE = ProductTile(128, 128, 64, 8, 4, 2)
GATED_TILE = ProductTile(128, 64, 64, 16, 4, 3, per_processor=2)
LONG_TILE = ProductTile(128, 128, 64, 4, 8, 4)


def activated_linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, gated: bool, out: Tensor
) -> None:
    """The definition; arguments as `activated_linear`, out [tokens, out], mutated."""
    product = torch.nn.functional.linear(x, weight, bias)
    out.copy_(act_and_mul(product, activation) if gated else activate(product, activation))


def fits_activated(x: Tensor, weight: Tensor, *, gated: bool) -> bool:
    """Whether `activated_linear` takes these operands and is the faster way; shapes, strides and
    dtypes only.  x: [tokens, inner]; weight: [rows, inner]."""
    rows = weight.shape[0]
    return (
        is_hopper(x.device)
        and x.dim() == 2
        and (
            _fills_turns(x, rows // 2)
            if gated and x.shape[1] > MOST_INNER
            else x.shape[0] >= LEAST_TOKENS and x.shape[1] <= MOST_INNER
        )
        and _is_readable(x)
        and _is_readable(weight)
        and rows % _multiple_of_rows(x, gated=gated) == 0
    )


def _fills_turns(x: Tensor, features: int) -> bool:
    """Whether long sums of gates are of as many tokens as gain, and leave few processors idle."""
    if x.shape[0] != LONG_TOKENS or x.shape[1] > LONG_INNER:
        return False
    tiles = LONG_TOKENS // LONG_TILE.tokens * -(-features // LONG_TILE.features)
    processors = multiprocessors(x.device)
    return tiles >= _LEAST_FILL * processors * -(-tiles // processors)


def activated_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    *,
    gated: bool,
    by_triton: bool = False,
) -> Tensor:
    """act(x W^T + b); gated: act(gate) * up of it.

    x: [tokens, inner]; weight: [out, inner], gated [2 * out, inner], gate rows then up rows; bias:
    like a column of weight, or None; one dtype, bfloat16 or float16, last dimensions contiguous,
    rows of all and of the result at multiples of 16 bytes, inner a multiple of 64.  activation: one
    of ACTIVATIONS; gelu is approximated, by at most 5e-5 and a quarter of what rounding to bfloat16
    may change.  Sums, activations and their products are rounded as by separate operations.
    by_triton: on a CPU too, by its interpreter.  Returns [tokens, out].  Mutates nothing.
    Graph-safe: the grid depends on shapes only.  Raises KernelArgumentError.
    """
    check_activation("activation", activation)
    _check(x, weight, bias, gated=gated)
    out = x.new_empty(x.shape[0], weight.shape[0] // (1 + gated))
    run = _BY_TRITON if by_triton else _ACTIVATED_LINEAR
    run(x, weight, bias, activation, gated, out)
    return out


def _is_readable(x: Tensor) -> bool:
    """Whether the copy engine reads tiles of it."""
    return is_copyable(x) and x.shape[1] % PLAIN_TILE.inner == 0


def _multiple_of_rows(x: Tensor, *, gated: bool) -> int:
    """Of a weight: rows of the result then lie at multiples of COPY_ALIGNMENT."""
    return COPY_ALIGNMENT // x.element_size() * (1 + gated)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, *, gated: bool) -> None:
    for name, given in (("x", x), ("weight", weight)):
        is_like_x = given.dtype == x.dtype and given.shape[1:] == x.shape[1:]
        if given.dim() != 2 or not is_like_x or not _is_readable(given):
            expected = f"16-bit [rows, {PLAIN_TILE.inner} times a number], rows at multiples of "
            reject(
                name,
                expected=f"{expected}{COPY_ALIGNMENT} bytes, dtype and last dimension those of x",
                got=given,
                remedy="take linear and act_and_mul",
            )
    multiple = _multiple_of_rows(x, gated=gated)
    if weight.shape[0] % multiple:
        expected = f"{multiple} times a number of rows"
        reject("weight", expected=expected, got=weight, remedy="take linear and act_and_mul")
    require_bias(bias, weight.shape[0], x.dtype)


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, gated: bool, out: Tensor
) -> None:
    require_triton("activated_linear", otherwise="use kernels.linear and kernels.act_and_mul")
    from paceline.kernels._triton.activated_linear import launch_activated_linear

    tile = PLAIN_TILE
    if gated:
        tile = GATED_TILE if x.shape[1] <= MOST_INNER else LONG_TILE
    launch_activated_linear(x, weight, bias, activation, gated, out, tile=tile)


_SCHEMA = (
    "(Tensor x, Tensor weight, Tensor? bias, str activation, bool gated, Tensor(a!) out) -> ()"
)
_ACTIVATED_LINEAR = define_op(
    "activated_linear" + _SCHEMA, cpu=activated_linear_reference, cuda=_launch
)
_BY_TRITON = define_op("activated_linear_by_triton" + _SCHEMA, cpu=_launch, cuda=_launch)
