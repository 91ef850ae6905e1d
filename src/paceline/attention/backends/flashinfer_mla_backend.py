"""The `flashinfer_mla` backend: FlashInfer's kernels for latents, planned from exact lengths.

Facts of flashinfer-python 0.6.12 this relies on (mla/_core.py, attention/scheduler.cuh, MLAPlan):

* Outside of its graph mode a wrapper is bound to no number of requests.  It takes a list of page
  ids that is on the device already as it is, and reads it when the kernel runs.
* `plan` builds a schedule in one pinned tensor and copies it asynchronously to the wrapper's
  workspace.  Where in there a kernel looks is the same for every plan, and its grid follows from
  the step's requests and rows and the heads, whatever the lengths: a graph replays what was
  planned last.
* The schedule has room for MOST_WORKS units and nobody checks it.
"""

import importlib
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from paceline.attention.backends.flashinfer_wrappers import (
    ALIGNMENT,
    RING,
    StepShape,
    absence,
    constants,
    distinct_constants,
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
)
from paceline.attention.held import OPAQUE, tensor_bytes
from paceline.attention.layouts.csr import (
    CsrBuffers,
    CsrLens,
    CsrPlan,
    csr_lens,
    derive_lists,
    group_tables,
    make_csr_buffers,
)
from paceline.core.errors import ConfigError, KernelArgumentError
from paceline.core.modes import MaskKind
from paceline.core.step import Step
from paceline.kernels.stand_in import device_type, multiprocessors
from paceline.kernels.step_view import StepView

MODULE = "flashinfer.mla"
MOST_WORKS = 16384  # of a schedule: tiles of queries, and splits of their keys
TILE = 64  # query rows, heads counted; two of them beside each other where requests have more


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlashInferMLABuffers:
    """Everything whose address a graph may hold, at its largest, and the wrappers over it."""

    limits: Limits = field(metadata=OPAQUE)
    workspace: Tensor  # [bytes]  uint8  partial results of one kernel
    schedules: dict[str, Tensor]  # of each ring: [bytes]  uint8
    everything: CsrBuffers  # of Part.ALL
    prefix: CsrBuffers  # of Part.PREFIX
    rings: dict[str, "LatentRing"] = field(metadata=OPAQUE)  # by `_key`

    def csr(self, part: Part) -> CsrBuffers:
        """The lists of one part's keys."""
        return self.prefix if part is Part.PREFIX else self.everything


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlashInferMLAPlan:
    """The wrappers that were planned for this step, by `_key`, and the lists they read."""

    wrappers: dict[str, Any]
    lists: tuple[CsrPlan, ...]  # of each part and group


