"""Triton kernels of shared prefixes; see kernels/paged_attention/shared_prefix.py.

A tile is some requests of one group with the query heads of one KV head as rows of one matrix:
their shared keys are read once for all of them.  Its partial results lie behind those of a decode's
splits, `chunks` rows for each request; the decode's program that finishes a request adds them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.attend_split import attend_split, chunks_of
from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.primitives import lookup_pages, narrow_query
from paceline.kernels._triton.runtime import (
    block_dim,
    interpreted,
    keys_per_stage,
    next_power_of_2,
    require_runnable,
)
from paceline.kernels._triton.split_merge import store_partial
from paceline.kernels.paged_attention.call import PagedCall
from paceline.kernels.paged_attention.shared_prefix import (
    CHUNK_KEYS,
    SharedPrefixes,
    SharingRule,
)
from paceline.kernels.paged_attention.splits import SplitWorkspace

_PAGES = 128  # compared at a time


@triton.jit(do_not_specialize=["num_reqs"])
def _shared_common_kernel(
    page_table_ptr,  # [reqs, max_pages] int32
    kv_lens_ptr,  # [reqs] int32
    leaders_ptr,  # [reqs] int32
    common_ptr,  # [reqs] int32
    stride_page_table_req,
    max_pages,
    num_reqs,
    PAGE_SIZE: tl.constexpr,
    MIN_PAGES: tl.constexpr,
    BLOCK_REQS: tl.constexpr,
    BLOCK_PAGES: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Who leads one request's group, and how many pages they have in common."""
    wait_for_inputs(OVERLAPPED)
    req = tl.program_id(0)
    reqs = tl.arange(0, BLOCK_REQS)
    lens = tl.load(kv_lens_ptr + reqs, mask=reqs < num_reqs, other=0)
    whole = tl.minimum(tl.maximum(lens - 1, 0) // PAGE_SIZE, max_pages)
    is_long = whole >= MIN_PAGES
    key = tl.load(
        page_table_ptr + reqs.to(tl.int64) * stride_page_table_req + (MIN_PAGES - 1),
        mask=is_long,
        other=-1,
    )
    own_key = tl.max(tl.where(reqs == req, key, -1), axis=0)
    own_whole = tl.max(tl.where(reqs == req, whole, 0), axis=0)
    leader = tl.min(tl.where(is_long & (key == own_key), reqs, BLOCK_REQS), axis=0)
    most = tl.minimum(own_whole, tl.max(tl.where(reqs == leader, whole, 0), axis=0))
    common = most
    if leader < req:
        own_ptr = page_table_ptr + req.to(tl.int64) * stride_page_table_req
        other_ptr = page_table_ptr + leader.to(tl.int64) * stride_page_table_req
        for first in range(0, most, BLOCK_PAGES):
            column = first + tl.arange(0, BLOCK_PAGES)
            mine = tl.load(own_ptr + column, mask=column < most, other=0)
            theirs = tl.load(other_ptr + column, mask=column < most, other=0)
            common = tl.minimum(common, tl.min(tl.where(mine != theirs, column, most), axis=0))
    let_next_start(OVERLAPPED)
    tl.store(leaders_ptr + req, tl.where(own_key >= 0, leader, -1))
    tl.store(common_ptr + req, common)


@triton.jit(do_not_specialize=["num_reqs"])
def _shared_group_kernel(
    leaders_ptr,  # [reqs] int32
    common_ptr,  # [reqs] int32
    shared_lens_ptr,  # [reqs] int32
    held_ptr,  # [reqs] int32
    places_ptr,  # [reqs] int32, within the group
    num_reqs,
    PAGE_SIZE: tl.constexpr,
    MIN_PAGES: tl.constexpr,
    MIN_REQS: tl.constexpr,
    BLOCK_REQS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """What one request shares with its group, and how many are in it before it and in all."""
    wait_for_inputs(OVERLAPPED)
    req = tl.program_id(0)
    reqs = tl.arange(0, BLOCK_REQS)
    leader = tl.load(leaders_ptr + req)
    own_common = tl.load(common_ptr + req)
    leaders = tl.load(leaders_ptr + reqs, mask=reqs < num_reqs, other=-2)
    common = tl.load(common_ptr + reqs, mask=reqs < num_reqs, other=0)
    is_same = leaders == leader
    closest = tl.max(tl.where(is_same & (reqs != leader), common, 0), axis=0)
    is_in = is_same & (2 * common >= closest)
    held = tl.sum(is_in.to(tl.int32), axis=0)
    least = tl.min(tl.where(is_in, common, 1 << 30), axis=0)
    rank = tl.sum((is_in & (reqs < req)).to(tl.int32), axis=0)
    shares = (leader >= 0) & (2 * own_common >= closest) & (closest > 0)
    shares = shares & (held >= MIN_REQS) & (least >= MIN_PAGES)
    let_next_start(OVERLAPPED)
    tl.store(shared_lens_ptr + req, tl.where(shares, least * PAGE_SIZE, 0))
    tl.store(held_ptr + req, held)
    tl.store(places_ptr + req, tl.where(shares, rank, -1))


@triton.jit(do_not_specialize=["num_reqs"])
def _shared_place_kernel(
    leaders_ptr,  # [reqs] int32
    held_ptr,  # [reqs] int32
    places_ptr,  # [reqs] int32, within the group; then in the tiles of all
    num_reqs,
    TILE_REQS: tl.constexpr,
    BLOCK_REQS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Groups behind one another, each from a tile of its own on; one program."""
    wait_for_inputs(OVERLAPPED)
    reqs = tl.arange(0, BLOCK_REQS)
    is_req = reqs < num_reqs
    leader = tl.load(leaders_ptr + reqs, mask=is_req, other=-1)
    rank = tl.load(places_ptr + reqs, mask=is_req, other=-1)
    held = tl.load(held_ptr + reqs, mask=is_req, other=0)
    tiles = tl.where((rank >= 0) & (leader == reqs), tl.cdiv(held, TILE_REQS), 0)
    before = tl.cumsum(tiles, axis=0) - tiles
    first_tile = tl.gather(before, tl.maximum(leader, 0), 0)
    let_next_start(OVERLAPPED)
    place = first_tile * TILE_REQS + rank
    tl.store(places_ptr + reqs, tl.where(rank >= 0, place, -1), mask=is_req)


def _block_reqs(num_reqs: int) -> int:
    """One for most sizes, so that few variants are compiled."""
    return max(256, next_power_of_2(num_reqs))


def launch_find_shared(
    page_table: Tensor,
    kv_lens: Tensor,
    into: SharedPrefixes,
    rule: SharingRule,
    *,
    page_size: int,
) -> None:
    """Two programs per request, and one for all."""
    require_runnable(
        "page_table of find_shared", page_table, _shared_common_kernel, otherwise="turn sharing off"
    )
    num_reqs, max_pages = page_table.shape
    block_reqs = _block_reqs(num_reqs)
    launch(
        _shared_common_kernel,
        (num_reqs,),
        page_table,
        kv_lens,
        into.leaders,
        into.common,
        page_table.stride(0),
        max_pages,
        num_reqs,
        PAGE_SIZE=page_size,
        MIN_PAGES=rule.min_pages,
        BLOCK_REQS=block_reqs,
        BLOCK_PAGES=_PAGES,
        **overlap_options(page_table.device, _shared_common_kernel),
        num_warps=1,
    )
    launch(
        _shared_group_kernel,
        (num_reqs,),
        into.leaders,
        into.common,
        into.shared_lens,
        into.held,
        into.places,
        num_reqs,
        PAGE_SIZE=page_size,
        MIN_PAGES=rule.min_pages,
        MIN_REQS=rule.min_reqs,
        BLOCK_REQS=block_reqs,
        **overlap_options(page_table.device, _shared_group_kernel),
        num_warps=1,
    )
    launch(
        _shared_place_kernel,
        (1,),
        into.leaders,
        into.held,
        into.places,
        num_reqs,
        TILE_REQS=rule.tile_reqs,
        BLOCK_REQS=block_reqs,
        **overlap_options(page_table.device, _shared_place_kernel),
        num_warps=1,
    )


@triton.jit(do_not_specialize=["num_reqs", "first_partial", "chunks"])
def _shared_decode_kernel(
    q_ptr,  # [reqs, heads, head_dim]
    k_cache_ptr,  # [num_pages, page_size, kv_heads, head_dim]
    v_cache_ptr,  # [num_pages, page_size, kv_heads, v_head_dim]
    page_table_ptr,  # [reqs, max_pages] int32
    shared_lens_ptr,  # [reqs] int32
    places_ptr,  # [reqs] int32
    k_scale_ptr,  # [1] float32 or None
    v_scale_ptr,  # [1] float32 or None
    partial_out_ptr,  # [slots + reqs * chunks, heads, v_head_dim] float32
    partial_lse_ptr,  # [slots + reqs * chunks, heads] float32, log2 units
    stride_q_req,
    stride_q_head,
    stride_k_page,
    stride_k_slot,
    stride_k_head,
    stride_v_page,
    stride_v_slot,
    stride_v_head,
    stride_page_table_req,
    max_pages,
    heads,
    kv_heads,
    scale,
    num_reqs,
    first_partial,  # slots
    chunks,
    SOFT_CAP: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    TILE_REQS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    DIM_K: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_DIM_K: tl.constexpr,
    BLOCK_DIM_V: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,  # at least TILE_REQS * BLOCK_GROUP
    BLOCK_KEYS: tl.constexpr,
    CHUNK_KEYS: tl.constexpr,
    BLOCK_REQS: tl.constexpr,
    WIDEN: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """One chunk of the keys of one group, for some of its requests and one KV head."""
    wait_for_inputs(OVERLAPPED)
    reqs = tl.arange(0, BLOCK_REQS)
    places = tl.load(places_ptr + reqs, mask=reqs < num_reqs, other=-1)
    member = tl.where(places >= 0, places - tl.program_id(1) * TILE_REQS, -1)
    is_member = (member >= 0) & (member < TILE_REQS)
    held = tl.sum(is_member.to(tl.int32), axis=0)
    if held == 0:
        return
    any_req = tl.max(tl.where(is_member, reqs, 0), axis=0)
    shared_len = tl.load(shared_lens_ptr + any_req)
    live_chunks = chunks_of(shared_len, chunks, CHUNK_KEYS)
    chunk = tl.program_id(0) // kv_heads
    if chunk >= live_chunks:
        return
    begin = chunk * BLOCK_KEYS
    page_row_ptr = page_table_ptr + any_req.to(tl.int64) * stride_page_table_req
    page = lookup_pages(page_row_ptr, begin + tl.arange(0, BLOCK_KEYS), max_pages, PAGE_SIZE)
    kv_head = (tl.program_id(0) % kv_heads).to(tl.int64)
    rows = tl.arange(0, BLOCK_ROWS)
    row_member = rows // BLOCK_GROUP
    group_head = rows % BLOCK_GROUP
    is_it = (member[None, :] == row_member[:, None]) & is_member[None, :]
    req = tl.sum(tl.where(is_it, reqs[None, :], 0), axis=1).to(tl.int64)
    live = (row_member < held) & (row_member < TILE_REQS) & (group_head < GROUP)
    head = kv_head * GROUP + group_head
    cols_k = tl.arange(0, BLOCK_DIM_K)
    q = tl.load(
        q_ptr + (req * stride_q_req + head * stride_q_head)[:, None] + cols_k[None, :],
        mask=live[:, None] & (cols_k < DIM_K)[None, :],
        other=0.0,
    )
    if k_scale_ptr is not None:
        q, scale = narrow_query(q, scale * tl.load(k_scale_ptr))
    out, lse = attend_split(
        begin, shared_len, live_chunks * BLOCK_KEYS, page, q,
        k_cache_ptr + kv_head * stride_k_head, v_cache_ptr + kv_head * stride_v_head,
        page_row_ptr, max_pages,
        stride_k_page, stride_k_slot, stride_v_page, stride_v_slot, scale,
        SOFT_CAP, PAGE_SIZE, DIM_K, DIM_V, BLOCK_DIM_K, BLOCK_DIM_V, BLOCK_ROWS, BLOCK_KEYS, WIDEN,
    )  # fmt: skip
    let_next_start(OVERLAPPED)
    if v_scale_ptr is not None:
        out *= tl.load(v_scale_ptr)
    row = (first_partial + req * chunks + chunk) * heads + head
    store_partial(out, lse, partial_out_ptr, partial_lse_ptr, row, live, DIM_V, BLOCK_DIM_V)


def launch_shared(
    call: PagedCall,
    workspace: SplitWorkspace,
    shared_lens: Tensor,
    places: Tensor,
    rule: SharingRule,
    *,
    first_partial: int,
    chunks: int,
) -> None:
    """One program per KV head, tile and chunk; leaves partial results in the workspace."""
    q, cache, rows, weighing = call[:4]
    num_reqs, heads, head_dim = q.shape
    _, page_size, kv_heads, v_head_dim = cache.v.shape
    group = heads // kv_heads
    block_group = next_power_of_2(group)
    launch(
        _shared_decode_kernel,
        (kv_heads * chunks, rule.tiles(num_reqs)),
        q,
        cache.k,
        cache.v,
        rows.page_table,
        shared_lens,
        places,
        cache.k_scale,
        cache.v_scale,
        workspace.partial_out,
        workspace.partial_lse,
        *q.stride()[:2],
        *cache.k.stride()[:3],
        *cache.v.stride()[:3],
        rows.page_table.stride(0),
        rows.page_table.shape[1],
        heads,
        kv_heads,
        weighing.scale,
        num_reqs,
        first_partial,
        chunks,
        SOFT_CAP=weighing.soft_cap,
        GROUP=group,
        BLOCK_GROUP=block_group,
        TILE_REQS=rule.tile_reqs,
        PAGE_SIZE=page_size,
        DIM_K=head_dim,
        DIM_V=v_head_dim,
        BLOCK_DIM_K=block_dim(head_dim),
        BLOCK_DIM_V=block_dim(v_head_dim),
        BLOCK_ROWS=max(16, rule.tile_reqs * block_group),
        BLOCK_KEYS=min(64, keys_per_stage(head_dim, v_head_dim, cache.k.element_size())),
        CHUNK_KEYS=CHUNK_KEYS,
        BLOCK_REQS=_block_reqs(num_reqs),
        WIDEN=q.dtype == torch.bfloat16 and interpreted(_shared_decode_kernel),
        **overlap_options(q.device, _shared_decode_kernel),
        num_warps=4,
        num_stages=3,
    )
