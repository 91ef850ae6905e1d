"""The CSR layout: the pages of all requests in one list, with offsets per request.

Worked example: page size 4, table width 3.

    kv_lens        [9, 4]
    page_table     [[7, 2, 5], [9, 0, 0]]
    num_pages      [3, 1]                     ceil(kv_len / 4)
    kv_indptr      [0, 3, 4]
    kv_indices     [7, 2, 5, 9, -, -]         request r, page j: kv_indptr[r] + j; the rest is tail
    last_page_len  [1, 4]                     1..page_size
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.attention.contract import GroupView, Limits, StepView
from paceline.core.padding import PAD_PAGE


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CsrBuffers:
    """One group's CSR tensors at their maximum size."""

    kv_indptr: Tensor  # [max_reqs + 1]  int32
    kv_indices: Tensor  # [max_reqs * max_pages + 1]  int32  the last entry takes what is unused
    last_page_len: Tensor  # [max_reqs]  int32
    page_range: Tensor  # [max_pages]  int32  0, 1, 2, ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CsrGroup:
    """One group's CSR view of a step."""

    kv_indptr: Tensor  # [padded_reqs + 1]  int32  in pages; leading 0
    kv_indices: Tensor  # [padded_reqs * max_pages]  int32  page ids; PAD_PAGE behind the end
    last_page_len: Tensor  # [padded_reqs]  int32  1..page_size


def make_csr_buffers(limits: Limits) -> tuple[CsrBuffers, ...]:
    """Buffers for every cache group: [num_groups]."""

    def ints(size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32, device=limits.device)

    return tuple(
        CsrBuffers(
            kv_indptr=ints(limits.max_reqs + 1),
            kv_indices=ints(limits.max_reqs * width + 1),
            last_page_len=ints(limits.max_reqs),
            page_range=torch.arange(width, dtype=torch.int32, device=limits.device),
        )
        for width in limits.max_pages
    )


def derive_csr(
    view: StepView, group: GroupView, buffers: CsrBuffers, *, page_size: int
) -> CsrGroup:
    """Write one group's CSR lists in place.  Device-only, static shapes."""
    reqs, width = group.page_table.shape
    indptr = buffers.kv_indptr[: reqs + 1]
    num_pages = (view.kv_lens + (page_size - 1)) // page_size
    torch.cumsum(num_pages, 0, dtype=torch.int32, out=indptr[1:])

    tail = reqs * width  # one entry behind the list takes every unused table entry
    is_used = buffers.page_range < num_pages.unsqueeze(1)
    target = torch.where(is_used, indptr[:-1].unsqueeze(1) + buffers.page_range, tail)
    buffers.kv_indices[:tail].fill_(PAD_PAGE)
    flat = target.view(-1).long()
    buffers.kv_indices.index_copy_(0, flat, group.page_table.reshape(-1))

    last = buffers.last_page_len[:reqs]
    torch.sub(view.kv_lens, (num_pages - 1) * page_size, out=last)
    return CsrGroup(kv_indptr=indptr, kv_indices=buffers.kv_indices[:tail], last_page_len=last)
