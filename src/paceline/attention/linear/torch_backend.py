"""What the backends of linear attention in plain torch share: all but how inputs become rows."""

import torch
from torch import Tensor

from paceline.attention.contract import GraphSupport
from paceline.attention.linear.rows import LinearBackend, LinearBuffers, commit_rows
from paceline.attention.states import Inputs, StateCapabilities, StateLayer
from paceline.core.modes import MaskKind
from paceline.kernels.step_view import GroupView, StepView


class TorchLinear(LinearBackend[Inputs]):
    """A kind adds `kind` and `extend`."""

    name = "torch"
    capabilities = StateCapabilities(
        device_types=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        masks=frozenset({MaskKind.CAUSAL, MaskKind.TREE}),
        graph=GraphSupport.ALWAYS,
    )

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
