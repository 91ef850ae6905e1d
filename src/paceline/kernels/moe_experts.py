"""moe_experts: each token through its experts' gated feed-forward blocks, summed by weight.

Expert e computes down_e(gated(gate_e(x), up_e(x))) with

    gated(g, u) = g' sigmoid(alpha g') (u' + up_offset),  g' = min(g, limit), u' = clamp(u, ±limit)

which is SwiGLU (Shazeer 2020, arXiv:2002.05202) with alpha 1, offset 0 and no limit, and gpt_oss's
form of it with alpha 1.702, offset 1 and limit 7 (arXiv:2508.10925, section 2.1).  Gate and up rows
of a weight are interleaved, so that a tile of a product holds both parts of what it computes.  Sums
over a token's experts go in the order of its routing: no atomics, the same bits every time.

Of ranks that hold whole experts each computes its own experts' part of the sum, `experts`: pairs of
a token with others are not multiplied, and add nothing.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.core.errors import KernelArgumentError
from paceline.core.parallel import Span, whole
from paceline.kernels._check import reject
from paceline.kernels.custom_op import define_op
from paceline.kernels.linear import linear
from paceline.kernels.moe_align import max_blocks
from paceline.kernels.moe_route import Routing
from paceline.kernels.stand_in import device_type

_FEWEST_ROWS = 16  # of a tile


class ExpertWeights(NamedTuple):
    """The experts of one layer, or a rank's.  Rows 2 i and 2 i + 1 of a gate_up matrix are gate i
    and up i."""

    gate_up: Tensor  # [num_experts, 2 * inter, hidden]
    gate_up_bias: Tensor | None  # [num_experts, 2 * inter]
    down: Tensor  # [num_experts, hidden, inter]
    down_bias: Tensor | None  # [num_experts, hidden]


class SwiGLU(NamedTuple):
    """Constants of the gate; see above."""

    alpha: float
    limit: float | None
    up_offset: float


def swiglu_reference(gate_up: Tensor, gate: SwiGLU) -> Tensor:
    """gated(g, u).  gate_up: [rows, 2 * inter] interleaved; returns [rows, inter]."""
    g, u = gate_up[:, ::2], gate_up[:, 1::2]
    if gate.limit is not None:
        g, u = g.clamp(max=gate.limit), u.clamp(-gate.limit, gate.limit)
    return g * torch.sigmoid(gate.alpha * g) * (u + gate.up_offset)


def moe_experts_reference(
    x: Tensor,
    routing: Routing,
    weights: ExpertWeights,
    gate: SwiGLU,
    experts: Span | None = None,
) -> Tensor:
    """The definition, in float32: every token through every expert, most with weight 0.

    x: [tokens, hidden]; experts: as of `moe_experts`; returns [tokens, hidden] in x's dtype.
    """
    first = 0 if experts is None else experts.first
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(weights.down.shape[0]):
        product = x.float() @ weights.gate_up[expert].float().t()
        if weights.gate_up_bias is not None:
            product = product + weights.gate_up_bias[expert].float()
        result = swiglu_reference(product, gate) @ weights.down[expert].float().t()
        if weights.down_bias is not None:
            result = result + weights.down_bias[expert].float()
        share = torch.where(routing.expert_ids == first + expert, routing.weights, 0.0).sum(1)
        total += share.unsqueeze(1) * result
    return total.to(x.dtype)


def _moe_experts_cpu(
    x: Tensor,
    routing_weights: Tensor,
    expert_ids: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    alpha: float,
    limit: float | None,
    up_offset: float,
    first_expert: int,
    num_experts: int,
    plus: Tensor | None,
    out: Tensor,
) -> None:
    """A loop over the experts that have tokens; it reads the routing itself, as a kernel does."""
    tokens, experts_per_token = expert_ids.shape
    gate = SwiGLU(alpha, limit, up_offset)
    flat = expert_ids.flatten()
    order = flat.argsort(stable=True)
    # Of (token, expert) pairs; those of experts that are not here stay 0.
    empty = torch.empty if num_experts == down.shape[0] else torch.zeros
    results = empty(flat.shape[0], x.shape[1], dtype=x.dtype)
    begin = 0
    for of_routing, count in enumerate(flat.bincount().tolist()):
        pairs = order[begin : begin + count]
        begin += count
        expert = of_routing - first_expert
        if not count or not 0 <= expert < down.shape[0]:
            continue
        rows = x.index_select(0, pairs // experts_per_token)
        bias = None if gate_up_bias is None else gate_up_bias[expert]
        gated = swiglu_reference(linear(rows, gate_up[expert], bias), gate)
        bias = None if down_bias is None else down_bias[expert]
        results.index_copy_(0, pairs, linear(gated, down[expert], bias))
    parts = results.view(tokens, experts_per_token, x.shape[1])
    out.copy_((parts.float() * routing_weights.unsqueeze(2)).sum(1))
    if plus is not None:
        out.add_(plus)


def _moe_experts_cuda(
    x: Tensor,
    routing_weights: Tensor,
    expert_ids: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    alpha: float,
    limit: float | None,
    up_offset: float,
    first_expert: int,
    num_experts: int,
    plus: Tensor | None,
    out: Tensor,
) -> None:
    from paceline.kernels._triton.moe_experts import launch_moe_experts

    launch_moe_experts(
        x,
        Routing(routing_weights, expert_ids),
        ExpertWeights(gate_up, gate_up_bias, down, down_bias),
        gate=SwiGLU(alpha, limit, up_offset),
        experts=Span(first_expert, down.shape[0], num_experts),
        plus=plus,
        out=out,
    )


def _scratch(
    x: Tensor, routing_weights: Tensor, expert_ids: Tensor, *weights: object
) -> tuple[int, ...]:
    """Of each pair of a token and its expert: its place among tiles, gated, the result."""
    down = weights[2]
    assert isinstance(down, Tensor)
    (experts, hidden, inter), pairs = down.shape, expert_ids.numel()
    places = (4 * pairs, 12 * max_blocks(pairs, experts, _FEWEST_ROWS))
    return *places, pairs * inter * x.element_size(), pairs * hidden * x.element_size()


_MOE_EXPERTS = define_op(
    "moe_experts(Tensor x, Tensor routing_weights, Tensor expert_ids, Tensor gate_up, "
    "Tensor? gate_up_bias, Tensor down, Tensor? down_bias, float alpha, float? limit, "
    "float up_offset, int first_expert, int num_experts, Tensor? plus, Tensor(a!) out) -> ()",
    cpu=_moe_experts_cpu,
    cuda=_moe_experts_cuda,
    scratch=_scratch,
)


def moe_experts(
    x: Tensor,
    routing: Routing,
    weights: ExpertWeights,
    gate: SwiGLU,
    plus: Tensor | None = None,
    experts: Span | None = None,
) -> Tensor:
    """Every token through its experts, in a new tensor [tokens, hidden] of x's dtype.

    x: [tokens, hidden] with a contiguous last dimension; routing of as many tokens, its ids valid;
    weights in x's dtype, on CUDA row by row; plus: contiguous, as the result, to which it is added
    once that is rounded; experts: which of the routing's the weights are of, None: all.  Mutates
    nothing.  Graph-safe: grids depend on shapes only.  Raises KernelArgumentError.
    """
    _check(x, routing, weights, plus)
    experts = require_experts(experts, weights.down.shape[0])
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _MOE_EXPERTS(x, *routing, *weights, *gate, experts.first, experts.total, plus, out)
    return out


def _check(x: Tensor, routing: Routing, weights: ExpertWeights, plus: Tensor | None) -> None:
    if x.dim() != 2 or x.stride(1) != 1:
        reject(
            "x",
            expected="[tokens, hidden] with a contiguous last dimension",
            got=x,
            remedy="pass the normed hidden states",
        )
    require_routed(x, routing, plus)
    experts, columns, inter = weights.down.shape
    wanted = {
        "gate_up": (experts, 2 * inter, x.shape[1]),
        "gate_up_bias": (experts, 2 * inter),
        "down": (experts, x.shape[1], inter),
        "down_bias": (experts, columns),
    }
    for name, tensor in weights._asdict().items():
        if tensor is None:
            continue
        fits = tensor.shape == wanted[name] and tensor.dtype == x.dtype
        is_readable = device_type(x.device) == "cpu" or tensor.is_contiguous()
        if not fits or tensor.device != x.device or not is_readable:
            reject(
                f"weights.{name}",
                expected=f"{x.dtype} {list(wanted[name])} on {x.device}, contiguous",
                got=tensor,
                remedy="load the experts in the model's dtype",
            )


def require_experts(experts: Span | None, count: int) -> Span:
    """Which of a routing's experts weights of `count` are of: all, unless said.  Raises
    KernelArgumentError for others than as many."""
    if experts is None:
        return whole(count)
    if experts.size != count or experts.first < 0 or experts.end > experts.total:
        raise KernelArgumentError.about(
            "experts",
            expected=f"{count}, as the weights have, of those that the routing chooses from",
            got=f"{experts.first} to {experts.end} of {experts.total}",
            remedy="pass the span that the rank holds",
        )
    return experts


def require_routed(x: Tensor, routing: Routing, plus: Tensor | None) -> None:
    """Raise KernelArgumentError for a routing, or a `plus`, that is none of x."""
    for name, tensor, dtype in (
        ("routing.weights", routing.weights, torch.float32),
        ("routing.expert_ids", routing.expert_ids, torch.int32),
    ):
        is_table = tensor.dim() == 2 and tensor.shape[0] == x.shape[0] and tensor.is_contiguous()
        if not is_table or tensor.dtype != dtype or tensor.device != x.device:
            reject(
                name,
                expected=f"{dtype} [{x.shape[0]}, experts_per_token] on {x.device}, contiguous",
                got=tensor,
                remedy="build it with moe_route",
            )
    is_like_x = plus is None or (plus.shape == x.shape and plus.dtype == x.dtype)
    if plus is not None and not (is_like_x and plus.is_contiguous() and plus.device == x.device):
        reject(
            "plus",
            expected=f"{x.dtype} {list(x.shape)} on {x.device}, contiguous",
            got=plus,
            remedy="pass what the shared expert returned",
        )
