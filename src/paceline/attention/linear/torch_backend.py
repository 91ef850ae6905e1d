"""What the backends of linear attention in plain torch share: all but how inputs become rows."""

import torch
from torch import Tensor

from paceline.attention.contract import GraphSupport
from paceline.attention.linear.rows import (
    LinearBuffers,
    LinearPlan,
    commit_rows,
    linear_buffers,
    plan_rows,
)
from paceline.attention.states import (
    Inputs,
    StateBackend,
    StateCapabilities,
    StateLayer,
    StateLimits,
)
from paceline.core.modes import MaskKind
from paceline.kernels.step_view import GroupView, StepView


class TorchLinear(StateBackend[LinearBuffers, LinearPlan, Inputs]):
    """A kind adds `kind` and `extend`."""

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
