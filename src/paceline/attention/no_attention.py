"""NoAttention: the backend of a model none of whose layers attend."""

import torch
from torch import Tensor

from paceline.attention.contract import (
    AttentionBackend,
    AttentionConfig,
    Capabilities,
    GraphSupport,
    LayerCache,
    Limits,
    Part,
)
from paceline.attention.names import NO_ATTENTION
from paceline.core.modes import MaskKind
from paceline.kernels.step_view import StepView

_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


class NoAttention(AttentionBackend[None, None]):
    """Allocates nothing, plans nothing, and nobody asks it to attend."""

    name = NO_ATTENTION
    capabilities = Capabilities(
        device_types=frozenset({"cpu", "cuda"}),
        min_cuda_arch=None,
        dtypes=_DTYPES,
        kv_dtypes=_DTYPES | {torch.float8_e4m3fn},
        page_sizes=None,
        head_dims=None,
        v_head_dim_differs=True,
        masks=frozenset(MaskKind),
        window=True,
        soft_cap=True,
        sinks=True,
        returns_lse=False,
        graph=GraphSupport.ALWAYS,
        host_plan=False,
    )

    def unsupported_reasons(self, config: AttentionConfig) -> list[str]:
        """It serves layers that do not attend."""
        return ["it attends to nothing, and layers of the model attend"]

    def make_buffers(self, limits: Limits) -> None:
        return None

    def plan(self, view: StepView, buffers: None) -> None:
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: LayerCache, plan: None, part: Part
    ) -> tuple[Tensor, Tensor | None]:
        raise AssertionError(f"layer {layer.spec.layer_id} attends, and there is no attention")
