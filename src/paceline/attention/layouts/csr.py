"""The CSR layout: the pages of all requests in one list, with offsets per request.

Worked example: page size 4, table width 3.

    kv_lens        [9, 4]
    page_table     [[7, 2, 5], [9, 0, 0]]
    num_pages      [3, 1]                     ceil(kv_len / 4)
    kv_indptr      [0, 3, 4]
    kv_indices     [7, 2, 5, 9, 0, 0, -]      request r, page j: kv_indptr[r] + j; then padding
    last_page_len  [1, 4]                     1..page_size; 0 of a request without keys

Offsets and last pages are host facts, for a backend that plans on the host; the page ids are the
device's own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from paceline.attention.contract import Limits
from paceline.core.model.lookback import Chunk
from paceline.core.padding import PAD_PAGE
from paceline.kernels.step_view import StepView


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CsrBuffers:
    """The CSR tensors of a step at their maximum size."""

    kv_indptr: Tensor  # [max_reqs + 1]  int32  in pages; leading 0; the same for every group
    last_page_len: Tensor  # [max_reqs]  int32
    kv_indices: tuple[Tensor, ...]  # [num_groups] of [max_reqs * max_pages + 1]  int32  page ids;
    # the entry behind the last one takes what is unused
    page_range: Tensor  # [widest max_pages]  int32  0, 1, 2, ...
    widths: tuple[int, ...]  # [num_groups]  pages of a request at most; 0 of groups not in it


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CsrPlan:
    """One group's lists as a kernel reads them; part of a plan.

    Requests are virtual ones (layouts/chunks.py) of a group with chunks.
    """

    group: int
    kv_indptr: Tensor  # [padded_reqs + 1]  int32  in pages
    kv_indices: Tensor  # [padded_reqs * max_pages]  int32  page ids; PAD_PAGE behind the end
    last_page_len: Tensor  # [padded_reqs]  int32
    is_prefix: bool  # of the prefix alone: Part.PREFIX
    chunk: Chunk | None = None  # of the group's layers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CsrLens:
    """What the host knows of one step's CSR lists, on the CPU."""

    kv_indptr: Tensor  # [padded_reqs + 1]  int32
    last_page_len: Tensor  # [padded_reqs]  int32


def make_csr_buffers(limits: Limits) -> CsrBuffers:
    """Zeroed buffers for the largest step."""

    def ints(size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32, device=limits.device)

    page_range = ints(max(limits.max_pages))
    torch.arange(max(limits.max_pages), out=page_range)
    return CsrBuffers(
        kv_indptr=ints(limits.max_reqs + 1),
        last_page_len=ints(limits.max_reqs),
        kv_indices=tuple(ints(limits.max_reqs * width + 1) for width in limits.max_pages),
        page_range=page_range,
        widths=limits.max_pages,
    )


def csr_lens(kv_lens: Sequence[int], page_size: int) -> CsrLens:
    """Offsets and last pages of requests with these lengths."""
    num_pages = [-(-kv_len // page_size) for kv_len in kv_lens]
    last = [
        kv_len - page_size * max(pages - 1, 0)
        for kv_len, pages in zip(kv_lens, num_pages, strict=True)
    ]
    return CsrLens(
        kv_indptr=torch.tensor([0, *accumulate(num_pages)], dtype=torch.int32),
        last_page_len=torch.tensor(last, dtype=torch.int32),
    )


def derive_indices(kv_indptr: Tensor, page_table: Tensor, page_range: Tensor, out: Tensor) -> None:
    """Write one group's page ids behind one another.  Device-only, static shapes.

    kv_indptr: [padded_reqs + 1] int32; page_table: [padded_reqs, max_pages] int32; page_range:
    [at least max_pages] int32; out: [at least padded_reqs * max_pages + 1] int32, mutated.
    """
    reqs, width = page_table.shape
    tail = reqs * width  # one entry behind the list takes every unused table entry
    starts = kv_indptr[:-1].unsqueeze(1)
    columns = page_range[:width]
    is_used = columns < kv_indptr[1:].unsqueeze(1) - starts
    target = torch.where(is_used, starts + columns, tail)
    out[:tail].fill_(PAD_PAGE)
    out.index_copy_(0, target.view(-1).long(), page_table.reshape(-1))


def derive_lists(
    tables: Mapping[int, Tensor], csr: CsrBuffers, *, is_prefix: bool, chunk: Chunk | None = None
) -> tuple[CsrPlan, ...]:
    """Write groups' page ids by the offsets in `csr`; returns the lists as kernels read them.

    tables: [padded_reqs, max_pages] int32, by group.  Device-only, static shapes.
    """
    lists = []
    for number, table in tables.items():
        out, indptr = csr.kv_indices[number], csr.kv_indptr[: table.shape[0] + 1]
        derive_indices(indptr, table, csr.page_range, out)
        lists.append(
            CsrPlan(
                group=number,
                chunk=chunk,
                kv_indptr=indptr,
                kv_indices=out[: table.numel()],
                last_page_len=csr.last_page_len[: table.shape[0]],
                is_prefix=is_prefix,
            )
        )
    return tuple(lists)


def group_tables(view: StepView, csr: CsrBuffers) -> dict[int, Tensor]:
    """[padded_reqs, max_pages] int32, the view's own, of each group in `csr`."""
    widths = enumerate(csr.widths)
    return {number: view.groups[number].page_table for number, width in widths if width}
