"""What a gate makes of the output of a layer that keeps states: y * silu(z), with an RMS norm in
front, behind, or none.

The norm is over each of `groups` equal parts of a row.  Its product with the weight is rounded as
transformers does it: Mamba-2 rounds the normed row behind the gate first; Qwen3-Next, whose heads
share a weight, rounds both it and its product before the gate.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core.model.config import GateOrder
from paceline.kernels._check import reject
from paceline.kernels.custom_op import define_op
from paceline.kernels.rms_norm import rms_norm_reference

HEADS = "heads"  # the order of gated_head_norm, beside those of GateOrder


class Gate(NamedTuple):
    """What stands between a layer's states and its projection back: y * silu(z) and an RMS norm of
    the whole row behind it."""

    z: Tensor  # [tokens, dim]  rows may be strided
    weight: Tensor  # [dim]


class GatedRows(NamedTuple):
    """Rows behind a gate, of whose norm the scale is left to whoever adds up what they become: a
    product without a bias is as well scaled behind as before."""

    rows: Tensor  # [tokens, dim]  y * silu(z) * weight
    squares: Tensor  # [tokens, parts]  float32  of y * silu(z): a row's parts add up to its sum


def gated_rows_reference(y: Tensor, gate: Gate) -> GatedRows:
    """The definition.  y: [tokens, dim] in any dtype; what comes out is in that of z."""
    found = y.float() * F.silu(gate.z.float())
    rows = (found * gate.weight).to(gate.z.dtype)
    return GatedRows(rows, found.square().sum(1, keepdim=True))


def gated_norm_reference(
    y: Tensor, z: Tensor, weight: Tensor | None, *, eps: float, groups: int, order: GateOrder
) -> Tensor:
    """The definition, and the CPU's path; arguments and result as `gated_norm`."""
    row, gate = y.float(), F.silu(z.float())
    if order is GateOrder.GATE:
        return row.mul(gate).to(y.dtype)
    assert weight is not None, f"{order} has a norm"
    if order is GateOrder.NORM_GATE:
        normed = _normed(row, groups, eps).mul_(weight)
        return normed.mul_(gate).to(y.dtype)
    return _normed(row.mul(gate), groups, eps).to(y.dtype).mul_(weight)


def gated_head_norm_reference(y: Tensor, z: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """The definition, and the CPU's path; arguments and result as `gated_head_norm`."""
    gate = F.silu(z.reshape(y.shape).float())
    return (rms_norm_reference(y, weight, eps) * gate).to(y.dtype).flatten(1)


def _normed(row: Tensor, groups: int, eps: float) -> Tensor:
    """[tokens, dim] float32: each part over the root of its mean square."""
    parts = row.unflatten(1, (groups, -1))
    scale = torch.rsqrt(parts.square().mean(2, keepdim=True).add_(eps))
    normed: Tensor = (parts * scale).flatten(1)
    return normed


def _on_cpu(
    y: Tensor, z: Tensor, weight: Tensor | None, eps: float, groups: int, order: str, out: Tensor
) -> None:
    if order == HEADS:
        assert weight is not None, "heads share one"
        out.copy_(gated_head_norm_reference(y, z, weight, eps=eps))
        return
    kind = GateOrder(order)
    out.copy_(gated_norm_reference(y, z, weight, eps=eps, groups=groups, order=kind))


def _on_cuda(*arguments: Any) -> None:
    from paceline.kernels._triton.gated_norm import launch_gated_norm

    launch_gated_norm(*arguments)


_GATED_NORM = define_op(
    "gated_norm(Tensor y, Tensor z, Tensor? weight, float eps, int groups, str order, "
    "Tensor(a!) out) -> ()",
    cpu=_on_cpu,
    cuda=_on_cuda,
)


def gated_norm(
    y: Tensor, z: Tensor, weight: Tensor | None, *, eps: float, groups: int, order: GateOrder
) -> Tensor:
    """y, z: [tokens, dim], rows may be strided; weight: [dim], None without a norm.

    Returns a new tensor [tokens, dim] in y's dtype.  Mutates nothing.  Graph-safe: the grid depends
    on shapes only.  Raises KernelArgumentError.
    """
    _check_rows(y, z)
    out = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    _GATED_NORM(y, z, weight, eps, groups, order.value, out)
    return out


def gated_head_norm(y: Tensor, z: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """The norm of each head, times silu(z).

    y: [tokens, heads, dim]; z: [tokens, parts, heads // parts * dim]; of both all but the last
    dimension may be strided; weight: [dim].  Returns a new tensor [tokens, heads * dim] in y's
    dtype.  Mutates nothing.  Graph-safe.  Raises KernelArgumentError.
    """
    _check_rows(y, z)
    out = torch.empty((y.shape[0], y.shape[1:].numel()), dtype=y.dtype, device=y.device)
    _GATED_NORM(y, z, weight, eps, y.shape[1], HEADS, out)
    return out


def _check_rows(y: Tensor, z: Tensor) -> None:
    dim = y.shape[1:].numel()
    for name, each in (("y", y), ("z", z)):
        if each.stride(-1) != 1 or each.shape[0] != y.shape[0] or each.shape[1:].numel() != dim:
            reject(
                name,
                expected=f"[{y.shape[0]}, ...] of {dim} numbers with a contiguous last dimension",
                got=each,
                remedy="pass what a layer read of its states, and the gates of the same rows",
            )
