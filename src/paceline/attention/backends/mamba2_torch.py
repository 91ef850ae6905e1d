"""Mamba 2 in plain torch, on any device: the definition that other backends are held to."""

import torch
from torch import Tensor

from paceline.attention.contract import GraphSupport
from paceline.attention.linear.inputs import Mamba2Inputs
from paceline.attention.linear.rows import (
    LinearBuffers,
    LinearPlan,
    commit_rows,
    convolve,
    extend_states,
    linear_buffers,
    plan_rows,
)
from paceline.attention.linear.shape import MAMBA2
from paceline.attention.states import StateBackend, StateCapabilities, StateLayer, StateLimits
from paceline.core.modes import MaskKind
from paceline.kernels.extend_states import StateRows
from paceline.kernels.step_view import GroupView, StepView


class TorchMamba2(StateBackend[LinearBuffers, LinearPlan, Mamba2Inputs]):
    """A state is [value_heads, key_dim, value_dim]: Mamba's own, transposed."""

    kind = MAMBA2
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

    def extend(self, inputs: Mamba2Inputs, layer: StateLayer, plan: LinearPlan) -> Tensor:
        """[padded_tokens, value_heads, value_dim] in the dtype of the inputs."""
        shape = plan.shape
        mixed = convolve(inputs.xbc, inputs.conv_weight, inputs.conv_bias, layer, plan)
        x, b, c = mixed.split((shape.value_size, shape.key_size, shape.key_size), dim=1)
        heads = (-1, shape.key_heads, shape.key_dim)
        x = x.reshape(-1, shape.value_heads, shape.value_dim).float()
        rows = StateRows(
            q=c.reshape(heads),
            k=b.reshape(heads),
            v=x * inputs.dt.unsqueeze(2),
            decay=inputs.decay,
            beta=None,
        )
        out: Tensor = extend_states(rows, layer, plan) + x * inputs.skip.float().unsqueeze(1)
        return out.to(inputs.xbc.dtype)

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
