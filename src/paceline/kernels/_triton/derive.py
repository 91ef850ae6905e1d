"""Triton kernel of derive_rows over the request table; see kernels/derive.py for the definition.

`store_lens` and `store_slots` serve a pass of a drafter too (_triton/derive_pass.py).
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from paceline.core.padding import PAD_ROW, PAD_SLOT
from paceline.core.step import FinishCode
from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.runtime import cdiv
from paceline.kernels.derive import TableRows

_BLOCK = 1024  # requests summed at once, and page-table entries copied by a program
_FEW_TOKENS = 16  # decode and verify: tokens of a request that one program derives
_MANY_TOKENS = 512  # prefill


@triton.jit
def _tokens_before(
    facts_ptr,  # [padded_reqs, 3] int32
    req,
    stride_facts,
    BLOCK: tl.constexpr,
):
    """Tokens of the requests before `req`."""
    total = 0
    for first in range(0, req, BLOCK):
        reqs = first + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(facts_ptr + reqs * stride_facts + 1, mask=reqs < req, other=0))
    return total


@triton.jit
def store_lens(
    prefix_lens_ptr,  # [padded_reqs] int32
    extend_lens_ptr,  # [padded_reqs] int32
    kv_lens_ptr,  # [padded_reqs] int32
    cu_seqlens_q_ptr,  # [padded_reqs + 1] int32
    logits_loc_ptr,  # [padded_reqs] int64
    req,
    prefix,
    extend,
    start,  # tokens of the requests before
):
    """What a view says of one request."""
    tl.store(prefix_lens_ptr + req, prefix)
    tl.store(extend_lens_ptr + req, extend)
    tl.store(kv_lens_ptr + req, prefix + extend)
    tl.store(cu_seqlens_q_ptr + req + 1, start + extend)
    tl.store(logits_loc_ptr + req, (start + extend - 1).to(tl.int64))


@triton.jit
def store_slots(
    pages_ptr,  # [max_pages] int32, of one request
    loc_ptr,  # [padded_tokens] int64
    tokens,  # [BLOCK] index within the step
    places,  # [BLOCK] prefix + row of the request
    is_token,  # [BLOCK] bool
    is_live,
    PAGE_SIZE: tl.constexpr,
    PAD_SLOT: tl.constexpr,
):
    """Where the KV of a request's tokens goes in one group."""
    page = tl.load(pages_ptr + places // PAGE_SIZE, mask=is_token, other=0).to(tl.int64)
    slots = tl.where(is_live, page * PAGE_SIZE + places % PAGE_SIZE, PAD_SLOT)
    tl.store(loc_ptr + tokens, slots, mask=is_token)


@triton.jit
def _derive_group(
    table_ptr,  # [rows, max_pages] int32
    table_out_ptr,  # [padded_reqs, max_pages] int32
    loc_out_ptr,  # [padded_tokens] int64
    stride_table_row,
    stride_table_out_req,
    width,  # max_pages
    req,
    row,  # int64
    tokens,  # [BLOCK_TOKENS] int64 index within the step
    positions,  # [BLOCK_TOKENS] int64
    is_token,  # [BLOCK_TOKENS] bool
    PAGE_SIZE: tl.constexpr,
    PAD_ROW: tl.constexpr,
    PAD_SLOT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """This program's chunk of the request's page-table row, and the slots of its tokens."""
    pages = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_page = pages < width
    pages_ptr = table_ptr + row * stride_table_row
    ids = tl.load(pages_ptr + pages, mask=is_page, other=0)
    out_ptrs = table_out_ptr + req.to(tl.int64) * stride_table_out_req + pages
    tl.store(out_ptrs, ids, mask=is_page)
    if PAGE_SIZE:  # of a STATE group tokens have no slots
        is_live = row != PAD_ROW
        store_slots(
            pages_ptr, loc_out_ptr, tokens, positions, is_token, is_live, PAGE_SIZE, PAD_SLOT
        )


@triton.jit
def _derive_kernel(
    facts_ptr,  # [padded_reqs, 3] int32
    kv_committed_ptr,  # [rows] int32
    finish_ptr,  # [rows] int32
    token_ids_ptr,  # [rows, max_tokens] int32
    row_ids_ptr,  # [padded_reqs] int64
    prefix_lens_ptr,  # [padded_reqs] int32
    extend_lens_ptr,  # [padded_reqs] int32
    kv_lens_ptr,  # [padded_reqs] int32
    cu_seqlens_q_ptr,  # [padded_reqs + 1] int32
    logits_loc_ptr,  # [padded_reqs] int64
    req_ids_ptr,  # [padded_tokens] int64
    positions_ptr,  # [padded_tokens] int64
    input_ids_ptr,  # [padded_tokens] int64
    table_a_ptr,  # [rows, max_pages] int32, of a group; None where no layer caches anything
    table_out_a_ptr,  # [padded_reqs, max_pages] int32
    loc_out_a_ptr,  # [padded_tokens] int64
    table_b_ptr,  # the same of another group, used when HAS_B
    table_out_b_ptr,
    loc_out_b_ptr,
    stride_facts,
    stride_kv_committed,
    stride_finish,
    stride_token_ids_row,
    stride_table_a_row,
    stride_table_out_a_req,
    stride_table_b_row,
    stride_table_out_b_req,
    width_a,
    width_b,
    PAGE_SIZE_A: tl.constexpr,
    PAGE_SIZE_B: tl.constexpr,
    HAS_B: tl.constexpr,
    RUNNING: tl.constexpr,
    PAD_ROW: tl.constexpr,
    PAD_SLOT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    let_next_start(OVERLAPPED)
    req = tl.program_id(0)
    start = _tokens_before(facts_ptr, req, stride_facts, BLOCK)
    staged_row = tl.load(facts_ptr + req * stride_facts).to(tl.int64)
    extend = tl.load(facts_ptr + req * stride_facts + 1)
    is_running = tl.load(finish_ptr + staged_row * stride_finish) == RUNNING
    row = tl.where(is_running, staged_row, PAD_ROW)
    prefix = tl.load(kv_committed_ptr + row * stride_kv_committed)
    if tl.program_id(1) == 0:
        tl.store(row_ids_ptr + req, row)
        store_lens(
            prefix_lens_ptr,
            extend_lens_ptr,
            kv_lens_ptr,
            cu_seqlens_q_ptr,
            logits_loc_ptr,
            req,
            prefix,
            extend,
            start,
        )

    offsets = tl.program_id(1) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    is_token = offsets < extend
    tokens = (start + offsets).to(tl.int64)
    positions = (prefix + offsets).to(tl.int64)
    tl.store(req_ids_ptr + tokens, tl.zeros_like(tokens) + req, mask=is_token)
    tl.store(positions_ptr + tokens, positions, mask=is_token)
    history_ptr = token_ids_ptr + row * stride_token_ids_row
    ids = tl.load(history_ptr + positions, mask=is_token, other=0)
    tl.store(input_ids_ptr + tokens, ids.to(tl.int64), mask=is_token)
    if table_a_ptr is not None:
        _derive_group(
            table_a_ptr,
            table_out_a_ptr,
            loc_out_a_ptr,
            stride_table_a_row,
            stride_table_out_a_req,
            width_a,
            req,
            row,
            tokens,
            positions,
            is_token,
            PAGE_SIZE_A,
            PAD_ROW,
            PAD_SLOT,
            BLOCK,
        )
    if HAS_B:
        _derive_group(
            table_b_ptr,
            table_out_b_ptr,
            loc_out_b_ptr,
            stride_table_b_row,
            stride_table_out_b_req,
            width_b,
            req,
            row,
            tokens,
            positions,
            is_token,
            PAGE_SIZE_B,
            PAD_ROW,
            PAD_SLOT,
            BLOCK,
        )


def launch_derive(
    source: TableRows,
    derived: Sequence[Tensor],
    groups: Sequence[tuple[Tensor | None, Tensor | None, Tensor | None, int]],
    *,
    max_extend_len: int,
    block: int = _BLOCK,
) -> None:
    """One program per request and chunk of tokens or pages; one launch per two groups, of which
    each writes the lengths and positions; one where there are none.

    derived: the kernel's outputs from row_ids to input_ids; groups: (table of the requests, page
    table and slots of the step, page size).
    """
    columns = source[:4]
    strides = [tensor.stride(0) for tensor in columns]
    widest = max((table.shape[1] for table in source.page_tables), default=0)
    block_tokens = _FEW_TOKENS if max_extend_len <= _FEW_TOKENS else _MANY_TOKENS
    chunks = max(cdiv(max_extend_len, block_tokens), cdiv(widest, block))
    groups = groups or [(None, None, None, 0)]
    for first in range(0, len(groups), 2):
        a, b = groups[first], groups[min(first + 1, len(groups) - 1)]
        launch(
            _derive_kernel,
            (derived[0].shape[0], chunks),
            *columns,
            *derived,
            *a[:3],
            *b[:3],
            *strides,
            *(0 if table is None else table.stride(0) for table in (*a[:2], *b[:2])),
            *(0 if table is None else table.shape[1] for table in (a[0], b[0])),
            PAGE_SIZE_A=a[3],
            PAGE_SIZE_B=b[3],
            HAS_B=first + 1 < len(groups),
            RUNNING=int(FinishCode.RUNNING),
            PAD_ROW=PAD_ROW,
            PAD_SLOT=PAD_SLOT,
            BLOCK=block,
            BLOCK_TOKENS=block_tokens,
            num_warps=4,
            **overlap_options(source.facts.device, _derive_kernel),
        )
