"""The `flashinfer` backend: the library's paged kernels, planned on the host from exact lengths.

Lengths go to the device with the library's own plan; page ids are derived there.  One class of
wrapper reads the cache in every step: on tensor cores the library's decode is its prefill kernel
with one row.  A tree is its prefix and, under a mask of bits, its own rows, merged by log-sum-exp.
"""

import importlib
import importlib.util
import math
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from paceline.attention.backends.flashinfer_session import (
    KEPT_SHAPES,
    RECORDED_SHAPES,
    Wrappers,
    WrapperSession,
)
from paceline.attention.backends.flashinfer_tree import LN2, TreeRows, as_cached
from paceline.attention.backends.flashinfer_wrappers import (
    HostLens,
    StepShape,
    constants,
    rings_bytes,
    unplanned,
    workspace_bytes,
)
from paceline.attention.contract import (
    AttentionBackend,
    AttentionConfig,
    Capabilities,
    GraphSupport,
    LayerCache,
    Limits,
    Part,
)
from paceline.attention.held import OPAQUE, tensor_bytes
from paceline.attention.layouts.csr import (
    CsrBuffers,
    CsrPlan,
    csr_lens,
    derive_lists,
    make_csr_buffers,
)
from paceline.core.modes import MaskKind
from paceline.core.step import Step
from paceline.kernels.step_view import StepView

MODULE = "flashinfer"
# Below it, in natural log, no key is visible: the library's infinity is 5e4 in base 2 (math.cuh).
LEAST_LSE = -3e4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlashInferBuffers:
    """Everything whose address a graph may hold, at its largest, and the wrappers bound to it."""

    limits: Limits = field(metadata=OPAQUE)
    workspace: Tensor  # [workspace_bytes]  uint8  partial results of one kernel
    qo_indptr: Tensor  # [max_reqs + 1]  int32  the library's copy of the step's cu_seqlens_q
    everything: CsrBuffers  # of Part.ALL
    prefix: CsrBuffers  # of Part.PREFIX
    session: WrapperSession = field(metadata=OPAQUE)

    def csr(self, part: Part) -> CsrBuffers:
        """The lists of one part's keys."""
        return self.prefix if part is Part.PREFIX else self.everything


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlashInferPlan:
    """The wrappers a step runs, by the part it asks for, and what they read."""

    wrappers: dict[Part, Wrappers]
    lists: tuple[CsrPlan, ...]  # of each part and group
    locs: tuple[Tensor, ...]  # [num_groups] of [padded_tokens]  int64  slots the step wrote

    @property
    def tree(self) -> TreeRows | None:
        """The step's own rows, if it is a tree that needs no cascade."""
        prefix = self.wrappers.get(Part.PREFIX)
        return None if prefix is None else prefix.tree


