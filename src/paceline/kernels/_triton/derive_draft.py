"""Triton kernel of derive_draft; see kernels/derive_draft.py for the definition."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from paceline.core.padding import PAD_PREFIX_LEN, PAD_ROW, PAD_SLOT
from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels.derive_draft import DraftBase, DraftRows

_ONE_WARP = 32  # rows of a tree whose mask one warp holds in registers


@triton.jit
def _draft_slots(
    table_ptr,  # [padded_reqs, max_pages] int32
    loc_ptr,  # [padded_reqs * rows] int64
    stride_table_req,
    req,
    tokens,  # [BLOCK] int32 index within the pass
    places,  # [BLOCK] int32 prefix + row
    is_row,  # [BLOCK] bool
    is_live,
    PAGE_SIZE: tl.constexpr,
    PAD_SLOT: tl.constexpr,
):
    """The slots of a request's rows in one group."""
    page_ptrs = table_ptr + req.to(tl.int64) * stride_table_req + places // PAGE_SIZE
    page = tl.load(page_ptrs, mask=is_row, other=0).to(tl.int64)
    slots = tl.where(is_live, page * PAGE_SIZE + places % PAGE_SIZE, PAD_SLOT)
    tl.store(loc_ptr + tokens, slots, mask=is_row)


@triton.jit
def _derive_draft_kernel(
    row_ids_ptr,  # [padded_reqs] int64
    committed_ptr,  # [padded_reqs] int32
    parents_ptr,  # [padded_reqs, rows] int32, used when HAS_TREE
    prefix_lens_ptr,  # [padded_reqs] int32
    extend_lens_ptr,  # [padded_reqs] int32
    kv_lens_ptr,  # [padded_reqs] int32
    cu_seqlens_q_ptr,  # [padded_reqs + 1] int32
    req_ids_ptr,  # [padded_reqs * rows] int64
    positions_ptr,  # [padded_reqs * rows] int64
    logits_loc_ptr,  # [padded_reqs] int64
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
    tl.store(prefix_lens_ptr + req, prefix)
    tl.store(extend_lens_ptr + req, rows)
    tl.store(kv_lens_ptr + req, prefix + rows)
    tl.store(cu_seqlens_q_ptr, 0, mask=req == 0)
    tl.store(cu_seqlens_q_ptr + req + 1, first + rows)
    tl.store(logits_loc_ptr + req, (first + rows - 1).to(tl.int64))

    columns = tl.arange(0, BLOCK)
    is_row = columns < rows
    tokens = first + columns
    places = prefix + columns
    tl.store(req_ids_ptr + tokens, tl.zeros([BLOCK], dtype=tl.int64) + req, mask=is_row)
    _draft_slots(
        table_a_ptr,
        loc_a_ptr,
        stride_table_a_req,
        req,
        tokens,
        places,
        is_row,
        is_live,
        PAGE_SIZE_A,
        PAD_SLOT,
    )
    if HAS_B:
        _draft_slots(
            table_b_ptr,
            loc_b_ptr,
            stride_table_b_req,
            req,
            tokens,
            places,
            is_row,
            is_live,
            PAGE_SIZE_B,
            PAD_SLOT,
        )
    positions = places
    if HAS_TREE:
        nodes = tl.where(is_row, columns, -1)
        depths = tl.zeros([BLOCK], dtype=tl.int32) - 1
        is_seen = columns[:, None] == columns[None, :]
        generation = 0
        while (generation < rows) & (tl.max(nodes, axis=0) >= 0):
            is_seen = is_seen | (nodes[:, None] == columns[None, :])
            depths += tl.where(nodes >= 0, 1, 0)
            nodes = tl.load(parents_ptr + first + nodes, mask=nodes >= 0, other=-1)
            generation += 1
        positions = prefix + depths
        mask_ptrs = tree_mask_ptr + tokens.to(tl.int64)[:, None] * rows + columns[None, :]
        tl.store(mask_ptrs, is_seen.to(tl.uint8), mask=is_row[:, None] & is_row[None, :])
    tl.store(positions_ptr + tokens, positions.to(tl.int64), mask=is_row)


def launch_derive_draft(
    base: DraftBase, out: DraftRows, *, advance: int, page_sizes: Sequence[int]
) -> None:
    """One program per request; one launch per two groups, each of which writes everything else."""
    reqs = base.row_ids.shape[0]
    rows = out.positions.shape[0] // reqs
    block = triton.next_power_of_2(rows)
    parents, mask = base.prefix_lens, base.prefix_lens  # of a chain: never read
    if base.parents is not None and out.tree_mask is not None:
        parents, mask = base.parents, out.tree_mask.view(torch.uint8)
    groups = [*zip(base.page_tables, out.out_cache_locs, page_sizes, strict=True)]
    for first in range(0, len(groups), 2):
        a, b = groups[first], groups[min(first + 1, len(groups) - 1)]
        launch(
            _derive_draft_kernel,
            (reqs,),
            base.row_ids,
            base.prefix_lens,
            parents,
            *out[:7],
            mask,
            *a[:2],
            *b[:2],
            a[0].stride(0),
            b[0].stride(0),
            rows,
            advance,
            HAS_TREE=base.parents is not None,
            HAS_B=first + 1 < len(groups),
            PAGE_SIZE_A=a[2],
            PAGE_SIZE_B=b[2],
            PAD_ROW=PAD_ROW,
            PAD_SLOT=PAD_SLOT,
            PAD_PREFIX_LEN=PAD_PREFIX_LEN,
            BLOCK=block,
            num_warps=1 if block <= _ONE_WARP else 4,
            **overlap_options(out.positions.device, _derive_draft_kernel),
        )
