"""The `cutlass_mla` backend: a CUTLASS kernel for latents on GPUs of CUDA arch 10.0.

It takes one query of a row, pages of 128, and returns no log-sum-exp.  So every token is a row, of
chains too, and trees, which are merged from parts, are refused.

Read in sgl-kernel's `attention.py` of mid 2026 (package sglang-kernel).
"""

import importlib
from dataclasses import dataclass, field
from typing import Protocol, cast

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
from paceline.attention.held import OPAQUE
from paceline.attention.layouts.page_table import PageTablePlan, page_table_plan
from paceline.attention.layouts.query_rows import QueryRows, query_rows, uniform_stride
from paceline.core.errors import ConfigError
from paceline.core.modes import MaskKind
from paceline.core.plugins import can_find
from paceline.kernels.step_view import StepView

MODULE = "sgl_kernel"  # of the package sglang-kernel
PAGE_SIZE = 128
MOST_HEADS = 128  # that the library pads to
ROWS_AT_ONCE = 1024  # of one call, which adds up in float32 for each


class CutlassMLALibrary(Protocol):
    """The two functions of the library that we call."""

    def cutlass_mla_decode(
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        kv_c_and_k_pe_cache: Tensor,
        seq_lens: Tensor,
        page_table: Tensor,
        workspace: Tensor,
        sm_scale: float,
    ) -> Tensor:
        """out [rows, heads, 512]."""

    def cutlass_mla_get_workspace_size(self, max_seq_len: int, num_batches: int) -> int:
        """Bytes that a call of so many rows needs."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CutlassMLABuffers:
    """The library, and what its kernel adds up in."""

    library: CutlassMLALibrary = field(metadata=OPAQUE)
    workspace: Tensor  # [bytes]  uint8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CutlassMLAPlan:
    """The page-table layout as derived, and every token as a row."""

    library: CutlassMLALibrary
    workspace: Tensor  # [bytes]  uint8
    table: PageTablePlan
    rows: QueryRows


@dataclass(frozen=True)
class CutlassMLABackend(AttentionBackend[CutlassMLABuffers, CutlassMLAPlan]):
    """Causal attention over latents in pages of 128.

    library: whatever has the library's functions; None imports the real one in make_buffers.
    """

    library: CutlassMLALibrary | None = None
    name = "cutlass_mla"
    capabilities = Capabilities(
        device_types=frozenset({"cuda"}),
        min_cuda_arch=(10, 0),
        max_cuda_arch=(10, 0),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        kv_dtypes=frozenset({torch.bfloat16, torch.float16}),
        page_sizes=frozenset({PAGE_SIZE}),
        head_dims=frozenset(),
        v_head_dim_differs=False,
        masks=frozenset({MaskKind.CAUSAL}),
        window=False,
        soft_cap=False,
        sinks=False,
        returns_lse=False,
        graph=GraphSupport.ALWAYS,
        host_plan=False,
        loads_dead_slots=True,
        latent_dims=frozenset({(512, 64)}),
    )

    def unsupported_reasons(self, config: AttentionConfig) -> list[str]:
        """Capabilities, heads, and whether the library is there when planning for this machine."""
        reasons = super().unsupported_reasons(config)
        most = max((heads.num_heads for heads in config.heads), default=0)
        if most > MOST_HEADS:
            reasons.append(f"heads must be at most {MOST_HEADS}, got {most}")
        if torch.cuda.is_available() and not can_find(MODULE):
            reasons.append(f"{MODULE} must be importable, got no such module")
        return reasons

    def make_buffers(self, limits: Limits) -> CutlassMLABuffers:
        """The workspace of the largest call.  Raises ConfigError where the library cannot be
        imported."""
        library = _import_library() if self.library is None else self.library
        length = max(limits.max_pages) * PAGE_SIZE
        size = library.cutlass_mla_get_workspace_size(length, _most_rows(limits))
        workspace = torch.empty(size, dtype=torch.uint8, device=limits.device)
        return CutlassMLABuffers(library=library, workspace=workspace)

    def buffer_bytes(self, limits: Limits) -> int:
        """A float32 sum of each row and padded head, with its log-sum-exp: the library, which knows
        better, need not be here."""
        rank = max(spec.v_head_dim for spec in limits.layers)
        return _most_rows(limits) * MOST_HEADS * (rank + 1) * 4

    def plan(self, view: StepView, buffers: CutlassMLABuffers) -> CutlassMLAPlan:
        """Every token as a row."""
        return CutlassMLAPlan(
            library=buffers.library,
            workspace=buffers.workspace,
            table=page_table_plan(view),
            rows=query_rows(view, uniform_stride(view, 1), prefix=False),
        )

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: LayerCache, plan: CutlassMLAPlan, part: Part
    ) -> tuple[Tensor, Tensor | None]:
        """See AttentionBackend.forward; there is no lse."""
        assert part is Part.ALL, f"{part} of a backend without a log-sum-exp"
        spec, rows, outs = layer.spec, plan.rows, []
        for start in range(0, len(q), ROWS_AT_ONCE):
            cut = slice(start, start + ROWS_AT_ONCE)
            out = plan.library.cutlass_mla_decode(
                q[cut, :, : spec.v_head_dim],
                q[cut, :, spec.v_head_dim :],
                layer.k_cache.squeeze(2),
                rows.kv_lens[cut],
                rows.page_tables[spec.group][cut],
                plan.workspace,
                spec.scale,
            )
            outs.append(out)
        return outs[0] if len(outs) == 1 else torch.cat(outs), None


def _most_rows(limits: Limits) -> int:
    return min(ROWS_AT_ONCE, limits.max_tokens)


def _import_library() -> CutlassMLALibrary:
    """The real library.  Raises ConfigError with what the import said."""
    try:
        return cast(CutlassMLALibrary, importlib.import_module(MODULE))
    except ImportError as error:
        raise ConfigError.about(
            "attention backend cutlass_mla",
            expected=f"an importable {MODULE}",
            got=f"{type(error).__name__}: {error}",
            remedy="pip install sglang-kernel, or choose another --attention-backend",
        ) from error
