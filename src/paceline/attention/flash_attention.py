"""What the FlashAttention backends share: the call over paged rows, and the prefix alone.

The libraries read lengths and page tables on the device; nothing is planned on the host.  They
walk at least one tile of keys, so that a request of no key would read the page-table entry before
its row.  A request without a prefix has none when the prefix is attended alone: it is shown one
key, and its result is replaced by out 0, lse −inf.  They know no chunks: layers with chunks are
called over virtual requests (attention/layouts/chunks.py).
"""

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from paceline.attention.contract import (
    AttentionBackend,
    AttentionSpec,
    LayerCache,
    Limits,
    Part,
)
from paceline.attention.held import OPAQUE
from paceline.attention.keyless import blank_keyless_
from paceline.attention.layouts.chunks import VirtualRequests, virtual_requests
from paceline.attention.layouts.page_table import PageTablePlan, page_table_plan
from paceline.core.errors import KernelArgumentError
from paceline.core.modes import MaskKind
from paceline.kernels.step_view import StepView

LibraryT = TypeVar("LibraryT")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlashAttentionBuffers(Generic[LibraryT]):
    """The library, and what a step writes beside its page tables."""

    library: LibraryT = field(metadata=OPAQUE)
    limits: Limits = field(metadata=OPAQUE)
    prefix_used: Tensor  # [max_reqs]  int32
    lacks_prefix: Tensor  # [max_tokens]  bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlashAttentionPlan(Generic[LibraryT]):
    """The page-table layout, and the lengths of the prefix alone."""

    library: LibraryT
    table: PageTablePlan
    prefix_used: Tensor  # [padded_reqs]  int32  prefix_lens, but at least 1
    lacks_prefix: Tensor  # [padded_tokens]  bool  the token's request has no prefix
    virtual: tuple[VirtualRequests, ...]  # of each part that is asked for, and group with chunks

    def virtual_of(self, group: int, part: Part) -> VirtualRequests:
        """What a call over a part reads for the layers of a group with chunks."""
        is_prefix = part is Part.PREFIX
        [found] = [one for one in self.virtual if (one.group, one.is_prefix) == (group, is_prefix)]
        return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VisibleKeys:
    """Which keys the queries of one call see."""

    page_table: Tensor  # [padded_reqs, max_pages]  int32
    keys_used: Tensor  # [padded_reqs]  int32  at least 1 where a request has queries
    cu_seqlens_q: Tensor  # [padded_reqs + 1]  int32
    max_extend_len: int  # no request has more queries
    is_causal: bool  # aligned bottom-right, as the window is
    window: tuple[int, int] | None  # keys visible left and right of the query's own
    wants_lse: bool


