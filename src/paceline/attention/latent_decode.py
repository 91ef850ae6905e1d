"""What backends of vendors' decode kernels for latents share: rows, a workspace, the prefix alone.

The kernels take q as [rows, queries, heads, head_dim] and no query offsets: what the rows of a call
are is attention/layouts/query_rows.py.  Several queries of a row are masked causally.  Lengths and
tables are read on the device, and a row without a key comes to junk: it is shown one, and replaced.
"""

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar, cast

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
from paceline.core.padding import PAD_PAGE
from paceline.core.plugins import import_modules
from paceline.kernels.step_view import StepView

TABLE_TOKENS = 128  # whose page ids a kernel loads at once: tables are as wide as whole loads

LibraryT = TypeVar("LibraryT")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatentDecodeBuffers(Generic[LibraryT]):
    """The library, and what its kernels count and add up in."""

    library: LibraryT = field(metadata=OPAQUE)
    limits: Limits = field(metadata=OPAQUE)
    workspace: Tensor  # [bytes]  int8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatentDecodePlan(Generic[LibraryT]):
    """The page-table layout as derived, and the rows of each part the step may be asked for."""

    library: LibraryT
    workspace: Tensor  # [bytes]  int8
    table: PageTablePlan
    rows: dict[Part, QueryRows]
    lacks_prefix: Tensor  # [padded_tokens]  bool  the token's request has none


@dataclass(frozen=True)
class LatentDecodeBackend(
    AttentionBackend[LatentDecodeBuffers[LibraryT], LatentDecodePlan[LibraryT]],
    Generic[LibraryT],
):
    """A backend of one call per layer; `attend` makes it.

    library: whatever has the library's functions; None imports the real one in make_buffers.
    """

    library: LibraryT | None = None
    kept_fields = frozenset({"workspace"})  # counters in it are left at 0 by each call
    module: ClassVar[str]  # of the library
    package: ClassVar[str]  # that has it
    most_queries: ClassVar[int]  # of a row

    @abstractmethod
    def workspace_bytes(self, limits: Limits) -> int:
        """The most bytes of the workspace, for the memory budget: the library need not be here."""

    def needed_bytes(self, library: LibraryT, limits: Limits) -> int:
        """Bytes of the workspace: as many, unless the library says less."""
        return self.workspace_bytes(limits)

    @abstractmethod
    def attend(
        self,
        library: LibraryT,
        query: Tensor,
        layer: LayerCache,
        *,
        rows: QueryRows,
        workspace: Tensor,
        most_keys: int,
        wants_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """The library's call: out [rows, queries, heads, rank], natural lse [tokens, heads] if
        wanted.

        query: [rows, queries, heads, head_dim], contiguous; most_keys: of a row, the same number in
        every step, eager or not: splits may depend on it.
        """

    def unsupported_reasons(self, config: AttentionConfig) -> list[str]:
        """Capabilities, and whether the library is there when planning for this machine."""
        name = f"{self.module} of {self.package}"
        return super().unsupported_reasons(config) + module_reasons(self.module, name)

    def make_buffers(self, limits: Limits) -> LatentDecodeBuffers[LibraryT]:
        """A workspace of zeros, of this backend's own: some kernels leave numbers where others
        count.  Raises ConfigError where the library cannot be imported."""
        library = self._import_library() if self.library is None else self.library
        size = self.needed_bytes(library, limits)
        workspace = torch.zeros(size, dtype=torch.int8, device=limits.device)
        return LatentDecodeBuffers(library=library, limits=limits, workspace=workspace)

    def buffer_bytes(self, limits: Limits) -> int:
        """The workspace."""
        return self.workspace_bytes(limits)

    def plan(
        self, view: StepView, buffers: LatentDecodeBuffers[LibraryT]
    ) -> LatentDecodePlan[LibraryT]:
        """The rows of each part; the prefix alone, which nothing masks, by tokens."""
        limits, rows = buffers.limits, {}
        for part in limits.parts(view.mask):
            is_prefix = part is Part.PREFIX
            stride = None if is_prefix else uniform_stride(view, self.most_queries)
            rows[part] = _aligned(query_rows(view, stride, prefix=is_prefix), limits.page_size)
        return LatentDecodePlan(
            library=buffers.library,
            workspace=buffers.workspace,
            table=page_table_plan(view),
            rows=rows,
            lacks_prefix=without_prefix(view),
        )

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: LayerCache,
        plan: LatentDecodePlan[LibraryT],
        part: Part,
    ) -> tuple[Tensor, Tensor | None]:
        """See AttentionBackend.forward; lse comes with Part.PREFIX."""
        assert part in plan.rows, f"{part} of a step planned for {[*plan.rows]}"
        rows = plan.rows[part]
        found, lse = self.attend(
            plan.library,
            q.contiguous().view(-1, rows.queries, *q.shape[1:]),
            layer,
            rows=rows,
            workspace=plan.workspace,
            most_keys=plan.table.kv_len_bound,
            wants_lse=part is Part.PREFIX,
        )
        out = found.flatten(0, 1)
        if part is Part.ALL:
            return out, None
        assert lse is not None
        return blank_keyless_(out, lse, plan.lacks_prefix)

    def _import_library(self) -> LibraryT:
        """The real library.  Raises ConfigError with what the import said."""
        remedy = f"pip install {self.package}, or choose another --attention-backend"
        what = f"attention backend {self.name}"
        (library,) = import_modules(what, self.module, remedy=remedy)
        return cast(LibraryT, library)


def latent_capabilities(
    *,
    max_arch: tuple[int, int],
    dtypes: set[torch.dtype],
    page_sizes: set[int],
    latent_dims: set[tuple[int, int]],
    returns_lse: bool,
) -> Capabilities:
    """Of a kernel for Blackwell GPUs that reads latents of the dtype of its queries."""
    return Capabilities(
        device_types=frozenset({"cuda"}),
        min_cuda_arch=(10, 0),
        max_cuda_arch=max_arch,
        dtypes=frozenset(dtypes),
        kv_dtypes=frozenset(dtypes),
        page_sizes=frozenset(page_sizes),
        head_dims=frozenset(),
        v_head_dim_differs=False,
        masks=frozenset({MaskKind.CAUSAL}),
        window=False,
        soft_cap=False,
        sinks=False,
        returns_lse=returns_lse,
        graph=GraphSupport.ALWAYS,
        host_plan=False,
        loads_dead_slots=True,
        latent_dims=frozenset(latent_dims),
    )


def _aligned(rows: QueryRows, page_size: int) -> QueryRows:
    """`rows` with tables as wide as whole loads of page ids.  page_size: at most TABLE_TOKENS."""
    multiple = TABLE_TOKENS // page_size
    padded = tuple(
        torch.nn.functional.pad(table, (0, missing), value=PAD_PAGE)
        if (missing := -table.shape[1] % multiple)
        else table
        for table in rows.page_tables
    )
    return QueryRows(queries=rows.queries, page_tables=padded, kv_lens=rows.kv_lens)
