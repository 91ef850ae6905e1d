"""Gated delta net in plain torch, on any device: the definition that other backends are held to."""

import torch
from torch import Tensor

from paceline.attention.contract import GraphSupport
from paceline.attention.linear.inputs import GdnInputs
from paceline.attention.linear.rows import (
    LinearBuffers,
    LinearPlan,
    commit_rows,
    convolve,
    extend_states,
    linear_buffers,
    plan_rows,
)
from paceline.attention.linear.shape import GDN
from paceline.attention.states import StateBackend, StateCapabilities, StateLayer, StateLimits
from paceline.core.modes import MaskKind
from paceline.kernels.extend_states import StateRows
from paceline.kernels.step_view import GroupView, StepView

NORM_EPS = 1e-6  # in the norms of queries and keys


class TorchGdn(StateBackend[LinearBuffers, LinearPlan, GdnInputs]):
    """Queries and keys have length 1 behind the convolution; queries are scaled by their number of
    dimensions."""

    kind = GDN
    name = "torch"
    capabilities = StateCapabilities(
        device_types=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        masks=frozenset({MaskKind.CAUSAL, MaskKind.TREE}),
        graph=GraphSupport.ALWAYS,
    )

    def make_buffers(self, limits: StateLimits) -> LinearBuffers:
        return linear_buffers(limits)

    def plan(
        self, view: StepView, group: GroupView, buffers: LinearBuffers, *, is_round: bool
    ) -> LinearPlan:
        return plan_rows(view, group, buffers, is_round=is_round)

    def extend(self, inputs: GdnInputs, layer: StateLayer, plan: LinearPlan) -> Tensor:
        """[padded_tokens, value_heads, value_dim] in the dtype of the inputs."""
        shape = plan.shape
        mixed = convolve(inputs.qkv, inputs.conv_weight, None, layer, plan)
        q, k, v = mixed.view(-1, shape.key_heads, shape.channels // shape.key_heads).split(
            (shape.key_dim, shape.key_dim, shape.per_key * shape.value_dim), dim=2
        )
        rows = StateRows(
            q=_unit(q) * shape.key_dim**-0.5,
            k=_unit(k),
            v=v.reshape(-1, shape.value_heads, shape.value_dim),
            decay=inputs.decay,
            beta=inputs.beta,
        )
        return extend_states(rows, layer, plan).to(inputs.qkv.dtype)

    def commit(
        self,
        view: StepView,
        group: GroupView,
        layer: StateLayer,
        buffers: LinearBuffers,
        *,
        path: Tensor,
        num_kept: Tensor,
    ) -> None:
        commit_rows(view, group, layer, buffers, path=path, num_kept=num_kept)


def _unit(x: Tensor) -> Tensor:
    """[..., dim] float32, of length 1."""
    wide = x.float()
    return wide * (wide.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()
