"""Triton kernel of derive_rows over a pass of a drafter; see kernels/derive.py."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.core.padding import PAD_PREFIX_LEN, PAD_ROW, PAD_SLOT
from paceline.kernels._triton.derive import store_lens, store_slots
from paceline.kernels._triton.derive_tree import ancestors
from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.runtime import next_power_of_2
from paceline.kernels.derive import PassRows

_ONE_WARP = 32  # rows of a tree whose mask one warp holds in registers


@triton.jit
def _derive_pass_kernel(
    committed_ptr,  # [padded_reqs] int32
    parents_ptr,  # [padded_reqs, rows] int32, used when HAS_TREE
    row_ids_ptr,  # [padded_reqs] int64
    prefix_lens_ptr,  # [padded_reqs] int32
    extend_lens_ptr,  # [padded_reqs] int32
    kv_lens_ptr,  # [padded_reqs] int32
    cu_seqlens_q_ptr,  # [padded_reqs + 1] int32
    logits_loc_ptr,  # [padded_reqs] int64
    req_ids_ptr,  # [padded_reqs * rows] int64
    positions_ptr,  # [padded_reqs * rows] int64
    tree_mask_ptr,  # [padded_reqs * rows, rows] uint8, used when HAS_TREE
    table_a_ptr,  # [padded_reqs, max_pages] int32, of a group
    loc_a_ptr,  # [padded_reqs * rows] int64
    table_b_ptr,  # the same of another group, used when HAS_B
    loc_b_ptr,
    stride_table_a_req,
    stride_table_b_req,
    rows,
    advance,
    HAS_TREE: tl.constexpr,
    HAS_B: tl.constexpr,
    PAGE_SIZE_A: tl.constexpr,
    PAGE_SIZE_B: tl.constexpr,
    PAD_ROW: tl.constexpr,
    PAD_SLOT: tl.constexpr,
    PAD_PREFIX_LEN: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    let_next_start(OVERLAPPED)
    req = tl.program_id(0)
    is_live = tl.load(row_ids_ptr + req) != PAD_ROW
    prefix = tl.where(is_live, tl.load(committed_ptr + req) + advance, PAD_PREFIX_LEN)
    first = req * rows
    tl.store(cu_seqlens_q_ptr, 0, mask=req == 0)
    store_lens(
        prefix_lens_ptr,
        extend_lens_ptr,
        kv_lens_ptr,
        cu_seqlens_q_ptr,
        logits_loc_ptr,
        req,
        prefix,
        rows,
        first,
    )

    columns = tl.arange(0, BLOCK)
    is_row = columns < rows
    tokens = first + columns
    places = prefix + columns
    tl.store(req_ids_ptr + tokens, tl.zeros([BLOCK], dtype=tl.int64) + req, mask=is_row)
    pages_ptr = table_a_ptr + req.to(tl.int64) * stride_table_a_req
    store_slots(pages_ptr, loc_a_ptr, tokens, places, is_row, is_live, PAGE_SIZE_A, PAD_SLOT)
    if HAS_B:
        pages_ptr = table_b_ptr + req.to(tl.int64) * stride_table_b_req
        store_slots(pages_ptr, loc_b_ptr, tokens, places, is_row, is_live, PAGE_SIZE_B, PAD_SLOT)
    positions = places
    if HAS_TREE:
        nodes = tl.where(is_row, columns, -1)
        is_seen, depths = ancestors(parents_ptr + first, nodes, columns, rows)
        positions = prefix + depths
        mask_ptrs = tree_mask_ptr + tokens.to(tl.int64)[:, None] * rows + columns[None, :]
        tl.store(mask_ptrs, is_seen.to(tl.uint8), mask=is_row[:, None] & is_row[None, :])
    tl.store(positions_ptr + tokens, positions.to(tl.int64), mask=is_row)


def launch_derive_pass(
    source: PassRows,
    derived: Sequence[Tensor],
    groups: Sequence[tuple[Tensor, Tensor, int]],
    *,
    tree_mask: Tensor | None,
) -> None:
    """One program per request; one launch per two groups, each of which writes everything else.

    derived: the kernel's arguments from row_ids to positions; groups: (page table, slots, page
    size).
    """
    reqs, positions = derived[0].shape[0], derived[-1]
    rows = positions.shape[0] // reqs
    block = next_power_of_2(rows)
    parents, mask = source.committed, source.committed  # of a chain: never read
    if source.parents is not None and tree_mask is not None:
        parents, mask = source.parents, tree_mask.view(torch.uint8)
    for first in range(0, len(groups), 2):
        a, b = groups[first], groups[min(first + 1, len(groups) - 1)]
        launch(
            _derive_pass_kernel,
            (reqs,),
            source.committed,
            parents,
            *derived,
            mask,
            *a[:2],
            *b[:2],
            a[0].stride(0),
            b[0].stride(0),
            rows,
            source.advance,
            HAS_TREE=source.parents is not None,
            HAS_B=first + 1 < len(groups),
            PAGE_SIZE_A=a[2],
            PAGE_SIZE_B=b[2],
            PAD_ROW=PAD_ROW,
            PAD_SLOT=PAD_SLOT,
            PAD_PREFIX_LEN=PAD_PREFIX_LEN,
            BLOCK=block,
            num_warps=1 if block <= _ONE_WARP else 4,
            **overlap_options(positions.device, _derive_pass_kernel),
        )
