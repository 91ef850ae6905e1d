"""The backends `trtllm_mla` and `cutedsl_mla`: FlashInfer's kernels for latents on Blackwell GPUs.

One function of the library has both, by name: TensorRT-LLM's, which take a few queries of every
request, and those in the CuTe DSL, which take one.  Neither takes query offsets: what rows a call
has is `attention/layouts/query_rows.py`.  Lengths and tables are read on the device.

Read in FlashInfer's main of August 2026, `flashinfer/mla`.
"""

import importlib
import math
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, cast

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
from paceline.core.padding import PAD_PAGE
from paceline.core.plugins import can_find
from paceline.kernels.stand_in import multiprocessors
from paceline.kernels.step_view import StepView

MODULE = "flashinfer.mla"
NOPE_DIM = 128  # of heads before absorption: checked by the library, and read by no kernel
WORKSPACE_PER_SM = 1 << 20  # bytes
TABLE_TOKENS = 128  # that a page table's width is a multiple of


class LatentDecodeLibrary(Protocol):
    """The one function of the library that we call."""

    def trtllm_batch_decode_with_kv_cache_mla(
        self,
        query: Tensor,
        kv_cache: Tensor,
        workspace_buffer: Tensor,
        qk_nope_head_dim: int,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        block_tables: Tensor,
        seq_lens: Tensor,
        max_seq_len: int,
        *,
        bmm1_scale: float,
        backend: str,
        return_lse: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """out [rows, queries, heads, kv_lora_rank]; with return_lse also [rows * queries, heads]
        float32, in base 2 of the kernels of TensorRT-LLM, and natural of the others."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatentDecodeBuffers:
    """The library, and what its kernels count and add up in."""

    library: LatentDecodeLibrary = field(metadata=OPAQUE)
    limits: Limits = field(metadata=OPAQUE)
    workspace: Tensor  # [bytes]  int8  begins with counters that each call leaves at 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatentDecodePlan:
    """The page-table layout as derived, and the rows of each part the step may be asked for."""

    library: LatentDecodeLibrary
    workspace: Tensor  # [bytes]  int8
    table: PageTablePlan
    rows: dict[Part, QueryRows]
    lacks_prefix: Tensor  # [padded_tokens, 1]  bool  the token's request has none


def _capabilities(last_arch: tuple[int, int], latent_dims: set[tuple[int, int]]) -> Capabilities:
    return Capabilities(
        device_types=frozenset({"cuda"}),
        min_cuda_arch=(10, 0),
        max_cuda_arch=last_arch,
        dtypes=frozenset({torch.bfloat16}),  # of what the library writes, whatever it reads
        kv_dtypes=frozenset({torch.bfloat16}),
        page_sizes=frozenset({32, 64}),
        head_dims=frozenset(),
        v_head_dim_differs=False,
        masks=frozenset({MaskKind.CAUSAL}),
        window=False,
        soft_cap=False,
        sinks=False,
        returns_lse=True,
        graph=GraphSupport.ALWAYS,
        host_plan=False,
        loads_dead_slots=True,
        latent_dims=frozenset(latent_dims),
    )


@dataclass(frozen=True)
class TrtllmMLABackend(AttentionBackend[LatentDecodeBuffers, LatentDecodePlan]):
    """Causal attention over latents in pages of 32 or 64, and the prefix alone with lse.

    library: whatever has the library's function; None imports the real one in make_buffers.
    """

    library: LatentDecodeLibrary | None = None
    name = "trtllm_mla"
    capabilities = _capabilities((10, 3), {(512, 64), (256, 64), (512, 0)})
    kept_fields = frozenset({"workspace"})
    kernel: ClassVar[str] = "trtllm-gen"
    most_queries: ClassVar[int] = 64  # of a request in one call
    lse_unit: ClassVar[float] = math.log(2)  # of what its kernels return

    def unsupported_reasons(self, config: AttentionConfig) -> list[str]:
        """Capabilities, and whether the library is there when planning for this machine."""
        reasons = super().unsupported_reasons(config)
        if torch.cuda.is_available() and not can_find(MODULE):
            reasons.append(f"{MODULE} must be importable, got no such module")
        return reasons

    def make_buffers(self, limits: Limits) -> LatentDecodeBuffers:
        """A workspace of zeros, of this backend's own: the kernels in the CuTe DSL leave numbers
        where those of TensorRT-LLM count.  Raises ConfigError where the library cannot be
        imported."""
        return LatentDecodeBuffers(
            library=self._import_library() if self.library is None else self.library,
            limits=limits,
            workspace=torch.zeros(_bytes(limits), dtype=torch.int8, device=limits.device),
        )

    def buffer_bytes(self, limits: Limits) -> int:
        """The same without the library, which need not be here."""
        return _bytes(limits)

    def plan(self, view: StepView, buffers: LatentDecodeBuffers) -> LatentDecodePlan:
        """The rows of each part.  Several queries of a row are masked causally, so the prefix alone
        is read by tokens."""
        limits, rows = buffers.limits, {}
        for part in limits.parts(view.mask):
            is_prefix = part is Part.PREFIX
            stride = uniform_stride(view, 1 if is_prefix else self.most_queries)
            rows[part] = _aligned(query_rows(view, stride, prefix=is_prefix), limits.page_size)
        return LatentDecodePlan(
            library=buffers.library,
            workspace=buffers.workspace,
            table=page_table_plan(view),
            rows=rows,
            lacks_prefix=view.prefix_lens.index_select(0, view.req_ids).eq(0).unsqueeze(1),
        )

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: LayerCache, plan: LatentDecodePlan, part: Part
    ) -> tuple[Tensor, Tensor | None]:
        """See AttentionBackend.forward; lse comes with Part.PREFIX."""
        assert part in plan.rows, f"{part} of a step planned for {[*plan.rows]}"
        spec, rows = layer.spec, plan.rows[part]
        found = plan.library.trtllm_batch_decode_with_kv_cache_mla(
            q.contiguous().view(-1, rows.queries, *q.shape[1:]),
            layer.k_cache.squeeze(2),
            plan.workspace,
            NOPE_DIM,
            spec.v_head_dim,
            spec.head_dim - spec.v_head_dim,
            rows.page_tables[spec.group],
            rows.kv_lens,
            plan.table.kv_len_bound,
            bmm1_scale=spec.scale,
            backend=self.kernel,
            return_lse=part is Part.PREFIX,
        )
        if isinstance(found, Tensor):
            return found.flatten(0, 1), None
        out, lse = found[0].flatten(0, 1), found[1] * self.lse_unit
        out.masked_fill_(plan.lacks_prefix.unsqueeze(2), 0.0)
        return out, lse.masked_fill_(plan.lacks_prefix, float("-inf"))

    def _import_library(self) -> LatentDecodeLibrary:
        """The real library.  Raises ConfigError with what the import said."""
        try:
            return cast(LatentDecodeLibrary, importlib.import_module(MODULE))
        except ImportError as error:
            raise ConfigError.about(
                f"attention backend {self.name}",
                expected=f"an importable {MODULE}",
                got=f"{type(error).__name__}: {error}",
                remedy="pip install flashinfer-python, or choose another --attention-backend",
            ) from error


@dataclass(frozen=True)
class CuteDslMLABackend(TrtllmMLABackend):
    """The same by kernels in the CuTe DSL, which are for decoding: one query of a row."""

    name = "cutedsl_mla"
    capabilities = _capabilities((10, 0), {(512, 64)})
    kernel = "cute-dsl"
    most_queries = 1
    lse_unit = 1.0


def _bytes(limits: Limits) -> int:
    return multiprocessors(limits.device) * WORKSPACE_PER_SM


def _aligned(rows: QueryRows, page_size: int) -> QueryRows:
    """`rows` with tables as wide as the kernels' loads of page ids are."""
    multiple = TABLE_TOKENS // page_size
    padded = tuple(
        torch.nn.functional.pad(table, (0, -table.shape[1] % multiple), value=PAD_PAGE)
        for table in rows.page_tables
    )
    return QueryRows(queries=rows.queries, page_tables=padded, kv_lens=rows.kv_lens)
