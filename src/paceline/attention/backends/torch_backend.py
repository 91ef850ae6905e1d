"""The `torch` backend: readable, device-independent in meaning, and the CPU's production path."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from paceline.attention.contract import (
    AttentionBackend,
    Capabilities,
    GraphSupport,
    LayerCache,
    Limits,
    Part,
    StepView,
)
from paceline.attention.layouts.page_table import PageTablePlan, page_table_plan
from paceline.core.modes import MaskKind
from paceline.kernels.paged_attention_cpu import paged_attention_cpu


class TorchBackend(AttentionBackend):
    """Attention on the CPU through one opaque operator; every mask, window and soft cap."""

    name: ClassVar[str] = "torch"
    capabilities: ClassVar[Capabilities] = Capabilities(
        device_types=frozenset({"cpu"}),
        min_cuda_arch=None,
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        page_sizes=None,
        head_dims=None,
        v_head_dim_differs=True,
        masks=frozenset({MaskKind.CAUSAL, MaskKind.TREE, MaskKind.FULL}),
        window=True,
        soft_cap=True,
        returns_lse=True,
        graph=GraphSupport.ALWAYS,
        host_plan=False,
    )

    def make_buffers(self, limits: Limits) -> None:
        """Nothing: the operator reads the step's own tensors."""

    def plan(self, view: StepView, buffers: Any) -> PageTablePlan:
        """The page-table layout as derived."""
        return page_table_plan(view)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: LayerCache, plan: PageTablePlan, part: Part
    ) -> tuple[Tensor, Tensor | None]:
        """See AttentionBackend.forward; lse comes with Part.PREFIX."""
        spec = layer.spec
        return paged_attention_cpu(
            q,
            layer.k_cache,
            layer.v_cache,
            plan.page_tables[spec.group],
            plan.prefix_lens,
            plan.cu_seqlens_q,
            mask=plan.mask,
            tree_mask=plan.tree_mask,
            scale=spec.scale,
            window=spec.window,
            soft_cap=spec.soft_cap,
            prefix_only=part is Part.PREFIX,
            wants_lse=part is Part.PREFIX,
        )
