"""The `flashinfer` backend: the library's paged kernels, planned on the host from exact lengths.

Lengths go to the device with the library's own plan; page ids are derived there.  One class of
wrapper reads the cache in every step: on tensor cores the library's decode is its prefill kernel
with one row.  A tree is its prefix and, under a mask of bits, its own rows, merged by log-sum-exp.
"""

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

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
    MODULE,
    HostLens,
    KeyLists,
    StepShape,
    absence,
    constants,
    rings_bytes,
    unplanned,
    workspace_bytes,
)
from paceline.attention.contract import (
    AttentionBackend,
    AttentionConfig,
    Capabilities,
    ChunkSupport,
    GraphSupport,
    LayerCache,
    Limits,
    Part,
)
from paceline.attention.held import OPAQUE, tensor_bytes
from paceline.attention.keyless import blank_keyless_
from paceline.attention.layouts.chunks import (
    chunk_limits,
    chunk_tables,
    cut_lens,
    lacks_prefix,
    most_virtual,
    without_chunks,
)
from paceline.attention.layouts.csr import (
    CsrPlan,
    csr_lens,
    derive_lists,
    group_tables,
    make_csr_buffers,
)
from paceline.core.model.lookback import Chunk
from paceline.core.modes import MaskKind
from paceline.core.step import Step
from paceline.kernels.step_view import StepView

# Below it, in natural log, no key is visible: the library's infinity is 5e4 in base 2 (math.cuh).
LEAST_LSE = -3e4


