"""Random experts and routings, and transformers' own modules that compute them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from paceline.core.parallel import Parallel, Span
from paceline.kernels.moe_experts import ExpertWeights, SwiGLU
from paceline.kernels.moe_route import Routing, moe_route_reference

SILU = SwiGLU(alpha=1.0, limit=None, up_offset=0.0)
CLAMPED = SwiGLU(alpha=1.702, limit=1.25, up_offset=1.0)


@dataclass(frozen=True)
class Case:
    """One layer's experts and a batch."""

    x: Tensor  # [tokens, hidden]
    routing: Routing
    weights: ExpertWeights
    gate: SwiGLU
    plus: Tensor | None = None  # [tokens, hidden]
    experts: Span | None = None  # of the routing's, which the weights are of; None: all


def make_case(
    tokens: int,
    num_experts: int,
    experts_per_token: int,
    *,
    hidden: int,
    inter: int,
    gate: SwiGLU = SILU,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    live: int | None = None,
) -> Case:
    """Weights scaled so that results are near 1; only the first `live` experts get tokens."""
    generator = torch.Generator(device).manual_seed(tokens + num_experts)

    def noise(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator, device=device) * scale).to(dtype)

    biased = gate is CLAMPED
    weights = ExpertWeights(
        noise(num_experts, 2 * inter, hidden, scale=hidden**-0.5),
        noise(num_experts, 2 * inter, scale=0.5) if biased else None,
        noise(num_experts, hidden, inter, scale=inter**-0.5),
        noise(num_experts, hidden, scale=0.5) if biased else None,
    )
    logits = noise(tokens, live or num_experts)
    routing = moe_route_reference(logits, experts_per_token, renormalize=True)
    return Case(noise(tokens, hidden), routing, weights, gate)


def of_rank(case: Case, rank: int, ranks: int) -> Case:
    """The part of it that one of the ranks with whole experts computes."""
    held = Parallel(rank, ranks).spread(len(case.weights.down))
    part = [None if each is None else each[held.first : held.end] for each in case.weights]
    return replace(case, weights=ExpertWeights(*part), experts=held)


def nonsense(*size: Any, empty: Callable[..., Tensor] = torch.empty, **how: Any) -> Tensor:
    """In place of `torch.empty`, whose memory is often zeros by chance."""
    made = empty(*size, **how)
    return made.fill_(torch.nan if made.is_floating_point() else -7)


def theirs(case: Case) -> Tensor:
    """[tokens, hidden] from transformers' module of the same experts, in the case's dtype."""
    experts, hidden, inter = case.weights.down.shape
    settings = {"hidden_size": hidden, "num_hidden_layers": 1}
    module: torch.nn.Module
    if case.gate is CLAMPED:
        config = GptOssConfig(
            num_local_experts=experts,
            intermediate_size=inter,
            swiglu_alpha=case.gate.alpha,
            swiglu_limit=case.gate.limit,
            **settings,
        )
        config._experts_implementation = "eager"
        module = GptOssExperts(config)
        wanted = {
            "gate_up_proj": case.weights.gate_up.mT,
            "gate_up_proj_bias": case.weights.gate_up_bias,
            "down_proj": case.weights.down.mT,
            "down_proj_bias": case.weights.down_bias,
        }
    else:
        config = Qwen3MoeConfig(num_experts=experts, moe_intermediate_size=inter, **settings)
        config._experts_implementation = "eager"
        module = Qwen3MoeExperts(config)
        gate_up = case.weights.gate_up
        wanted = {
            "gate_up_proj": torch.cat((gate_up[:, ::2], gate_up[:, 1::2]), dim=1),
            "down_proj": case.weights.down,
        }
    for name, tensor in wanted.items():
        setattr(module, name, torch.nn.Parameter(tensor, requires_grad=False))
    ids = case.routing.expert_ids.long()
    found: Tensor = module(case.x, ids, case.routing.weights.to(case.x.dtype))
    return found


def in_float32(case: Case) -> Case:
    """The same numbers, computed without rounding to the case's dtype."""
    weights = [None if tensor is None else tensor.float() for tensor in case.weights]
    return Case(case.x.float(), case.routing, ExpertWeights(*weights), case.gate)
