"""add_layer_norm: the residual addition and the LayerNorm behind it, in one pass over memory.

out = (s - mean(s)) / sqrt(var(s) + eps) * weight + bias, s = x + residual (Ba et al. 2016,
arXiv:1607.06450), with the biased variance.  As in transformers s is rounded to the model's dtype;
all behind it is float32, and is rounded once.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels._check import reject
from paceline.kernels.custom_op import define_op


def add_layer_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor
) -> None:
    """The definition, and the CPU's path; arguments and mutation as `add_layer_norm`."""
    out.copy_(F.layer_norm(x + residual, weight.shape, weight, bias, eps))


def _add_layer_norm_cuda(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor
) -> None:
    from paceline.kernels._triton.add_layer_norm import launch_add_layer_norm

    launch_add_layer_norm(x, residual, weight, bias, eps, out)


_ADD_LAYER_NORM = define_op(
    "add_layer_norm(Tensor x, Tensor residual, Tensor weight, Tensor? bias, float eps, "
    "Tensor(a!) out) -> ()",
    cpu=add_layer_norm_reference,
    cuda=_add_layer_norm_cuda,
)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> Tensor:
    """Norm of x + residual, as a new tensor.

    x, residual: [tokens, dim], rows may be strided, the last dimension contiguous; weight, bias:
    [dim], bias or None; one dtype and device.  Returns [tokens, dim].  Mutates nothing.
    Graph-safe: the grid depends on shapes only.  Raises KernelArgumentError.
    """
    for name, given in (("x", x), ("residual", residual)):
        alike = given.shape == x.shape and given.dtype == x.dtype
        if given.dim() != 2 or given.stride(1) != 1 or not alike:
            expected = f"{x.dtype} [tokens, dim] like x, with a contiguous last dimension"
            reject(name, expected=expected, got=given, remedy="pass hidden states of one step")
    for name, own in (("weight", weight), ("bias", bias)):
        if own is not None and (own.shape != x.shape[1:] or own.dtype != x.dtype):
            expected = f"{x.dtype} [{x.shape[1]}]"
            reject(name, expected=expected, got=own, remedy="load the norm in the model's dtype")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _ADD_LAYER_NORM(x, residual, weight, bias, eps, out)
    return out