class Calls(NamedTuple):
    """The calls of a step that share lists of keys."""

    part: Part
    chunk: Chunk | None  # of their layers; None: of those without

    def shape(self, mask: MaskKind, reqs: int, tokens: int) -> StepShape:
        """Of a step of so many requests: where chunks cut it, of virtual ones."""
        if self.chunk is not None and self.part is Part.ALL:
            reqs = most_virtual(reqs, tokens, self.chunk)
        return StepShape(self.part, mask, reqs, tokens, self.chunk)

    def lens(self, step: Step) -> tuple[Sequence[int], Sequence[int]]:
        """([requests of the shape] tokens, as many keys) by what the host knows."""
        extends, prefixes = step.layout.extend_lens, step.prefix_lens_bound
        if self.chunk is None:
            return extends, prefixes if self.part is Part.PREFIX else step.kv_lens_bound
        if self.part is Part.PREFIX:
            return extends, [prefix % self.chunk.size for prefix in prefixes]
        tokens, keys = zip(*cut_lens(prefixes, extends, self.chunk), strict=True)
        return tokens, keys

    def tables(self, view: StepView, limits: Limits, lists: KeyLists) -> dict[int, Tensor]:
        """[requests of the shape, pages] int32, by group: the view's, or where chunks begin.

        Virtual requests are those that were planned: a row that the device froze since has others.
        """
        if self.chunk is None:
            return group_tables(view, lists.csr)
        most = self.shape(view.mask, view.padded_reqs, view.padded_tokens).reqs
        cuts = None if self.part is Part.PREFIX else lists.qo_indptr[: most + 1]
        return chunk_tables(view, limits, self.chunk, cuts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlashInferBuffers:
    """Everything whose address a graph may hold, at its largest, and the wrappers bound to it."""

    limits: Limits = field(metadata=OPAQUE)
    workspace: Tensor  # [workspace_bytes]  uint8  partial results of one kernel
    lists: dict[Calls, KeyLists]
    session: WrapperSession = field(metadata=OPAQUE)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlashInferPlan:
    """The wrappers a step runs, by what they are for, and what they read."""

    wrappers: dict[Calls, Wrappers]
    lists: tuple[CsrPlan, ...]  # of each part and group
    locs: tuple[Tensor, ...]  # [num_groups] of [padded_tokens]  int64  slots the step wrote
    lacks_prefix: dict[Calls, Tensor]  # [padded_tokens]  bool  the token's chunk has no key of it

    @property
    def tree(self) -> TreeRows | None:
        """The step's own rows, if it is a tree that needs no cascade."""
        prefix = self.wrappers.get(Calls(Part.PREFIX, None))
        return None if prefix is None else prefix.tree


@dataclass(frozen=True)
class FlashInferBackend(AttentionBackend[FlashInferBuffers, FlashInferPlan]):
    """Causal steps, trees and prefixes of either; with windows or chunks, trees need a cascade.

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
        chunks=ChunkSupport.WHOLE_PAGES,
    )
    kept_fields = frozenset({"page_range"})

    def unsupported_reasons(self, config: AttentionConfig) -> list[str]:
        """Capabilities, and whether the library is there when planning for this machine."""
        return super().unsupported_reasons(config) + absence(config.device_type)

    def make_buffers(self, limits: Limits) -> FlashInferBuffers:
        """Workspace and lists for the largest step; wrappers come with the steps' shapes."""
        device, library = limits.device, self.library or importlib.import_module(MODULE)
        workspace = torch.empty(workspace_bytes(limits), dtype=torch.uint8, device=device)
        lists: dict[Calls, KeyLists] = {}
        whole = _offsets(limits)
        for chunk in dict.fromkeys(spec.chunk for spec in limits.layers):
            within = without_chunks(limits) if chunk is None else chunk_limits(limits, chunk)
            cut = whole if chunk is None else _offsets(within)
            for part, offsets in ((Part.ALL, cut), (Part.PREFIX, whole)):
                csr = make_csr_buffers(within)
                lists[Calls(part, chunk)] = KeyLists(qo_indptr=offsets, csr=csr)
        return FlashInferBuffers(
            limits=limits,
            workspace=workspace,
            lists=lists,
            session=WrapperSession(library, limits, workspace=workspace),
        )

    def buffer_bytes(self, limits: Limits) -> int:
        """What make_buffers allocates, which needs no library for it, and the wrappers' own."""
        standing = tensor_bytes(replace(self, library=MODULE).make_buffers(limits))
        return standing + (KEPT_SHAPES + RECORDED_SHAPES) * rings_bytes(limits)

    def host_plan(self, step: Step, buffers: FlashInferBuffers) -> None:
        """Plan each part the step may ask for; makes the wrappers of a new shape."""
        layout, limits = step.layout, buffers.limits
        for calls, lists in buffers.lists.items():
            if calls.part in limits.parts(step.mask):
                extends, kv_lens = calls.lens(step)
                lens = HostLens(
                    qo_indptr=torch.tensor([0, *accumulate(extends)], dtype=torch.int32),
                    csr=csr_lens(kv_lens, limits.page_size),
                    max_extend_len=max(extends),
                )
                shape = calls.shape(step.mask, layout.num_reqs, layout.num_tokens)
                buffers.session.plan(shape, step.epoch, lens, lists)

    def plan(self, view: StepView, buffers: FlashInferBuffers) -> FlashInferPlan:
        """The page ids of every part that was planned for this shape, and a tree's mask."""
        planned: dict[Calls, Wrappers] = {}
        found: list[CsrPlan] = []
        lacks: dict[Calls, Tensor] = {}
        limits = buffers.limits
        for calls, lists in buffers.lists.items():
            shape = calls.shape(view.mask, view.padded_reqs, view.padded_tokens)
            is_asked = calls.part in limits.parts(view.mask)
            wrappers = buffers.session.planned(shape) if is_asked else None
            if wrappers is not None:
                planned[calls] = wrappers
                csr, is_prefix = lists.csr, calls.part is Part.PREFIX
                tables = calls.tables(view, limits, lists)
                found += derive_lists(tables, csr, is_prefix=is_prefix, chunk=calls.chunk)
                if calls.chunk is not None and is_prefix:
                    lacks[calls] = lacks_prefix(view, calls.chunk)
        plan = FlashInferPlan(
            wrappers=planned,
            lists=tuple(found),
            locs=tuple(group.out_cache_loc for group in view.groups),
            lacks_prefix=lacks,
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
        calls = Calls(part if tree is None else Part.PREFIX, spec.chunk)
        paged = plan.wrappers.get(calls)
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
            blank_keyless_(out, lse, plan.lacks_prefix.get(calls))
            if tree is not None:
                k, v = as_cached(k, v, layer, plan.locs[spec.group])
                tree.add_to(out, lse, q, k, v, spec=spec, sinks=sinks)
            elif part is Part.ALL and sinks is not None:
                # e^lse / (e^lse + e^sink): these kernels have no sinks of their own
                out.mul_(torch.sigmoid(lse - sinks).unsqueeze(-1))
        if layer.v_scale is not None:
            out.mul_(layer.v_scale)
        return out, lse


def _offsets(limits: Limits) -> Tensor:
    """[max_reqs + 1] int32."""
    return torch.zeros(limits.max_reqs + 1, dtype=torch.int32, device=limits.device)
