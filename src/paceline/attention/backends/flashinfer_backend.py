"""The `flashinfer` backend: the library's paged kernels, planned on the host from exact lengths.

Lengths go to the device with the library's own plan; page ids are derived there.  One class of
wrapper serves every step: on tensor cores the library's decode is its prefill kernel with one row.
"""

import importlib
import importlib.util
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor

from paceline.attention.backends.flashinfer_wrappers import (
    SMALLEST_TILE,
    HostLens,
    StepShape,
    WrapperRing,
    constants,
    distinct_constants,
    window_left,
    workspace_bytes,
)
from paceline.attention.contract import (
    AttentionBackend,
    AttentionConfig,
    AttentionSpec,
    Capabilities,
    GraphSupport,
    LayerCache,
    Limits,
    Part,
    StepView,
)
from paceline.attention.layouts.csr import CsrBuffers, csr_lens, derive_indices, make_csr_buffers
from paceline.core.errors import KernelArgumentError, message
from paceline.core.modes import MaskKind
from paceline.core.step import Step

MODULE = "flashinfer"
LN2 = 0.6931471805599453
KEPT_SHAPES = 64  # that no graph holds; more than steps in flight

Rings = dict[AttentionSpec, WrapperRing]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlashInferBuffers:
    """Everything whose address a graph may hold, at its largest, and the wrappers bound to it."""

    limits: Limits
    library: Any
    workspace: Tensor  # [workspace_bytes]  uint8  partial results of one kernel
    qo_indptr: Tensor  # [max_reqs + 1]  int32  the library's copy of the step's cu_seqlens_q
    everything: CsrBuffers  # of Part.ALL
    prefix: CsrBuffers  # of Part.PREFIX
    rings: dict[StepShape, Rings]  # made by a host plan; the shape planned longest ago comes first
    recorded: set[StepShape]  # shapes whose wrappers a graph may hold

    def csr(self, part: Part) -> CsrBuffers:
        """The lists of one part's keys."""
        return self.prefix if part is Part.PREFIX else self.everything


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlashInferPlan:
    """The wrappers a step runs, by the part it asks for and the layer's constants."""

    rings: dict[Part, Rings]


