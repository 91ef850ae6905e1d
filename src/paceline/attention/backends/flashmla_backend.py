"""The `flashmla` backend: DeepSeek's kernels for latents on Hopper GPUs.

Their schedule is computed by a kernel from the lengths of one step, so each plan has its own.  Each
request brings as many queries to a call.  Where they do not, or bring many, every token is a
request by itself, with the pages of its request and the keys up to its own.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from paceline.attention.capability import module_reasons
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
from paceline.attention.keyless import blank_keyless_, without_prefix
from paceline.attention.layouts.page_table import PageTablePlan, page_table_plan
from paceline.attention.layouts.query_rows import query_rows, uniform_stride
from paceline.core.modes import MaskKind
from paceline.core.plugins import import_modules
from paceline.kernels.stand_in import multiprocessors
from paceline.kernels.step_view import StepView

MODULE = "sgl_kernel.flash_mla"  # of the package sglang-kernel
PAGE_SIZE = 64
TILE = 64  # query rows, heads counted
MOST_QUERIES = 16  # of a request in one call
TOKENS_AT_ONCE = 1024  # of one call, which allocates float32 sums for each


class FlashMLALibrary(Protocol):
    """The two functions of the library that we call."""

    def get_mla_metadata(
        self, cache_seqlens: Tensor, num_q_tokens_per_head_k: int, num_heads_k: int
    ) -> tuple[Any, Any]:
        """The schedule of calls with these lengths."""

    def flash_mla_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        block_table: Tensor,
        cache_seqlens: Tensor,
        head_dim_v: int,
        tile_scheduler_metadata: Any,
        num_splits: Any,
        softmax_scale: float,
        causal: bool,
    ) -> tuple[Tensor, Tensor]:
        """out [reqs, queries, heads, head_dim_v], lse [reqs, heads, queries] natural."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlashMLABuffers:
    """What plans are made with.  They hold no tensor: a plan's own are made anew in each step."""

    library: FlashMLALibrary = field(metadata=OPAQUE)
    heads: tuple[int, ...]  # of queries, of some layer, each once
    limits: Limits = field(metadata=OPAQUE)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatentCall:
    """The requests of one call of the library, which may be tokens."""

    tokens: slice  # of the step
    page_tables: tuple[Tensor, ...]  # [num_groups] of [reqs, max_pages]  int32
    kv_lens: Tensor  # [reqs]  int32  at least 1
    schedules: dict[int, tuple[Any, Any]]  # by query heads


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlashMLAPlan:
    """The page-table layout as derived, and the calls of each part the step may be asked for."""

    library: FlashMLALibrary
    table: PageTablePlan
    queries: int  # of a request in a call
    calls: dict[Part, list[LatentCall]]
    lacks_prefix: Tensor | None  # [padded_tokens]  bool  the token's request has none; where
    # Part.PREFIX may be asked for


@dataclass(frozen=True)
class FlashMLABackend(AttentionBackend[FlashMLABuffers, FlashMLAPlan]):
    """Causal attention over latents in pages of 64, and the prefix alone with lse.

    library: whatever has the library's functions; None imports the real one in make_buffers.
    """

    library: FlashMLALibrary | None = None
    name = "flashmla"
    capabilities = Capabilities(
        device_types=frozenset({"cuda"}),
        min_cuda_arch=(9, 0),
        max_cuda_arch=(9, 9),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        kv_dtypes=frozenset({torch.bfloat16, torch.float16}),
        page_sizes=frozenset({PAGE_SIZE}),
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
        latent_dims=frozenset({(512, 64)}),
    )

    def unsupported_reasons(self, config: AttentionConfig) -> list[str]:
        """Capabilities, and whether the library is there when planning for this machine."""
        return super().unsupported_reasons(config) + module_reasons(MODULE)

    def make_buffers(self, limits: Limits) -> FlashMLABuffers:
        """The library.  Raises ConfigError where it cannot be imported."""
        return FlashMLABuffers(
            library=_import_library() if self.library is None else self.library,
            heads=tuple(dict.fromkeys(spec.num_heads for spec in limits.layers)),
            limits=limits,
        )

    def buffer_bytes(self, limits: Limits) -> int:
        """No buffers, but what a call of the library allocates: sums of each query, and of the
        splits, which are as many tiles of queries as there are multiprocessors."""
        heads = max(spec.num_heads for spec in limits.layers)
        rank = max(spec.v_head_dim for spec in limits.layers)
        splits = max(multiprocessors(limits.device) * TILE, MOST_QUERIES * heads)
        rows = min(TOKENS_AT_ONCE, limits.max_tokens) * heads + splits
        return 4 * rows * (rank + 1)

    def plan(self, view: StepView, buffers: FlashMLABuffers) -> FlashMLAPlan:
        """The schedules of this step's lengths, by the library's own kernel."""
        parts = buffers.limits.parts(view.mask)
        stride = uniform_stride(view, MOST_QUERIES)
        return FlashMLAPlan(
            library=buffers.library,
            table=page_table_plan(view),
            queries=stride or 1,
            calls={part: _calls(view, buffers, part, stride=stride) for part in parts},
            lacks_prefix=without_prefix(view) if Part.PREFIX in parts else None,
        )

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: LayerCache, plan: FlashMLAPlan, part: Part
    ) -> tuple[Tensor, Tensor | None]:
        """See AttentionBackend.forward; lse comes with Part.PREFIX."""
        spec, outs, lses = layer.spec, [], []
        assert part in plan.calls, f"{part} of a step planned for {[*plan.calls]}"
        for call in plan.calls[part]:
            out, lse = plan.library.flash_mla_with_kvcache(
                q[call.tokens].view(-1, plan.queries, *q.shape[1:]),
                layer.k_cache,
                call.page_tables[spec.group],
                call.kv_lens,
                spec.v_head_dim,
                *call.schedules[spec.num_heads],
                softmax_scale=spec.scale,
                causal=part is Part.ALL and plan.queries > 1,
            )
            outs.append(out.flatten(0, 1))
            lses.append(lse.transpose(1, 2).flatten(0, 1))
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        if part is Part.ALL:
            return out, None
        assert plan.lacks_prefix is not None
        by_token = lses[0].contiguous() if len(lses) == 1 else torch.cat(lses)
        return blank_keyless_(out, by_token, plan.lacks_prefix)


def _calls(
    view: StepView, buffers: FlashMLABuffers, part: Part, *, stride: int | None
) -> list[LatentCall]:
    """The calls of one part: of requests that bring `stride` queries each, or of tokens."""
    rows = query_rows(view, stride, prefix=part is Part.PREFIX)
    calls, step = [], TOKENS_AT_ONCE // rows.queries
    for start in range(0, len(rows.kv_lens), step):
        cut = slice(start, min(start + step, len(rows.kv_lens)))
        lens = rows.kv_lens[cut]
        calls.append(
            LatentCall(
                tokens=slice(cut.start * rows.queries, cut.stop * rows.queries),
                page_tables=tuple(table[cut] for table in rows.page_tables),
                kv_lens=lens,
                schedules={
                    heads: buffers.library.get_mla_metadata(lens, rows.queries * heads, 1)
                    for heads in buffers.heads
                },
            )
        )
    return calls


def _import_library() -> FlashMLALibrary:
    """The real library.  Raises ConfigError with what the import said."""
    (library,) = import_modules(
        "attention backend flashmla",
        MODULE,
        remedy="pip install 'paceline[fa3]', or choose another --attention-backend",
    )
    return cast(FlashMLALibrary, library)
