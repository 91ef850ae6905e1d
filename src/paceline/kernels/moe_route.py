"""moe_route: which experts each token goes to, and how much each of them counts.

A token takes the experts with the largest router logits.  Their weights are the softmax over all
experts, or over the chosen ones alone (`renormalize`), which is the same as dividing the former by
their sum (Shazeer et al. 2017, arXiv:1701.06538; Fedus et al. 2021, arXiv:2101.03961).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.core.errors import KernelArgumentError
from paceline.kernels._check import reject
from paceline.kernels.custom_op import define_op


class Routing(NamedTuple):
    """The experts of every token, the largest logit first."""

    weights: Tensor  # [tokens, experts_per_token]  float32
    expert_ids: Tensor  # [tokens, experts_per_token]  int32


def moe_route_reference(logits: Tensor, experts_per_token: int, *, renormalize: bool) -> Routing:
    """The definition.  logits: [tokens, num_experts]; equal logits go to the lower expert id."""
    logits = logits.float()
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    chosen, ids = ordered[:, :experts_per_token], ids[:, :experts_per_token]
    weights = chosen.softmax(-1) if renormalize else logits.softmax(-1).gather(1, ids)
    return Routing(weights, ids.int())


def _moe_route_cpu(logits: Tensor, renormalize: bool, weights: Tensor, expert_ids: Tensor) -> None:
    logits = logits.float()
    chosen, ids = logits.topk(weights.shape[1], dim=-1)
    expert_ids.copy_(ids)
    if renormalize:
        torch.softmax(chosen, -1, out=weights)
    else:
        torch.gather(logits.softmax(-1), 1, ids, out=weights)


def _moe_route_cuda(logits: Tensor, renormalize: bool, weights: Tensor, expert_ids: Tensor) -> None:
    from paceline.kernels._triton.moe_route import launch_moe_route

    launch_moe_route(logits, renormalize, weights, expert_ids)


_MOE_ROUTE = define_op(
    "moe_route(Tensor logits, bool renormalize, Tensor(a!) weights, Tensor(b!) expert_ids) -> ()",
    cpu=_moe_route_cpu,
    cuda=_moe_route_cuda,
)


def moe_route(logits: Tensor, experts_per_token: int, *, renormalize: bool) -> Routing:
    """The Routing of every token.

    logits: [tokens, num_experts] with a contiguous last dimension; ids are valid even where logits
    are not finite.  Mutates nothing.  Graph-safe: the grid depends on shapes only.  Raises
    KernelArgumentError.
    """
    if logits.dim() != 2 or logits.stride(1) != 1:
        reject(
            "logits",
            expected="[tokens, num_experts] with a contiguous last dimension",
            got=logits,
            remedy="pass the output of the router",
        )
    if not 1 <= experts_per_token <= logits.shape[1]:
        raise KernelArgumentError.about(
            "experts_per_token",
            expected=f"1 to {logits.shape[1]}, the number of experts",
            got=experts_per_token,
            remedy="check the model's num_experts_per_tok",
        )
    shape = (logits.shape[0], experts_per_token)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    expert_ids = torch.empty(shape, dtype=torch.int32, device=logits.device)
    _MOE_ROUTE(logits, renormalize, weights, expert_ids)
    return Routing(weights, expert_ids)