@dataclass(frozen=True)
class FlashAttentionBackend(
    AttentionBackend[FlashAttentionBuffers[LibraryT], FlashAttentionPlan[LibraryT]],
    Generic[LibraryT],
):
    """A backend of one call per layer; `attend` makes it.

    library: whatever has the library's functions; None imports the real one in make_buffers.
    """

    library: LibraryT | None = None

    @abstractmethod
    def import_library(self) -> LibraryT:
        """The real library.  Raises ConfigError where it cannot be imported."""

    @abstractmethod
    def attend(
        self, library: LibraryT, q: Tensor, layer: LayerCache, *, rows: VisibleKeys
    ) -> tuple[Tensor, Tensor | None]:
        """The library's call: out [tokens, heads, head_dim], lse [heads, tokens] if wanted."""

    def make_buffers(self, limits: Limits) -> FlashAttentionBuffers[LibraryT]:
        """The lengths of the prefix alone, for the largest step.

        Raises ConfigError where the library cannot be imported.
        """
        return FlashAttentionBuffers(
            library=self.import_library() if self.library is None else self.library,
            limits=limits,
            prefix_used=torch.ones(limits.max_reqs, dtype=torch.int32, device=limits.device),
            lacks_prefix=torch.zeros(limits.max_tokens, dtype=torch.bool, device=limits.device),
        )

    def buffer_bytes(self, limits: Limits) -> int:
        """The same without the library, which need not be here."""
        return 4 * limits.max_reqs + limits.max_tokens

    def plan(
        self, view: StepView, buffers: FlashAttentionBuffers[LibraryT]
    ) -> FlashAttentionPlan[LibraryT]:
        """The page-table layout as derived, which requests have no prefix, and where chunks cut."""
        used = buffers.prefix_used[: view.padded_reqs]
        torch.clamp(view.prefix_lens, min=1, out=used)
        lacks = buffers.lacks_prefix[: view.padded_tokens]
        torch.eq(view.prefix_lens.index_select(0, view.req_ids), 0, out=lacks)
        return FlashAttentionPlan(
            library=buffers.library,
            table=page_table_plan(view),
            prefix_used=used,
            lacks_prefix=lacks,
            virtual=tuple(
                requests
                for part in buffers.limits.parts(view.mask)
                for requests in virtual_requests(view, buffers.limits, part)
            ),
        )

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: LayerCache,
        plan: FlashAttentionPlan[LibraryT],
        part: Part,
    ) -> tuple[Tensor, Tensor | None]:
        """One layer; see AttentionBackend.forward.

        Raises KernelArgumentError for a windowed layer's prefix that `prefix_window` cannot state.
        """
        spec, is_whole = layer.spec, part is Part.ALL
        assert plan.table.mask is MaskKind.CAUSAL or not is_whole, "a tree is for cascade"
        if spec.chunk is None:
            rows, lacks = _requests(spec, plan, part, tokens=len(q)), plan.lacks_prefix
        else:
            virtual = plan.virtual_of(spec.group, part)
            rows, lacks = _virtual(virtual), virtual.lacks_prefix
        out, lse = self.attend(plan.library, q, layer, rows=rows)
        if is_whole:
            return out, None  # a library's lse counts the sinks, and nobody asks for it
        assert lse is not None
        return blank_keyless_(out, lse.t().contiguous(), lacks)


def _requests(
    spec: AttentionSpec, plan: FlashAttentionPlan[LibraryT], part: Part, *, tokens: int
) -> VisibleKeys:
    """The keys of a step's own requests, all or within a window."""
    table, is_whole = plan.table, part is Part.ALL
    window, sliding = None, spec.sliding
    if sliding is not None:
        window = (sliding - 1, 0) if is_whole else prefix_window(sliding, table, tokens=tokens)
    return VisibleKeys(
        page_table=table.page_tables[spec.group],
        keys_used=table.kv_lens if is_whole else plan.prefix_used,
        cu_seqlens_q=table.cu_seqlens_q,
        max_extend_len=table.max_extend_len,
        is_causal=is_whole,
        window=window,
        wants_lse=not is_whole,
    )


def _virtual(requests: VirtualRequests) -> VisibleKeys:
    """The keys of virtual requests: they see all of theirs."""
    return VisibleKeys(
        page_table=requests.page_table,
        keys_used=requests.keys_used,
        cu_seqlens_q=requests.cu_seqlens_q,
        max_extend_len=requests.max_extend_len,
        is_causal=not requests.is_prefix,
        window=None,
        wants_lse=requests.is_prefix,
    )


def prefix_window(window: int, table: PageTablePlan, *, tokens: int) -> tuple[int, int]:
    """(left, right) for the prefix alone of a layer with `window`.

    The libraries put a request's last query at its last key, which is the prefix's here: as many
    positions too early as the step has rows.  That is one shift for all when every request brings
    the same rows, and no window when the shift outgrows it.  Under a tree a position is no row.
    Raises KernelArgumentError for everything else.
    """
    rows, reqs = table.max_extend_len, table.prefix_lens.shape[0]
    if table.mask is not MaskKind.CAUSAL or tokens != reqs * rows or window <= rows:
        raise KernelArgumentError.about(
            "a window where the prefix is attended alone",
            expected="wider than a chain's rows, of which every request brings as many",
            got=f"{window}, {table.mask.value} mask, {tokens} rows of {reqs} requests, at most "
            f"{rows} of one",
            remedy="attend the layer with the triton backend",
        )
    return window - 1 - rows, rows - 1