@dataclass(frozen=True)
class FlashInferMLABackend(AttentionBackend[FlashInferMLABuffers, FlashInferMLAPlan]):
    """Causal attention over latents, and the prefix alone with lse.

    library: the module flashinfer.mla, or one with its wrapper; None imports it when it is needed.
    """

    library: Any = None
    name = "flashinfer_mla"
    capabilities = Capabilities(
        device_types=frozenset({"cuda"}),
        min_cuda_arch=(8, 0),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        kv_dtypes=frozenset({torch.bfloat16, torch.float16}),
        page_sizes=None,
        head_dims=frozenset(),
        v_head_dim_differs=False,
        masks=frozenset({MaskKind.CAUSAL}),
        window=False,
        soft_cap=False,
        sinks=False,
        returns_lse=True,
        graph=GraphSupport.ALWAYS,
        host_plan=True,
        loads_dead_slots=True,
        latent_dims=frozenset({(512, 64)}),
    )
    kept_fields = frozenset({"page_range"})

    def unsupported_reasons(self, config: AttentionConfig) -> list[str]:
        """Capabilities, and whether the library is there when planning for this machine."""
        return super().unsupported_reasons(config) + absence(config.device_type)

    def make_buffers(self, limits: Limits) -> FlashInferMLABuffers:
        """Workspace, schedules and lists for the largest step, and the wrappers over them.

        Raises ConfigError for steps of which a schedule could outgrow its room.
        """
        _require_room(limits)
        device, library = limits.device, self.library or importlib.import_module(MODULE)
        sms = multiprocessors(device)
        rank = max(spec.v_head_dim for spec in limits.layers)
        # Each multiprocessor's two tiles: 16-bit sums of a query's columns, and its lse.
        workspace = _bytes(2 * sms * TILE * (2 * rank + 4) + 2 * ALIGNMENT, device)
        # Nine lists of units of work, five of what each multiprocessor merges.
        schedule_bytes = 4 * (9 * MOST_WORKS + 5 * sms) + 14 * ALIGNMENT
        csrs = {part: make_csr_buffers(limits) for part in (Part.ALL, Part.PREFIX)}
        schedules, rings = {}, {}
        for spec in distinct_constants(limits.layers):
            for part in (Part.ALL, Part.PREFIX):
                key = _key(part, spec)
                schedules[key] = _bytes(schedule_bytes, device)
                rings[key] = LatentRing(
                    library,
                    limits,
                    spec=spec,
                    part=part,
                    workspace=workspace,
                    schedule=schedules[key],
                    kv_indices=csrs[part].kv_indices[spec.group],
                )
        return FlashInferMLABuffers(
            limits=limits,
            workspace=workspace,
            schedules=schedules,
            everything=csrs[Part.ALL],
            prefix=csrs[Part.PREFIX],
            rings=rings,
        )

    def buffer_bytes(self, limits: Limits) -> int:
        """What make_buffers allocates, which needs no library for it."""
        return tensor_bytes(replace(self, library=MODULE).make_buffers(limits))

    def host_plan(self, step: Step, buffers: FlashInferMLABuffers) -> None:
        """Plan each part the step may ask for, with the wrapper whose turn it is."""
        layout, limits = step.layout, buffers.limits
        qo_indptr = torch.tensor([0, *accumulate(layout.extend_lens)], dtype=torch.int32)
        for part in limits.parts(step.mask):
            csr = buffers.csr(part)
            kv_lens = step.prefix_lens_bound if part is Part.PREFIX else step.kv_lens_bound
            lens, host_lens = (
                csr_lens(kv_lens, limits.page_size),
                torch.tensor(kv_lens, dtype=torch.int32),
            )
            csr.kv_indptr[: layout.num_reqs + 1].copy_(lens.kv_indptr, non_blocking=True)
            csr.last_page_len[: layout.num_reqs].copy_(lens.last_page_len, non_blocking=True)
            shape = StepShape(part, step.mask, layout.num_reqs, layout.num_tokens)
            for spec in distinct_constants(limits.layers):
                buffers.rings[_key(part, spec)].plan(step.epoch, shape, qo_indptr, host_lens, lens)

    def plan(self, view: StepView, buffers: FlashInferMLABuffers) -> FlashInferMLAPlan:
        """The page ids of every part that was planned for this step."""
        wrappers: dict[str, Any] = {}
        lists: list[CsrPlan] = []
        for part in buffers.limits.parts(view.mask):
            shape = StepShape(part, view.mask, view.padded_reqs, view.padded_tokens)
            for spec in distinct_constants(buffers.limits.layers):
                key = _key(part, spec)
                planned = buffers.rings[key].planned
                if planned is not None and planned[0] == shape:
                    wrappers[key] = planned[1]
            csr = buffers.csr(part)
            lists += derive_lists(group_tables(view, csr), csr, is_prefix=part is Part.PREFIX)
        return FlashInferMLAPlan(wrappers=wrappers, lists=tuple(lists))

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: LayerCache,
        plan: FlashInferMLAPlan,
        part: Part,
    ) -> tuple[Tensor, Tensor | None]:
        """See AttentionBackend.forward; lse comes with Part.PREFIX."""
        spec = layer.spec
        wrapper = plan.wrappers.get(_key(part, constants(spec)))
        if wrapper is None:
            raise KernelArgumentError.about(
                "flashinfer_mla forward",
                expected="a part and layer constants of the step's host plan",
                got=str(part),
                remedy="call host_plan before plan",
            )
        rank, rows = spec.v_head_dim, layer.k_cache.squeeze(2)
        out = q.new_empty(*q.shape[:2], rank)
        lse = None
        if part is Part.PREFIX:
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        wrapper.run(
            q[..., :rank],
            q[..., rank:],
            rows[..., :rank],
            rows[..., rank:],
            out=out,
            lse=lse,
            return_lse=lse is not None,
            return_lse_base_on_e=True,
        )
        return out, lse


