"""Triton kernel of prefix_rows; see kernels/prefix_rows.py for the definition.

A program copies BLOCK_ROWS rows; each finds its request among the starts.
"""

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.runtime import cdiv, next_power_of_2

_BLOCK_ROWS = 8
_BLOCK_REQS = 64  # starts that are looked at together


@triton.jit(do_not_specialize=["page_table_ptr", "first", "reqs", "num_rows"])
def _prefix_rows_kernel(
    cache_ptr,  # [num_pages, PAGE_SIZE, 1, WIDTH]
    page_table_ptr,  # [reqs, max_pages] int32
    starts_ptr,  # [reqs + 1] int32
    out_ptr,  # [num_rows, WIDTH]
    stride_cache_page,
    stride_cache_slot,
    stride_table,
    first,
    reqs,
    num_rows,
    PAGE_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_REQS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    request = tl.full([BLOCK_ROWS], -1, tl.int32)
    for begin in range(0, reqs + 1, BLOCK_REQS):
        requests = begin + tl.arange(0, BLOCK_REQS)
        starts = tl.load(starts_ptr + requests, mask=requests <= reqs, other=0)
        begun = (starts[None, :] <= rows[:, None]) & (requests <= reqs)[None, :]
        request += tl.sum(begun.to(tl.int32), 1)
    live = request < reqs
    position = rows - tl.load(starts_ptr + request) + first
    page = tl.load(
        page_table_ptr + request.to(tl.int64) * stride_table + position // PAGE_SIZE,
        mask=live,
        other=0,
    )
    cols = tl.arange(0, BLOCK_WIDTH)
    is_col = (cols < WIDTH)[None, :]
    row_ptrs = (
        cache_ptr + page.to(tl.int64) * stride_cache_page + position % PAGE_SIZE * stride_cache_slot
    )
    found = tl.load(row_ptrs[:, None] + cols[None, :], mask=live[:, None] & is_col, other=0.0)
    let_next_start(OVERLAPPED)
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * WIDTH + cols[None, :]
    tl.store(out_ptrs, found, mask=(rows < num_rows)[:, None] & is_col)


def launch_prefix_rows(
    cache: Tensor, page_table: Tensor, starts: Tensor, first: int, out: Tensor
) -> None:
    """One program per BLOCK_ROWS rows; arguments as checked by kernels/prefix_rows.py."""
    (num_rows, width), reqs = out.shape, page_table.shape[0]
    if not num_rows:
        return
    launch(
        _prefix_rows_kernel,
        (cdiv(num_rows, _BLOCK_ROWS),),
        cache,
        page_table,
        starts,
        out,
        cache.stride(0),
        cache.stride(1),
        page_table.stride(0),
        first,
        reqs,
        num_rows,
        PAGE_SIZE=cache.shape[1],
        WIDTH=width,
        BLOCK_ROWS=_BLOCK_ROWS,
        BLOCK_REQS=_BLOCK_REQS,
        BLOCK_WIDTH=next_power_of_2(width),
        num_warps=4,
        **overlap_options(out.device, _prefix_rows_kernel),
    )
