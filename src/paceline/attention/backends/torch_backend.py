"""The `torch` backend: every mask and shape on the CPU, and the CPU's production path."""

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.attention.contract import (
    AttentionBackend,
    Capabilities,
    ChunkSupport,
    GraphSupport,
    LayerCache,
    Limits,
    Part,
)
from paceline.attention.layouts.page_table import PageTablePlan, page_table_plan
from paceline.attention.paged import attend_cpu, cache_of, weighing_of
from paceline.attention.step_rows import attend_step
from paceline.core.model.lookback import Lookback, most_visible
from paceline.core.modes import MaskKind
from paceline.kernels.paged_decode_cpu import decode_slots_cpu, paged_decode_cpu
from paceline.kernels.step_view import StepView


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupSlots:
    """Which slots a decode step reads in one cache group; see kernels.paged_decode_cpu."""

    window: Lookback | None
    page_size: int
    extents: Tensor  # [max_reqs, 2]  int64  each reach in keys; first slot of its run, or 0
    slots: Tensor  # [max_reqs * max reach]  int32
    bias: Tensor  # [max_reqs * max reach]  the cache's dtype


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TorchPlan:
    """The page-table layout, and for plain decode the slots of each group."""

    table: PageTablePlan
    groups: tuple[GroupSlots, ...] | None  # [num_groups]; None unless every row extends by one


@dataclass(frozen=True)
class TorchBackend(AttentionBackend[tuple[GroupSlots, ...], TorchPlan]):
    """Attention on the CPU through opaque operators; all that the contract can ask."""

    name = "torch"
    capabilities = Capabilities(
        device_types=frozenset({"cpu"}),
        min_cuda_arch=None,
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        kv_dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn}),
        page_sizes=None,
        head_dims=None,
        v_head_dim_differs=True,
        masks=frozenset({MaskKind.CAUSAL, MaskKind.TREE, MaskKind.FULL, MaskKind.BLOCK}),
        window=True,
        soft_cap=True,
        sinks=True,
        returns_lse=True,
        graph=GraphSupport.ALWAYS,
        host_plan=False,
        loads_dead_slots=False,
        scaled_latents=True,
        step_alone=True,
        chunks=ChunkSupport.ALWAYS,
    )

    def make_buffers(self, limits: Limits) -> tuple[GroupSlots, ...]:
        """Slot lists for the largest decode step of every group: [num_groups]."""
        made = []
        for width, window in zip(limits.max_pages, limits.windows, strict=True):
            reach = width * limits.page_size
            capacity = limits.max_reqs * min(most_visible(window) or reach, reach)
            made.append(
                GroupSlots(
                    window=window,
                    page_size=limits.page_size,
                    extents=torch.zeros(
                        limits.max_reqs, 2, dtype=torch.int64, device=limits.device
                    ),
                    slots=torch.zeros(capacity, dtype=torch.int32, device=limits.device),
                    bias=torch.zeros(capacity, dtype=limits.dtype, device=limits.device),
                )
            )
        return tuple(made)

    def plan(self, view: StepView, buffers: tuple[GroupSlots, ...]) -> TorchPlan:
        """The page-table layout as derived; in plain decode the slots to read, listed once."""
        table = page_table_plan(view)
        if view.max_extend_len != 1:
            return TorchPlan(table=table, groups=None)
        for group, page_table in zip(buffers, table.page_tables, strict=True):
            decode_slots_cpu(
                page_table,
                table.kv_lens,
                page_size=group.page_size,
                window=group.window,
                extents=group.extents,
                slots=group.slots,
                bias=group.bias,
            )
        return TorchPlan(table=table, groups=buffers)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: LayerCache, plan: TorchPlan, part: Part
    ) -> tuple[Tensor, Tensor | None]:
        """See AttentionBackend.forward; lse comes with Part.PREFIX and Part.STEP."""
        spec, table = layer.spec, plan.table
        if part is Part.STEP:
            return attend_step(q, k, v, layer, table)
        reads_rows = spec.soft_cap is None and layer.beside is None
        if plan.groups is not None and reads_rows and part is Part.ALL:
            group = plan.groups[spec.group]
            out = paged_decode_cpu(
                q,
                cache_of(layer),
                weighing_of(layer, part),
                extents=group.extents,
                slots=group.slots,
                bias=group.bias,
            )
            return out, None
        return attend_cpu(q, layer, table, part, wants_lse=part is Part.PREFIX)