class LatentRing:
    """The wrappers of one set of layer constants and one part of the keys.

    They take turns in planning, each with pinned memory of its own, and share every device buffer.
    """

    def __init__(
        self,
        library: Any,
        limits: Limits,
        *,
        spec: AttentionSpec,
        part: Part,
        workspace: Tensor,
        schedule: Tensor,
        kv_indices: Tensor,
    ) -> None:
        """workspace, schedule: [bytes] uint8; kv_indices: [most pages] int32."""
        self.planned: tuple[StepShape, Any] | None = None  # last, and by which wrapper
        self._library = library
        self._limits = limits
        self._spec = spec
        self._is_causal = part is Part.ALL
        self._workspace = workspace
        self._schedule = schedule
        self._kv_indices = kv_indices
        self._wrappers: dict[int, Any] = {}  # by turn, made when it comes

    def plan(
        self, epoch: int, shape: StepShape, qo_indptr: Tensor, kv_lens: Tensor, lens: CsrLens
    ) -> None:
        """Plan the step of `epoch`; queues copies, waits for nothing.

        On the CPU: qo_indptr [reqs + 1] int32; kv_lens [reqs] int32.
        """
        spec, limits, turn = self._spec, self._limits, epoch % RING
        if turn not in self._wrappers:
            self._wrappers[turn] = self._made()
        self._wrappers[turn].plan(
            qo_indptr,
            lens.kv_indptr,
            self._kv_indices,
            kv_lens,
            spec.num_heads,
            spec.v_head_dim,
            spec.head_dim - spec.v_head_dim,
            limits.page_size,
            self._is_causal,
            spec.scale,
            limits.dtype,
            limits.kv_dtype,
        )
        self.planned = shape, self._wrappers[turn]

    def _made(self) -> Any:
        """A wrapper whose schedules go where those of the others go.

        It has no public way to be told where: its own memory of 8 MB, and as much that is pinned,
        is given back at once.
        """
        wrapper = self._library.BatchMLAPagedAttentionWrapper(self._workspace)
        wrapper._int_workspace_buffer = self._schedule
        wrapper._pin_memory_int_workspace_buffer = torch.empty(
            self._schedule.shape,
            dtype=torch.uint8,
            pin_memory=device_type(self._schedule.device) == "cuda",
        )
        return wrapper


def _key(part: Part, spec: AttentionSpec) -> str:
    """What a ring serves, as a name."""
    return f"{part.value} of group {spec.group}, {spec.num_heads} heads, scale {spec.scale!r}"


def _bytes(size: int, device: torch.device) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=device)


def _require_room(limits: Limits) -> None:
    """Raises ConfigError where MOST_WORKS may not be enough for a step.

    Tiles are of one TILE where requests have no more rows on average, else of two; splits of keys
    are at most as many as multiprocessors, besides one for each tile.
    """
    heads = max(spec.num_heads for spec in limits.layers)
    tiles = max(limits.max_reqs, limits.max_tokens * heads // (2 * TILE)) + limits.max_reqs
    works = tiles + multiprocessors(limits.device)
    if works > MOST_WORKS:
        raise ConfigError.about(
            "steps for attention backend flashinfer_mla",
            expected=f"of at most {MOST_WORKS} units of work",
            got=f"{works}: {limits.max_tokens} tokens of {heads} heads, {limits.max_reqs} requests",
            remedy="lower --max-num-batched-tokens, or choose another --attention-backend",
        )
