"""The `trtllm_mha` backend: TensorRT-LLM's kernels on Blackwell GPUs, as FlashInfer calls them.

Steps whose requests bring as many tokens each go to the decode function, which takes one stride of
query rows, others to the context function, which takes offsets.  Lengths and tables are read on the
device.  What the kernels' splits depend on is the bound of lengths that the caller states: it is
the same for every step, eager or not.

Read in FlashInfer's main of August 2026, `flashinfer/decode.py` and `prefill.py`.
"""

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
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
from paceline.attention.layouts.query_rows import QueryRows, query_rows, uniform_stride
from paceline.core.modes import MaskKind
from paceline.core.plugins import import_modules
from paceline.kernels.stand_in import multiprocessors
from paceline.kernels.step_view import StepView

PACKAGE = "flashinfer-python"
DECODE_MODULE, PREFILL_MODULE = "flashinfer.decode", "flashinfer.prefill"
MOST_QUERIES = 64  # of a request in one call of the decode function
WORKSPACE_PER_SM = 4 << 20  # bytes


class TrtllmMHALibrary(Protocol):
    """The two functions of the library that we call."""

    def trtllm_batch_decode_with_kv_cache(
        self,
        query: Tensor,
        kv_cache: tuple[Tensor, Tensor],
        workspace_buffer: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        max_seq_len: int,
        *,
        bmm1_scale: float,
        bmm2_scale: float,
        window_left: int,
        sinks: Tensor | None,
        kv_layout: str,
        q_len_per_req: int,
        return_lse: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """out [rows, heads, head_dim]; with return_lse also [rows, heads] float32 in base 2."""

    def trtllm_batch_context_with_kv_cache(
        self,
        query: Tensor,
        kv_cache: tuple[Tensor, Tensor],
        workspace_buffer: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        max_q_len: int,
        max_kv_len: int,
        *,
        bmm1_scale: float,
        bmm2_scale: float,
        batch_size: int,
        cum_seq_lens_q: Tensor,
        cum_seq_lens_kv: Tensor,
        window_left: int,
        sinks: Tensor | None,
        kv_layout: str,
    ) -> Tensor:
        """out [tokens, heads, head_dim]."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrtllmMHABuffers:
    """The library, what its kernels count and add up in, and the offsets of keys."""

    library: TrtllmMHALibrary = field(metadata=OPAQUE)
    limits: Limits = field(metadata=OPAQUE)
    workspace: Tensor  # [bytes]  uint8  begins with counters that each call leaves at 0
    cu_seqlens_k: Tensor  # [max_reqs + 1]  int32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrtllmMHAPlan:
    """The page-table layout as derived, and the rows of a call of the decode function."""

    library: TrtllmMHALibrary
    workspace: Tensor  # [bytes]  uint8
    table: PageTablePlan
    cu_seqlens_k: Tensor  # [padded_reqs + 1]  int32
    rows: QueryRows | None  # None: the step is the context function's
    prefix: QueryRows | None  # of tokens; None where Part.PREFIX is not asked for
    lacks_prefix: Tensor  # [padded_tokens]  bool  the token's request has none


@dataclass(frozen=True)
class TrtllmMHABackend(AttentionBackend[TrtllmMHABuffers, TrtllmMHAPlan]):
    """Causal attention over pages of 16, 32 or 64, and the prefix alone with lse.

    library: whatever has the library's functions; None imports the real one in make_buffers.
    """

    library: TrtllmMHALibrary | None = None
    name = "trtllm_mha"
    capabilities = Capabilities(
        device_types=frozenset({"cuda"}),
        min_cuda_arch=(10, 0),  # the context function has no kernels elsewhere
        max_cuda_arch=(10, 3),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        kv_dtypes=frozenset({torch.bfloat16, torch.float16}),
        page_sizes=frozenset({16, 32, 64}),
        head_dims=frozenset({64, 128, 256}),
        v_head_dim_differs=False,
        masks=frozenset({MaskKind.CAUSAL}),
        window=True,
        soft_cap=False,
        sinks=True,
        returns_lse=True,
        graph=GraphSupport.ALWAYS,
        host_plan=False,
        loads_dead_slots=True,
        latent_dims=frozenset(),
    )
    kept_fields = frozenset({"workspace"})

    def unsupported_reasons(self, config: AttentionConfig) -> list[str]:
        """Capabilities, windows of a prefix, and whether the library is there when planning for
        this machine."""
        reasons = super().unsupported_reasons(config)
        if config.window and config.needs_lse:  # each row of a request would have its own
            reasons.append(
                "sliding window must be absent where the prefix is attended alone, got present"
            )
        return reasons + module_reasons(DECODE_MODULE, f"{DECODE_MODULE} of {PACKAGE}")

    def make_buffers(self, limits: Limits) -> TrtllmMHABuffers:
        """A workspace of zeros, and offsets of the largest step.  Raises ConfigError where the
        library cannot be imported."""
        device = limits.device
        return TrtllmMHABuffers(
            library=_import_library() if self.library is None else self.library,
            limits=limits,
            workspace=torch.zeros(_workspace_bytes(limits), dtype=torch.uint8, device=device),
            cu_seqlens_k=torch.zeros(limits.max_reqs + 1, dtype=torch.int32, device=device),
        )

    def buffer_bytes(self, limits: Limits) -> int:
        """The same without the library, which need not be here."""
        return _workspace_bytes(limits) + 4 * (limits.max_reqs + 1)

    def plan(self, view: StepView, buffers: TrtllmMHABuffers) -> TrtllmMHAPlan:
        """The rows of requests that bring as many tokens each, or the offsets of their keys."""
        stride = uniform_stride(view, MOST_QUERIES)
        offsets = buffers.cu_seqlens_k[: view.padded_reqs + 1]
        offsets[0].zero_()
        torch.cumsum(view.kv_lens, 0, dtype=torch.int32, out=offsets[1:])
        prefix = None
        if Part.PREFIX in buffers.limits.parts(view.mask):
            prefix = query_rows(view, None, prefix=True)
        return TrtllmMHAPlan(
            library=buffers.library,
            workspace=buffers.workspace,
            table=page_table_plan(view),
            cu_seqlens_k=offsets,
            rows=None if stride is None else query_rows(view, stride, prefix=False),
            prefix=prefix,
            lacks_prefix=without_prefix(view),
        )

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: LayerCache, plan: TrtllmMHAPlan, part: Part
    ) -> tuple[Tensor, Tensor | None]:
        """See AttentionBackend.forward; lse comes with Part.PREFIX."""
        if part is Part.ALL:
            if plan.rows is None:
                return _context(q, layer, plan), None
            out = _decode(q, layer, plan, plan.rows, wants_lse=False)
            assert isinstance(out, Tensor)
            return out, None
        assert plan.prefix is not None, f"{part} of a step that was not planned for it"
        out, lse = _decode(q, layer, plan, plan.prefix, wants_lse=True)
        return blank_keyless_(out, lse * math.log(2), plan.lacks_prefix)


def _decode(
    q: Tensor, layer: LayerCache, plan: TrtllmMHAPlan, rows: QueryRows, *, wants_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """One call over rows of one stride."""
    return plan.library.trtllm_batch_decode_with_kv_cache(
        q.contiguous(),
        _pages(layer),
        plan.workspace,
        rows.page_tables[layer.spec.group],
        rows.kv_lens,
        plan.table.kv_len_bound,
        q_len_per_req=rows.queries,
        return_lse=wants_lse,
        **_options(layer, sinks=not wants_lse),
    )


def _context(q: Tensor, layer: LayerCache, plan: TrtllmMHAPlan) -> Tensor:
    """One call over requests that each bring their own number of tokens."""
    table = plan.table
    return plan.library.trtllm_batch_context_with_kv_cache(
        q.contiguous(),
        _pages(layer),
        plan.workspace,
        table.page_tables[layer.spec.group],
        table.kv_lens,
        table.max_extend_len,
        table.kv_len_bound,
        batch_size=len(table.kv_lens),
        cum_seq_lens_q=table.cu_seqlens_q,
        cum_seq_lens_kv=plan.cu_seqlens_k,
        **_options(layer, sinks=True),
    )


def _options(layer: LayerCache, *, sinks: bool) -> dict[str, Any]:
    """What both functions are told of a layer.  A window is told as the keys left of a query's
    own; the prefix alone has neither window nor sinks."""
    spec = layer.spec
    return {
        "bmm1_scale": spec.scale,
        "bmm2_scale": 1.0,
        "window_left": -1 if spec.sliding is None else spec.sliding - 1,
        "sinks": layer.sinks if sinks else None,
        "kv_layout": "HND",
    }


def _pages(layer: LayerCache) -> tuple[Tensor, Tensor]:
    """K and V as [num_pages, num_kv_heads, page_size, head_dim]: views.

    Of one head the transposed stride would be that of a token, which a descriptor of a load of
    tiles refuses: the view states a page's.
    """
    caches = layer.k_cache, layer.v_cache
    if layer.spec.num_kv_heads == 1:
        k, v = (cache.view(-1, 1, *cache.shape[1::2]) for cache in caches)
    else:
        k, v = (cache.transpose(1, 2) for cache in caches)
    return k, v


def _workspace_bytes(limits: Limits) -> int:
    return multiprocessors(limits.device) * WORKSPACE_PER_SM


def _import_library() -> TrtllmMHALibrary:
    """The real library.  Raises ConfigError with what the import said."""
    decode, prefill = import_modules(
        "attention backend trtllm_mha",
        DECODE_MODULE,
        PREFILL_MODULE,
        remedy=f"pip install {PACKAGE}, or choose another --attention-backend",
    )
    functions = SimpleNamespace(
        trtllm_batch_decode_with_kv_cache=decode.trtllm_batch_decode_with_kv_cache,
        trtllm_batch_context_with_kv_cache=prefill.trtllm_batch_context_with_kv_cache,
    )
    return cast(TrtllmMHALibrary, functions)
