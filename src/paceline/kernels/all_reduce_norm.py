"""all_reduce_add_rms_norm: the ranks' sum, added to the residual stream and normalised.

The definition is `all_reduce`, whose sum is rounded once, then `add_rms_norm`.  On GPUs a row goes
to the peers, is added and normalised by one program, which neither writes the sum nor reads it
again; a CPU, where nothing is gained by that, does one behind the other.  A few rows go without an
announcement (`_triton.all_reduce_norm`), in half the time.
"""

from typing import Any

import torch
from torch import Tensor

from paceline.kernels.all_reduce import (
    SLICE_BYTES,
    Exchange,
    all_reduce,
    all_reduce_reference,
    check_message,
)
from paceline.kernels.custom_op import define_op
from paceline.kernels.rms_norm import (
    add_rms_norm,
    add_rms_norm_reference,
    check_add_rms_norm,
)
from paceline.kernels.stand_in import device_type


def all_reduce_add_rms_norm_reference(
    parts: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    unit_offset: bool = False,
    wide: bool = False,
) -> tuple[Tensor, Tensor]:
    """The definition.  parts: [ranks, tokens, dim]; returns (normalised sum, sum) as of
    `add_rms_norm_reference`; mutates nothing."""
    total = all_reduce_reference(parts)
    return add_rms_norm_reference(total, residual, weight, eps, unit_offset=unit_offset, wide=wide)


def _launch(*arguments: Any) -> None:
    from paceline.kernels._triton.all_reduce_norm import launch_all_reduce_norm

    launch_all_reduce_norm(*arguments)


_ALL_REDUCE_NORM = define_op(
    "all_reduce_add_rms_norm(Tensor x, Tensor(a!) residual, Tensor weight, float eps, "
    "bool unit_offset, bool wide, int rank, Tensor(b!) box, Tensor(c!) sent, Tensor(d!) rows, "
    "Tensor peers, Tensor(e!) out) -> ()",
    cuda=_launch,
)


def all_reduce_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    exchange: Exchange,
    *,
    unit_offset: bool = False,
    wide: bool = False,
) -> Tensor:
    """residual += every rank's x, rounded as `all_reduce` rounds it; returns the norm of the sum in
    a new tensor.

    x, residual: [tokens, dim], the box's dtype or float32; weight: [dim] in x's dtype.  Mutates
    `residual` and the exchange.  Recordable; graph-safe: the grid depends on shapes only.  Raises
    as `all_reduce` and `add_rms_norm`.
    """
    is_row_a_slice = x.shape[-1] * x.element_size() <= SLICE_BYTES
    if device_type(x.device) == "cpu" or not is_row_a_slice:
        total = all_reduce(x, exchange)
        return add_rms_norm(total, residual, weight, eps, unit_offset=unit_offset, wide=wide)
    check_message(x, exchange)
    check_add_rms_norm(x, residual, weight)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    memory = exchange.box, exchange.sent, exchange.rows, exchange.peers
    _ALL_REDUCE_NORM(x, residual, weight, eps, unit_offset, wide, exchange.rank, *memory, out)
    return out
