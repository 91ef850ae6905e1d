"""Gated activation: act(gate) * up, from one fused [gate | up] row.

silu(g) = g * sigmoid(g); gelu(g) = g/2 * (1 + erf(g/√2)), which gelu_tanh approximates by
g/2 * (1 + tanh(√(2/π) (g + 0.044715 g³))) (Hendrycks and Gimpel 2016, arXiv:1606.08415); relu(g) =
max(g, 0).  As in transformers the activation is rounded to the model's dtype before the product.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core.errors import KernelArgumentError
from paceline.core.model.config import HIDDEN_ACTS
from paceline.kernels._check import reject
from paceline.kernels.custom_op import Run, define_op

ACTIVATIONS = tuple(sorted(set(HIDDEN_ACTS.values())))


def check_activation(name: str, kind: str) -> None:
    """Raise KernelArgumentError about argument `name` unless it is one of ACTIVATIONS."""
    if kind not in ACTIVATIONS:
        raise KernelArgumentError.about(
            name,
            expected=f"one of {', '.join(ACTIVATIONS)}",
            got=repr(kind),
            remedy="map the model's hidden_act to one of them",
        )


def act_and_mul_reference(x: Tensor, kind: str) -> Tensor:
    """The definition.  x: [tokens, 2 * inter]; returns [tokens, inter] in x's dtype."""
    gate, up = x.float().chunk(2, dim=-1)
    match kind:
        case "silu":
            activated = gate * torch.sigmoid(gate)
        case "gelu":
            activated = 0.5 * gate * (1.0 + torch.erf(gate / 2.0**0.5))
        case "gelu_tanh":
            inner = (2.0 / torch.pi) ** 0.5 * (gate + 0.044715 * gate.pow(3))
            activated = 0.5 * gate * (1.0 + torch.tanh(inner))
        case "relu":
            activated = gate.clamp(min=0.0)
        case _:
            raise AssertionError(kind)
    return (activated.to(x.dtype).float() * up).to(x.dtype)


_BY_TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def activate(x: Tensor, kind: str) -> Tensor:
    """act(x) by torch, a new tensor of x's shape and dtype.  kind: one of ACTIVATIONS."""
    return _BY_TORCH[kind](x)


def _bind_act_and_mul(x: Tensor, kind: str, out: Tensor) -> Run:
    gate, up = x.chunk(2, dim=-1)
    act = _BY_TORCH[kind]

    def run() -> None:
        torch.mul(act(gate), up, out=out)

    return run


def _act_and_mul_cuda(x: Tensor, kind: str, out: Tensor) -> None:
    from paceline.kernels._triton.act_and_mul import launch_act_and_mul

    launch_act_and_mul(x, kind, out)


_ACT_AND_MUL = define_op(
    "act_and_mul(Tensor x, str kind, Tensor(a!) out) -> ()",
    bind=_bind_act_and_mul,
    cuda=_act_and_mul_cuda,
)


def act_and_mul(x: Tensor, kind: str) -> Tensor:
    """act(gate) * up in a new tensor.

    x: [tokens, 2 * inter], gate then up, last dimension contiguous; kind: one of ACTIVATIONS.
    Returns [tokens, inter] in x's dtype.  Mutates nothing.  Graph-safe: the grid depends on shapes
    only.  Raises KernelArgumentError.
    """
    check_activation("kind", kind)
    if x.dim() != 2 or x.shape[1] % 2 or x.stride(1) != 1:
        reject(
            "x",
            expected="[tokens, 2 * inter] with a contiguous last dimension",
            got=x,
            remedy="pass the output of the fused gate/up projection",
        )
    out = torch.empty((x.shape[0], x.shape[1] // 2), dtype=x.dtype, device=x.device)
    _ACT_AND_MUL(x, kind, out)
    return out
