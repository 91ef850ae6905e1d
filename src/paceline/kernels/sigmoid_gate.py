"""sigmoid_gate: what a layer made, times the sigmoid of a gate that it projected beside it.

As in transformers the sigmoid is rounded to the model's dtype before the product.
"""

import torch
from torch import Tensor

from paceline.kernels._check import reject
from paceline.kernels.custom_op import define_op


def sigmoid_gate_reference(x: Tensor, gate: Tensor) -> Tensor:
    """The definition, and the CPU's path; arguments and result as `sigmoid_gate`."""
    return (x * gate.sigmoid()).flatten(1)


def _on_cpu(x: Tensor, gate: Tensor, out: Tensor) -> None:
    torch.mul(x, gate.sigmoid(), out=out.view(x.shape))


def _on_cuda(x: Tensor, gate: Tensor, out: Tensor) -> None:
    from paceline.kernels._triton.sigmoid_gate import launch_sigmoid_gate

    launch_sigmoid_gate(x, gate, out)


_SIGMOID_GATE = define_op(
    "sigmoid_gate(Tensor x, Tensor gate, Tensor(a!) out) -> ()", cpu=_on_cpu, cuda=_on_cuda
)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate).

    x: [tokens, heads, dim]; gate: [tokens, heads, dim], or [tokens, 1, 1], which gates a token; of
    both all but the last dimension may be strided; one dtype.  Returns a new tensor
    [tokens, heads * dim].  Mutates nothing.  Graph-safe: the grid depends on shapes only.  Raises
    KernelArgumentError.
    """
    if x.dim() != 3 or x.stride(2) != 1:
        reject(
            "x",
            expected="[tokens, heads, dim] with a contiguous last dimension",
            got=x,
            remedy="pass what heads attended to, or a row as one head",
        )
    fits = gate.shape in (x.shape, (x.shape[0], 1, 1)) and gate.stride(2) == 1
    if not fits or gate.dtype != x.dtype:
        reject(
            "gate",
            expected=f"{x.dtype} {list(x.shape)} or [{x.shape[0]}, 1, 1], its last dimension "
            "contiguous",
            got=gate,
            remedy="project it from the same rows",
        )
    out = torch.empty((x.shape[0], x.shape[1:].numel()), dtype=x.dtype, device=x.device)
    _SIGMOID_GATE(x, gate, out)
    return out
