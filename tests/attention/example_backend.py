"""A complete attention backend: one dense product of a step's queries with all its requests' keys.

It reads every key of every request and masks what a query may not see, so it is slow and short.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.attention.contract import (
    AttentionBackend,
    Capabilities,
    GraphSupport,
    LayerCache,
    Limits,
    Part,
)
from paceline.core.modes import MaskKind
from paceline.kernels.step_view import StepView


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DenseBuffers:
    """Everything whose address a graph may hold, at its largest."""

    key_positions: Tensor  # [max_keys]  int64  0, 1, 2, ...
    slots: Tensor  # [max_reqs * max_keys]  int64
    visible: Tensor  # [max_tokens * max_reqs * max_keys]  bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DensePlan:
    """Views one step may read; nothing assigns to it after `plan`."""

    slots: Tensor  # [padded_reqs * max_keys]  int64  slot of each request's key j
    visible: Tensor  # [padded_tokens, padded_reqs * max_keys]  bool


class DenseBackend(AttentionBackend[DenseBuffers, DensePlan]):
    """Causal attention of one cache group in plain torch, on any device."""

    name = "dense-example"
    capabilities = Capabilities(
        device_types=frozenset({"cpu", "cuda"}),
        min_cuda_arch=None,
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        kv_dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        page_sizes=None,
        head_dims=None,
        v_head_dim_differs=False,
        masks=frozenset({MaskKind.CAUSAL}),
        window=False,
        soft_cap=False,
        sinks=False,
        returns_lse=False,
        graph=GraphSupport.ALWAYS,
        host_plan=False,
        loads_dead_slots=True,
    )
    kept_fields = frozenset({"key_positions"})

    def make_buffers(self, limits: Limits) -> DenseBuffers:
        """Called once; `plan` cuts these to the size of a step."""
        max_keys = limits.max_pages[0] * limits.page_size

        def flat(size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=limits.device)

        return DenseBuffers(
            key_positions=torch.arange(max_keys, device=limits.device),
            slots=flat(limits.max_reqs * max_keys, torch.int64),
            visible=flat(limits.max_tokens * limits.max_reqs * max_keys, torch.bool),
        )

    def plan(self, view: StepView, buffers: DenseBuffers) -> DensePlan:
        """Device-only, static shapes, in place: the same call in eager, capture and replay."""
        page_table = view.groups[0].page_table  # [reqs, max_pages]
        reqs, max_pages = page_table.shape
        max_keys = buffers.key_positions.shape[0]
        page_size = max_keys // max_pages

        slots = buffers.slots[: reqs * max_keys]
        offsets = buffers.key_positions[:page_size]
        torch.add(
            (page_table.long() * page_size).unsqueeze(2),
            offsets,
            out=slots.view(reqs, max_pages, page_size),
        )

        visible = buffers.visible[: view.padded_tokens * reqs * max_keys]
        visible = visible.view(view.padded_tokens, reqs, max_keys)
        owner = torch.arange(reqs, device=slots.device) == view.req_ids.unsqueeze(1)
        is_past = buffers.key_positions <= view.positions.unsqueeze(1)  # [tokens, max_keys]
        torch.logical_and(owner.unsqueeze(2), is_past.unsqueeze(1), out=visible)
        return DensePlan(slots=slots, visible=visible.flatten(1))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: LayerCache, plan: DensePlan, part: Part
    ) -> tuple[Tensor, Tensor | None]:
        """One layer.  K and V of the step are in the cache already: k and v go unused here."""
        spec = layer.spec
        keys = layer.k_cache.flatten(0, 1).index_select(0, plan.slots).float()
        values = layer.v_cache.flatten(0, 1).index_select(0, plan.slots).float()
        # t token, k KV head, g query head of its group, s key, d head dim
        grouped = q.float().view(q.shape[0], spec.num_kv_heads, -1, spec.head_dim)
        scores = torch.einsum("tkgd,skd->tkgs", grouped, keys) * spec.scale
        hidden = ~plan.visible[:, None, None, :]
        weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1)
        return torch.einsum("tkgs,skd->tkgd", weights, values).flatten(1, 2).to(q.dtype), None