@dataclass(frozen=True)
class FlashInferBackend(AttentionBackend[FlashInferBuffers, FlashInferPlan]):
    """Causal steps, trees and prefixes of either; with windows, trees need a cascade.

    library: the module flashinfer, or one with its classes; None imports it when it is needed.
    """

    library: Any = None
    name = "flashinfer"
    capabilities = Capabilities(
        device_types=frozenset({"cuda"}),
        min_cuda_arch=(8, 0),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        kv_dtypes=frozenset({torch.bfloat16, torch.float16, torch.float8_e4m3fn}),
        page_sizes=None,
        head_dims=frozenset({64, 128, 256}),
        v_head_dim_differs=False,  # it wants equal strides of K and V
        masks=frozenset({MaskKind.CAUSAL, MaskKind.TREE}),
        window=True,
        soft_cap=True,
        sinks=True,
        returns_lse=True,
        graph=GraphSupport.ALWAYS,
        host_plan=True,
        loads_dead_slots=True,  # those before a window
        tree_windows=False,  # it counts a window by rows, a tree by depth
    )
    kept_fields = frozenset({"page_range"})

    def unsupported_reasons(self, config: AttentionConfig) -> list[str]:
        """Capabilities, and whether the library is there when planning for this machine."""
        reasons = super().unsupported_reasons(config)
        is_here = config.device_type == "cuda" and torch.cuda.is_available()
        if is_here and importlib.util.find_spec(MODULE) is None:
            reasons.append(f"{MODULE} must be installed, got no such package")
        return reasons

    def make_buffers(self, limits: Limits) -> FlashInferBuffers:
        """Workspace and lists for the largest step; wrappers come with the steps' shapes."""
        device, library = limits.device, self.library or importlib.import_module(MODULE)
        workspace = torch.empty(workspace_bytes(limits), dtype=torch.uint8, device=device)
        qo_indptr = torch.zeros(limits.max_reqs + 1, dtype=torch.int32, device=device)
        return FlashInferBuffers(
            limits=limits,
            workspace=workspace,
            qo_indptr=qo_indptr,
            everything=make_csr_buffers(limits),
            prefix=make_csr_buffers(limits),
            session=WrapperSession(library, limits, workspace=workspace, qo_indptr=qo_indptr),
        )

    def buffer_bytes(self, limits: Limits) -> int:
        """What make_buffers allocates, which needs no library for it, and the wrappers' own."""
        standing = tensor_bytes(replace(self, library=MODULE).make_buffers(limits))
        return standing + (KEPT_SHAPES + RECORDED_SHAPES) * rings_bytes(limits)

    def host_plan(self, step: Step, buffers: FlashInferBuffers) -> None:
        """Plan each part the step may ask for; makes the wrappers of a new shape."""
        layout, page_size = step.layout, buffers.limits.page_size
        qo_indptr = torch.tensor([0, *accumulate(layout.extend_lens)], dtype=torch.int32)
        for part in buffers.limits.parts(step.mask):
            shape = StepShape(part, step.mask, layout.num_reqs, layout.num_tokens)
            kv_lens = step.prefix_lens_bound if part is Part.PREFIX else step.kv_lens_bound
            lens = HostLens(
                qo_indptr=qo_indptr,
                csr=csr_lens(kv_lens, page_size),
                max_extend_len=max(layout.extend_lens),
            )
            buffers.session.plan(shape, step.epoch, lens, buffers.csr(part))

    def plan(self, view: StepView, buffers: FlashInferBuffers) -> FlashInferPlan:
        """The page ids of every part that was planned for this shape, and a tree's mask."""
        planned: dict[Part, Wrappers] = {}
        lists: list[CsrPlan] = []
        for part in buffers.limits.parts(view.mask):
            shape = StepShape(part, view.mask, view.padded_reqs, view.padded_tokens)
            wrappers = buffers.session.planned(shape)
            if wrappers is not None:
                planned[part] = wrappers
                csr = buffers.csr(part)
                lists += derive_lists(view, csr, is_prefix=part is Part.PREFIX)
        plan = FlashInferPlan(
            wrappers=planned,
            lists=tuple(lists),
            locs=tuple(group.out_cache_loc for group in view.groups),
        )
        if plan.tree is not None:
            assert view.tree_mask is not None, "a tree step carries a tree mask"
            plan.tree.mask.pack(view.tree_mask)
        return plan

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: LayerCache, plan: FlashInferPlan, part: Part
    ) -> tuple[Tensor, Tensor | None]:
        """See AttentionBackend.forward; lse comes with Part.PREFIX, with sinks and with trees."""
        spec, sinks = constants(layer.spec), layer.sinks
        tree = plan.tree if part is Part.ALL else None
        paged = plan.wrappers.get(part if tree is None else Part.PREFIX)
        ring = None if paged is None else paged.rings.get(spec)
        if ring is None:
            raise unplanned(part, layer.spec)
        # The library takes scales as Python numbers; ours are on the device.
        if layer.k_scale is not None:
            q = (q * layer.k_scale).to(q.dtype)
        out = q.new_empty(q.shape[0], spec.num_heads, spec.v_head_dim)
        lse = None
        if part is Part.PREFIX or sinks is not None or tree is not None:
            lse = torch.empty(out.shape[:2], dtype=torch.float32, device=q.device)
        ring.run(q, layer.k_cache, layer.v_cache, out=out, lse=lse)
        if lse is not None:
            lse.mul_(LN2)  # the library's is base 2
            lse.masked_fill_(lse < LEAST_LSE, -math.inf)
            if tree is not None:
                k, v = as_cached(k, v, layer, plan.locs[spec.group])
                tree.add_to(out, lse, q, k, v, spec=spec, sinks=sinks)
            elif part is Part.ALL and sinks is not None:
                # e^lse / (e^lse + e^sink): these kernels have no sinks of their own
                out.mul_(torch.sigmoid(lse - sinks).unsqueeze(-1))
        if layer.v_scale is not None:
            out.mul_(layer.v_scale)
        return out, lse