class FlashInferBackend(AttentionBackend):
    """Causal steps and prefixes of any of them; trees come by way of the prefix.

    library: the module flashinfer, or one with its classes; None imports it when it is needed.
    """

    name: ClassVar[str] = "flashinfer"
    capabilities: ClassVar[Capabilities] = Capabilities(
        device_types=frozenset({"cuda"}),
        min_cuda_arch=(8, 0),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        kv_dtypes=frozenset({torch.bfloat16, torch.float16, torch.float8_e4m3fn}),
        page_sizes=None,
        head_dims=frozenset({64, 128, 256}),
        v_head_dim_differs=False,  # it wants equal strides of K and V
        masks=frozenset({MaskKind.CAUSAL}),
        window=True,
        soft_cap=True,
        sinks=True,
        returns_lse=True,
        graph=GraphSupport.ALWAYS,
        host_plan=True,
        loads_dead_slots=True,  # those before a window
    )
    kept_fields: ClassVar[frozenset[str]] = frozenset({"page_range"})

    def __init__(self, library: Any = None) -> None:
        self._library = library

    @classmethod
    def unsupported_reasons(cls, config: AttentionConfig) -> list[str]:
        """Capabilities, and whether the library is there when planning for this machine."""
        reasons = super().unsupported_reasons(config)
        is_here = config.device_type == "cuda" and torch.cuda.is_available()
        if is_here and importlib.util.find_spec(MODULE) is None:
            reasons.append(f"{MODULE} must be installed, got no such package")
        return reasons

    def make_buffers(self, limits: Limits) -> FlashInferBuffers:
        """Workspace and lists for the largest step; wrappers come with the steps' shapes."""
        device = limits.device
        return FlashInferBuffers(
            limits=limits,
            library=self._library or importlib.import_module(MODULE),
            workspace=torch.empty(workspace_bytes(limits), dtype=torch.uint8, device=device),
            qo_indptr=torch.zeros(limits.max_reqs + 1, dtype=torch.int32, device=device),
            everything=make_csr_buffers(limits),
            prefix=make_csr_buffers(limits),
            rings={},
            recorded=set(),
        )

    def host_plan(self, step: Step, buffers: FlashInferBuffers) -> None:
        """Plan each part the step may ask for; makes the wrappers of a new shape."""
        layout, page_size = step.layout, buffers.limits.page_size
        qo_indptr = torch.tensor([0, *accumulate(layout.extend_lens)], dtype=torch.int32)
        for part in _parts(step):
            kv_lens = step.prefix_lens_bound if part is Part.PREFIX else step.kv_lens_bound
            lens = HostLens(
                qo_indptr=qo_indptr,
                csr=csr_lens(kv_lens, page_size),
                max_extend_len=max(layout.extend_lens),
            )
            shape = StepShape(part, step.mask, layout.num_reqs, layout.num_tokens)
            rings = buffers.rings.pop(shape, None)
            if rings is None:
                _forget_oldest(buffers)
                rings = _make_rings(buffers, shape)
                for ring in rings.values():
                    ring.plan_first(lens)
            else:
                for ring in rings.values():
                    ring.plan(step.epoch, lens)
            buffers.rings[shape] = rings

    def plan(self, view: StepView, buffers: FlashInferBuffers) -> FlashInferPlan:
        """The page ids of every part that was planned for this shape."""
        planned: dict[Part, Rings] = {}
        for part in Part:
            shape = StepShape(part, view.mask, view.padded_reqs, view.padded_tokens)
            rings = buffers.rings.get(shape)
            if rings is None:
                continue
            planned[part] = rings
            if may_be_recorded(buffers.limits.device):
                buffers.recorded.add(shape)
            csr = buffers.csr(part)
            indptr = csr.kv_indptr[: view.padded_reqs + 1]
            for group, out in zip(view.groups, csr.kv_indices, strict=True):
                derive_indices(indptr, group.page_table, csr.page_range, out)
        return FlashInferPlan(rings=planned)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: LayerCache, plan: FlashInferPlan, part: Part
    ) -> tuple[Tensor, Tensor | None]:
        """See AttentionBackend.forward; lse comes with Part.PREFIX and with sinks."""
        ring = plan.rings.get(part, {}).get(constants(layer.spec))
        if ring is None:
            raise _unplanned(part, layer.spec)
        # The library takes scales as Python numbers; ours are on the device.
        if layer.k_scale is not None:
            q = (q * layer.k_scale).to(q.dtype)
        out = q.new_empty(q.shape[0], layer.spec.num_heads, layer.spec.v_head_dim)
        lse = None
        if part is Part.PREFIX or layer.sinks is not None:
            lse = torch.empty(
                q.shape[0], layer.spec.num_heads, dtype=torch.float32, device=q.device
            )
        ring.run(q, layer.k_cache, layer.v_cache, out=out, lse=lse)
        if layer.v_scale is not None:
            out.mul_(layer.v_scale)
        if lse is None:
            return out, None
        lse.mul_(LN2)  # the library's is base 2
        if part is Part.ALL and layer.sinks is not None:
            # e^lse / (e^lse + e^sink): these kernels have no sinks of their own
            out.mul_(torch.sigmoid(lse - layer.sinks).unsqueeze(-1))
        return out, lse


def may_be_recorded(device: torch.device) -> bool:
    """Whether a graph may be recording; on a CPU there is no way to tell."""
    return device.type != "cuda" or torch.cuda.is_current_stream_capturing()


def _forget_oldest(buffers: FlashInferBuffers) -> None:
    """Make room for a shape: unpadded steps have a new one each."""
    loose = [shape for shape in buffers.rings if shape not in buffers.recorded]
    if len(loose) >= KEPT_SHAPES:
        del buffers.rings[loose[0]]


def _parts(step: Step) -> tuple[Part, ...]:
    """What may be asked of a step: of a tree the prefix alone; of a chain that might have been a
    tree either part."""
    if step.mask is MaskKind.TREE:
        return (Part.PREFIX,)
    if step.mode.facts.mask is MaskKind.TREE:
        return (Part.ALL, Part.PREFIX)
    return (Part.ALL,)


def _make_rings(buffers: FlashInferBuffers, shape: StepShape) -> Rings:
    """A ring for every set of layer constants whose window the library can say."""
    rings: Rings = {}
    for spec in distinct_constants(buffers.limits.layers):
        left = window_left(spec, shape)
        if left is not None:
            rings[spec] = WrapperRing(
                buffers.library,
                buffers.limits,
                spec=spec,
                shape=shape,
                window_left=left,
                workspace=buffers.workspace,
                qo_indptr=buffers.qo_indptr,
                csr=buffers.csr(shape.part),
            )
    return rings


def _unplanned(part: Part, spec: AttentionSpec) -> KernelArgumentError:
    return KernelArgumentError(
        message(
            "flashinfer forward",
            expected="a part and layer constants of the step's host plan",
            got=f"{part} with window {spec.window}",
            remedy="call host_plan before plan; a window over the prefix alone must be longer than "
            f"a request's rows, which are at most {SMALLEST_TILE}",
        )
    )
