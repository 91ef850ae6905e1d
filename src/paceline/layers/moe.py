"""A mixture of experts: a router, and gated feed-forward blocks of which each token takes a few."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from paceline.core.model.config import ModelConfig, MoEConfig
from paceline.core.parallel import Parallel, whole
from paceline.kernels.moe_choose import moe_choose
from paceline.kernels.moe_experts import SwiGLU
from paceline.kernels.moe_route import Routing, moe_route
from paceline.kernels.sigmoid_gate import sigmoid_gate
from paceline.layers.linear import Linear
from paceline.layers.mlp import GatedMLP
from paceline.layers.rank_sum import RankSum, summed
from paceline.layers.weights.parameter import Placement, empty_parameter
from paceline.layers.weights.weight_format import hold


class SharedExpert(nn.Module):
    """An expert that every token takes; times the sigmoid of its own gate, where it has one."""

    def __init__(
        self,
        hidden_size: int,
        inter_size: int,
        *,
        has_gate: bool,
        parallel: Parallel,
        placement: Placement,
    ) -> None:
        super().__init__()
        self.mlp = GatedMLP(
            hidden_size,
            inter_size,
            activation="silu",
            bias=False,
            parallel=parallel,
            placement=placement,
        )
        self.gate: Linear | None = None
        if has_gate:
            self.gate = Linear(whole(hidden_size), whole(1), bias=False, placement=placement)

    def gated(self, x: Tensor) -> Tensor:
        """Its first half: x [tokens, hidden] -> [tokens, inter]."""
        made: Tensor = self.mlp.gate_up(x)
        return made

    def forward(self, x: Tensor, gated: Tensor) -> Tensor:
        """x [tokens, hidden], `gated` of it -> [tokens, hidden]."""
        out: Tensor = self.mlp.down(gated)
        if self.gate is None:
            return out
        return sigmoid_gate(out.unsqueeze(1), self.gate(x).unsqueeze(1))


class SparseMLP(nn.Module):
    """Router and experts of one layer.  Each rank holds a share of every expert's intermediate
    columns, or some experts whole, as the format decides, and computes a part of the sum; the
    router is everywhere."""

    def __init__(
        self, hidden_size: int, moe: MoEConfig, *, parallel: Parallel, placement: Placement
    ) -> None:
        super().__init__()
        self.num_experts = experts = moe.num_experts
        bias = moe.bias
        inter = parallel.share(moe.intermediate_size, "intermediate_size")
        self.experts_per_token = moe.experts_per_token
        self.renormalize = moe.renormalize
        self.weighs_input = moe.weighs_input
        self.choice = moe.choice
        self.choice_bias: nn.Parameter | None = None  # [experts]  float32
        if moe.choice is not None and moe.choice.biased:
            of_bias = replace(placement, dtype=torch.float32)
            self.choice_bias = empty_parameter(experts, placement=of_bias)
        self.gate = SwiGLU(moe.swiglu_alpha, moe.swiglu_limit, moe.swiglu_up_offset)
        self.router = Linear(whole(hidden_size), whole(experts), bias=bias, placement=placement)
        format_ = placement.formats.experts
        weight = format_.allocate(experts, hidden_size, inter, bias=bias, placement=placement)
        self.held = hold(self, format_, weight)
        self.shared: SharedExpert | None = None
        if moe.shared_size is not None:
            self.shared = SharedExpert(
                hidden_size,
                moe.shared_size,
                has_gate=moe.shared_gate,
                parallel=parallel,
                placement=placement,
            )

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        logits: Tensor = self.router(x)
        # What the shared expert reads does not wait for the routing: of one token its weights are
        # on their way while the router and the choice, which read little, take their turns.
        gated = None if self.shared is None else self.shared.gated(x)
        routing, given = self._route(logits), x
        format_, weight = self.held.format, self.held.weight
        if self.weighs_input:
            given = x * routing.weights.to(x.dtype)
            routing = routing._replace(weights=torch.ones_like(routing.weights))
        if self.shared is None or gated is None:
            return format_.apply(given, routing, weight, self.gate)
        return format_.apply_plus(given, routing, weight, self.gate, self.shared(x, gated))

    def _route(self, logits: Tensor) -> Routing:
        if self.choice is None:
            return moe_route(logits, self.experts_per_token, renormalize=self.renormalize)
        return moe_choose(
            logits,
            self.choice_bias,
            self.experts_per_token,
            self.choice,
            renormalize=self.renormalize,
        )


def feed_forward(
    config: ModelConfig, layer_id: int, *, parallel: Parallel, placement: Placement
) -> GatedMLP | SparseMLP | RankSum:
    """The feed-forward block of a layer: experts where the model has them there."""
    moe = config.moe
    block: GatedMLP | SparseMLP
    if moe is not None and moe.layers[layer_id]:
        block = SparseMLP(config.hidden_size, moe, parallel=parallel, placement=placement)
    else:
        block = GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            activation=config.hidden_act,
            bias=config.mlp_bias,
            parallel=parallel,
            placement=placement,
            gate_scale=None if config.side_multipliers is None else config.side_multipliers.gate,
        )
    made: GatedMLP | SparseMLP | RankSum = summed(block, parallel, placement)
    return made
