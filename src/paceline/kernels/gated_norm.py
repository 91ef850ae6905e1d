"""What a gate makes of the output of a layer that keeps states: y * silu(z), with an RMS norm in
front, behind, or none.

The norm is over each of `groups` equal parts of a row, and its product with the weight is rounded
as transformers' Mamba-2 does it: behind the gate the normed row is rounded first.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core.model.config import GateOrder


def gated_norm(
    y: Tensor, z: Tensor, weight: Tensor | None, *, eps: float, groups: int, order: GateOrder
) -> Tensor:
    """y, z: [tokens, dim], rows may be strided; weight: [dim], None without a norm.

    Returns a new tensor [tokens, dim] in y's dtype.  Recordable.
    """
    row, gate = y.float(), F.silu(z.float())
    if order is GateOrder.GATE:
        return row.mul(gate).to(y.dtype)
    assert weight is not None, f"{order} has a norm"
    if order is GateOrder.NORM_GATE:
        normed = _normed(row, groups, eps).mul_(weight)
        return normed.mul_(gate).to(y.dtype)
    return _normed(row.mul(gate), groups, eps).to(y.dtype).mul_(weight)


def _normed(row: Tensor, groups: int, eps: float) -> Tensor:
    """[tokens, dim] float32: each part over the root of its mean square."""
    parts = row.unflatten(1, (groups, -1))
    scale = torch.rsqrt(parts.square().mean(2, keepdim=True).add_(eps))
    normed: Tensor = (parts * scale).flatten(1)
    return normed
