"""Triton kernel of paged_decode; see kernels/paged_attention/decode.py.

Tiles of BLOCK_KEYS keys are dealt to the live splits of a request in turn.  The last of them to
finish merges all, in their order: the result does not depend on who it is.

Few requests have a fixed number of splits, of which the short ones leave some alone: a program
knows its first tile before it knows how long its request is.  Worked example, 4 splits, BLOCK_KEYS
64, MIN_TILES 1, kv_len 200, window 150: the visible keys are [50, 200) in 3 tiles; 3 splits are
live, split 0 takes [50, 114), split 1 [114, 178), split 2 [178, 200), and split 3 leaves at once.

Many requests have splits by their lengths, so that nobody waits for the longest: as many as are
worked on in as few turns as hold the requests, none with more tiles than that takes, to an eighth;
requests of one tile, as of padding, do not count.  Where a split would have two equal shares all
the same, there is one turn more, of at most one split for each.  The fuller ones come first:
whoever has done with a short one takes of the rest.  Worked example, turns of 4 slots, 7 launched,
BLOCK_KEYS 64, MIN_TILES 1, kv_lens 100, 900, 200 in 2, 15 and 4 tiles: 2 * 21 // 4 tiles give 1, 2
and 1 splits, and so do 8, but 7 five.  The first two slots are of the second request, then comes
the third, which has half of 8, then the first; programs of further slots leave at once.  Where
nobody is worth two splits, or one turn holds the requests and none has two shares of it, or more
turns hold no halves, as with equal lengths, slot n is request n, uncounted.

Of a prefix that many requests share (kernels/paged_attention/shared_prefix.py) the keys were
attended to before: here they count for no length, and who finishes a request adds what they gave.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.attend_split import attend_split, chunks_of
from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.primitives import (
    apply_sinks,
    lookup_pages,
    narrow_query,
)
from paceline.kernels._triton.runtime import (
    SplitConfig,
    block_dim,
    cdiv,
    interpreted,
    keys_per_stage,
    next_power_of_2,
    require_runnable,
)
from paceline.kernels._triton.split_merge import (
    finishes_last,
    merge_splits,
    splits_per_load,
    store_partial,
)
from paceline.kernels.paged_attention.call import PagedCall
from paceline.kernels.paged_attention.shared_prefix import CHUNK_KEYS
from paceline.kernels.paged_attention.splits import SplitWorkspace, takes_one_warp

_NARROW_DIM, _SHORT_SPLITS = 64, 16  # columns of heads, and so many splits of one tile each


@triton.jit
def _add_shared(
    out,  # [rows, BLOCK_DIM_V] float32
    lse,  # [rows] float32, log2 units
    partial_out_ptr,  # [partial rows, v_head_dim] float32
    partial_lse_ptr,  # [partial rows] float32, log2 units
    first_row,  # [rows] int64 partial row of chunk 0
    stride_chunk,  # partial rows from one chunk to the next
    chunks,
    live,  # [rows] bool
    DIM_V: tl.constexpr,
    BLOCK_DIM_V: tl.constexpr,
):
    """(out, log2-sum-exp2) with the chunks of a shared prefix, in their order."""
    cols = tl.arange(0, BLOCK_DIM_V)
    wanted = live[:, None] & (cols < DIM_V)[None, :]
    for chunk in range(chunks):
        row = first_row + chunk * stride_chunk
        its_lse = tl.load(partial_lse_ptr + row, mask=live, other=float("-inf"))
        its_out = tl.load(
            partial_out_ptr + row[:, None] * DIM_V + cols[None, :], mask=wanted, other=0.0
        )
        largest = tl.maximum(lse, its_lse)
        finite = tl.where(largest == float("-inf"), 0.0, largest)
        weight, its_weight = tl.exp2(lse - finite), tl.exp2(its_lse - finite)
        total = weight + its_weight
        safe_total = tl.where(total == 0.0, 1.0, total)
        out = (out * weight[:, None] + its_out * its_weight[:, None]) / safe_total[:, None]
        lse = tl.where(total == 0.0, float("-inf"), finite + tl.log2(safe_total))
    return out, lse


@triton.jit
def _store_heads(
    out,  # [rows, BLOCK_DIM_V] float32
    lse,  # [rows] float32, log2 units
    out_row_ptr,  # [heads, v_head_dim] one request's
    lse_row_ptr,  # [heads] float32, one request's
    sinks_ptr,  # [heads] float32 or None
    stride_out_head,
    head,  # [rows]
    head_live,  # [rows] bool
    DIM_V: tl.constexpr,
    BLOCK_DIM_V: tl.constexpr,
):
    """The result of some heads of one request, in natural units."""
    if sinks_ptr is not None:
        out = apply_sinks(out, lse, sinks_ptr, head, head_live)
    cols = tl.arange(0, BLOCK_DIM_V)
    tl.store(
        out_row_ptr + head[:, None] * stride_out_head + cols[None, :],
        out.to(out_row_ptr.dtype.element_ty),
        mask=head_live[:, None] & (cols < DIM_V)[None, :],
    )
    tl.store(lse_row_ptr + head, lse * 0.6931471805599453, mask=head_live)


@triton.jit
def _sum_and_largest(sum_a, largest_a, sum_b, largest_b):
    return sum_a + sum_b, tl.maximum(largest_a, largest_b)


@triton.jit
def _splits_of(tiles, most):
    """[reqs] int32 splits of at most `most` of tiles; one of none, too."""
    # Half a tile off a whole number, no quotient is rounded to one or past it.
    return tl.maximum(tl.ceil((tiles - 0.5) * (1.0 / most)), 1.0).to(tl.int32)


@triton.jit
def _at_slot(
    slot,
    kv_lens_ptr,  # [reqs] int32
    shared_lens_ptr,  # [reqs] int32 or None
    num_reqs,
    turn,
    slots,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_REQS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    MIN_TILES: tl.constexpr,
):
    """(request, its length, what it shares of it, its first slot, its splits) of a slot; 0 splits:
    it is nobody's."""
    reqs = tl.arange(0, BLOCK_REQS)
    is_req = reqs < num_reqs
    lens = tl.load(kv_lens_ptr + reqs, mask=is_req, other=0)
    visible = lens
    if WINDOW is not None:
        visible = tl.minimum(lens, WINDOW)
    if CHUNK is not None:
        visible = lens - tl.maximum(lens - 1, 0) // CHUNK * CHUNK
    shared_lens = tl.zeros([BLOCK_REQS], tl.int32)
    if shared_lens_ptr is not None:
        shared_lens = tl.load(shared_lens_ptr + reqs, mask=is_req, other=0)
        visible = lens - shared_lens
    tiles = tl.cdiv(visible, BLOCK_KEYS)
    total, largest = tl.reduce((tiles, tiles), 0, _sum_and_largest)
    live = tl.sum((tiles > 1).to(tl.int32), axis=0)
    others = BLOCK_REQS - live  # rows, of one split each: those of padding leave at once
    turns = tl.cdiv(tl.maximum(live, 1), turn) * turn
    most = tl.maximum(2 * total // turns, MIN_TILES)
    fits = live <= turn
    # So many are the longest, or a tile shorter, that they have no room for halves.
    is_even = total - (num_reqs - live) + live * (2 - largest) > turns
    shared_len = 0
    if (largest < 2 * MIN_TILES) | ((largest < most) & (fits | is_even)):
        # One split each: the slot is the request, and there is nothing to count.
        is_live = slot < num_reqs
        kv_len = tl.load(kv_lens_ptr + slot, mask=is_live, other=0)
        if shared_lens_ptr is not None:
            shared_len = tl.load(shared_lens_ptr + slot, mask=is_live, other=0)
        req, first_slot, live_splits = slot, slot, is_live.to(tl.int32)
    else:
        if tl.sum(_splits_of(tiles, most), axis=0) > turns + others:
            turns = tl.minimum(turns + tl.minimum(live, turn), slots - num_reqs + live)
            most = tl.maximum(tl.cdiv(total, turns - live), MIN_TILES)
        most = tl.minimum(most, largest)
        least = tl.maximum(tl.cdiv(total, turns), MIN_TILES)
        while most - least > least // 8:
            middle = (least + most) // 2
            if tl.sum(_splits_of(tiles, middle), axis=0) <= turns + others:
                most = middle
            else:
                least = middle + 1
        splits = _splits_of(tiles, most)
        # Long ones first: slots of four classes, by fifths that they fill, are counted at once.
        fifth, filled = splits * most, 5 * tiles
        lacks = (filled <= 4 * fifth).to(tl.int32) + (filled <= 3 * fifth) + (filled <= 2 * fifth)
        shift = 16 * lacks.to(tl.int64)
        splits = tl.where(is_req, splits, 0)
        counted = splits.to(tl.int64) << shift
        before = tl.cumsum(counted, axis=0) - counted + tl.sum(counted, axis=0) * 0x1000100010000
        firsts = ((before >> shift) & 0xFFFF).to(tl.int32)
        is_it = (firsts <= slot) & (slot < firsts + splits)
        req = tl.sum(tl.where(is_it, reqs, 0), axis=0)
        first_slot = tl.sum(tl.where(is_it, firsts, 0), axis=0)
        live_splits = tl.sum(tl.where(is_it, splits, 0), axis=0)
        kv_len = tl.sum(tl.where(is_it, lens, 0), axis=0)
        if shared_lens_ptr is not None:
            shared_len = tl.sum(tl.where(is_it, shared_lens, 0), axis=0)
    return req, kv_len, shared_len, first_slot, live_splits


@triton.jit(do_not_specialize=["num_reqs", "splits", "turn", "chunks"])
def _decode_kernel(
    q_ptr,  # [reqs, heads, head_dim]
    k_cache_ptr,  # [num_pages, page_size, kv_heads, head_dim]
    v_cache_ptr,  # [num_pages, page_size, kv_heads, v_head_dim]
    page_table_ptr,  # [reqs, max_pages] int32
    kv_lens_ptr,  # [reqs] int32
    shared_lens_ptr,  # [reqs] int32; None: nothing is shared
    k_scale_ptr,  # [1] float32 or None
    v_scale_ptr,  # [1] float32 or None
    sinks_ptr,  # [heads] float32 or None
    out_ptr,  # [reqs, heads, v_head_dim]
    lse_ptr,  # [reqs, heads] float32
    partial_out_ptr,  # [slots, heads, v_head_dim] float32; reqs * splits unless by length; behind
    # them reqs * chunks of shared prefixes
    partial_lse_ptr,  # [slots, heads] float32, log2 units; likewise
    finished_ptr,  # [reqs, kv_heads * HEAD_TILES] int32, 0 between launches
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
    stride_out_req,
    stride_out_head,
    heads,
    scale,
    num_reqs,
    splits,  # of each request; by length: slots of all
    turn,  # by length: slots that are worked on at once
    chunks,  # of a shared prefix at most
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    DIM_K: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_DIM_K: tl.constexpr,
    BLOCK_DIM_V: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
    MERGE_SPLITS: tl.constexpr,
    BLOCK_REQS: tl.constexpr,  # where splits go by length, or None
    CHUNK_KEYS: tl.constexpr,  # that a chunk of a shared prefix is worth
    IS_ALONE: tl.constexpr,  # request
    WIDEN: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    if IS_ALONE:
        # A product of one token, as stands behind, asks for its weights before it waits.
        let_next_start(OVERLAPPED)
    if BLOCK_REQS is None:
        split = tl.program_id(1)
        req = tl.program_id(2).to(tl.int64)
        kv_len = tl.load(kv_lens_ptr + req)
        first_slot = req * splits
    else:
        at, kv_len, shared_len, first_slot, live_splits = _at_slot(
            tl.program_id(1), kv_lens_ptr, shared_lens_ptr, num_reqs, turn, splits, WINDOW,
            CHUNK, BLOCK_REQS, BLOCK_KEYS, MIN_TILES,
        )  # fmt: skip
        split = tl.program_id(1) - first_slot
        req = tl.minimum(at, num_reqs - 1).to(tl.int64)  # of nobody's slot any
        first_slot = first_slot.to(tl.int64)
    first = 0
    if WINDOW is not None:
        first = tl.maximum(kv_len - WINDOW, 0)
    if CHUNK is not None:
        first = tl.maximum(kv_len - 1, 0) // CHUNK * CHUNK
    if shared_lens_ptr is not None:
        tl.static_assert(BLOCK_REQS is not None, "few requests share nothing")
        tl.static_assert(WINDOW is None, "a window slides out of what is shared")
        tl.static_assert(CHUNK is None, "a chunk leaves what is shared")
        first = shared_len
    if BLOCK_REQS is None:
        # Fewer splits than were launched where a request is too short to keep them busy.
        tiles = tl.cdiv(kv_len - first, BLOCK_KEYS)
        live_splits = tl.maximum(tl.minimum(splits, tl.cdiv(tiles, MIN_TILES)), 1)
    page_row_ptr = page_table_ptr + req * stride_page_table_req
    begin = first + split * BLOCK_KEYS
    page = lookup_pages(page_row_ptr, begin + tl.arange(0, BLOCK_KEYS), max_pages, PAGE_SIZE)
    # Lengths and pages are the step's: what stands before all layers wrote them.
    wait_for_inputs(OVERLAPPED)
    kv_head = (tl.program_id(0) // HEAD_TILES).to(tl.int64)
    first_head = tl.program_id(0) % HEAD_TILES * BLOCK_ROWS
    group_head = first_head + tl.arange(0, BLOCK_ROWS)
    head = kv_head * GROUP + group_head
    head_live = group_head < GROUP
    cols_k = tl.arange(0, BLOCK_DIM_K)
    q = tl.load(
        q_ptr + req * stride_q_req + head[:, None] * stride_q_head + cols_k[None, :],
        mask=head_live[:, None] & (cols_k < DIM_K)[None, :],
        other=0.0,
    )
    if split >= live_splits:  # not before the load, which would wait for the lengths
        return
    if k_scale_ptr is not None:
        q, scale = narrow_query(q, scale * tl.load(k_scale_ptr))
    out, lse = attend_split(
        begin, kv_len, live_splits * BLOCK_KEYS, page, q,
        k_cache_ptr + kv_head * stride_k_head, v_cache_ptr + kv_head * stride_v_head,
        page_row_ptr, max_pages,
        stride_k_page, stride_k_slot, stride_v_page, stride_v_slot, scale,
        SOFT_CAP, PAGE_SIZE, DIM_K, DIM_V, BLOCK_DIM_K, BLOCK_DIM_V, BLOCK_ROWS, BLOCK_KEYS, WIDEN,
    )  # fmt: skip
    let_next_start(OVERLAPPED)
    if v_scale_ptr is not None:
        out *= tl.load(v_scale_ptr)
    out_row_ptr = out_ptr + req * stride_out_req
    lse_row_ptr = lse_ptr + req * heads
    if shared_lens_ptr is not None:
        live_chunks = chunks_of(shared_len, chunks, CHUNK_KEYS)
        shared_row = (splits + req * chunks) * heads
    if live_splits == 1:
        if shared_lens_ptr is not None:
            out, lse = _add_shared(
                out, lse, partial_out_ptr, partial_lse_ptr, shared_row + head, heads, live_chunks,
                head_live, DIM_V, BLOCK_DIM_V,
            )  # fmt: skip
        _store_heads(
            out, lse, out_row_ptr, lse_row_ptr, sinks_ptr, stride_out_head, head, head_live,
            DIM_V, BLOCK_DIM_V,
        )  # fmt: skip
        return

    first_row = first_slot * heads
    store_partial(
        out, lse, partial_out_ptr, partial_lse_ptr, first_row + split * heads + head, head_live,
        DIM_V, BLOCK_DIM_V,
    )  # fmt: skip
    count_ptr = finished_ptr + req * tl.num_programs(0) + tl.program_id(0)
    if finishes_last(count_ptr, live_splits):
        merge_row = first_head + tl.arange(0, MERGE_ROWS)
        merge_head = kv_head * GROUP + merge_row
        merged, merged_lse = merge_splits(
            partial_out_ptr, partial_lse_ptr, first_row + merge_head, heads, live_splits,
            merge_row < GROUP, DIM_V, BLOCK_DIM_V, MERGE_ROWS, MERGE_SPLITS,
        )  # fmt: skip
        if shared_lens_ptr is not None:
            merged, merged_lse = _add_shared(
                merged, merged_lse, partial_out_ptr, partial_lse_ptr, shared_row + merge_head,
                heads, live_chunks, merge_row < GROUP, DIM_V, BLOCK_DIM_V,
            )  # fmt: skip
        _store_heads(
            merged, merged_lse, out_row_ptr, lse_row_ptr, sinks_ptr, stride_out_head,
            merge_head, merge_row < GROUP, DIM_V, BLOCK_DIM_V,
        )  # fmt: skip


# Of a request that was timed alone: heads of a KV head, and columns.
_ALONE_HEADS = (8, 128, 128)


def decode_config(
    group: int,
    head_dim: int,
    v_head_dim: int,
    *,
    kv_dtype: torch.dtype,
    in_one_warp: bool = False,
    is_alone: bool = False,
    splits: int = 1,
) -> SplitConfig:
    """Static tile table of paged_decode: memory-bound, so small tiles, two in flight, and many
    programs of two warps; of four where a request `is_alone`, and waits for its merge.  Of one warp
    more fit at once, each with half the keys on their way.

    splits: of each request, whatever its length.  One is worth three tiles; many of narrow heads
    one each.
    """
    halves = 1 if in_one_warp else 2
    is_narrow = max(head_dim, v_head_dim) <= _NARROW_DIM and splits >= _SHORT_SPLITS
    return SplitConfig(
        block_rows=16 if group <= 16 else 32,
        block_keys=max(16, keys_per_stage(head_dim, v_head_dim, kv_dtype.itemsize) * halves // 4),
        num_warps=4 if is_alone else halves,
        num_stages=3,
        min_tiles=1 if is_narrow else 6 // halves,
    )


def launch_paged_decode(
    call: PagedCall,
    workspace: SplitWorkspace,
    *,
    splits: int,
    turn: int | None,
    shared_lens: Tensor | None = None,
    chunks: int = 0,
    config: SplitConfig | None = None,
) -> None:
    """One program per KV head, split and request, or per KV head and slot.

    shared_lens: [reqs] int32 leading keys whose partial results, `chunks` for each request, lie in
    the workspace behind those of the splits.  `config` overrides the tile table.
    """
    q, cache, rows, weighing, out, lse = call
    require_runnable(
        "q of paged_decode", q, _decode_kernel, otherwise="choose the torch attention backend"
    )
    num_reqs, heads, head_dim = q.shape
    _, page_size, kv_heads, v_head_dim = cache.v.shape
    group = heads // kv_heads
    is_alone = num_reqs == 1 and (group, head_dim, v_head_dim) == _ALONE_HEADS
    if config is None:
        config = decode_config(
            group,
            head_dim,
            v_head_dim,
            kv_dtype=cache.k.dtype,
            in_one_warp=takes_one_warp(q, cache.k, cache.v),
            is_alone=is_alone,
            splits=splits if turn is None else 1,
        )
    head_tiles = cdiv(group, config.block_rows)
    merge_rows = min(config.block_rows, next_power_of_2(group))
    launch(
        _decode_kernel,
        (kv_heads * head_tiles, splits, num_reqs if turn is None else 1),
        q,
        cache.k,
        cache.v,
        rows.page_table,
        rows.kv_lens,
        shared_lens,
        cache.k_scale,
        cache.v_scale,
        weighing.sinks,
        out,
        lse,
        workspace.partial_out,
        workspace.partial_lse,
        workspace.finished,
        *q.stride()[:2],
        *cache.k.stride()[:3],
        *cache.v.stride()[:3],
        rows.page_table.stride(0),
        rows.page_table.shape[1],
        *out.stride()[:2],
        heads,
        weighing.scale,
        num_reqs,
        splits,
        turn or 0,
        chunks,
        WINDOW=weighing.window,
        CHUNK=weighing.chunk,
        SOFT_CAP=weighing.soft_cap,
        GROUP=group,
        HEAD_TILES=head_tiles,
        PAGE_SIZE=page_size,
        DIM_K=head_dim,
        DIM_V=v_head_dim,
        BLOCK_DIM_K=block_dim(head_dim),
        BLOCK_DIM_V=block_dim(v_head_dim),
        BLOCK_ROWS=config.block_rows,
        BLOCK_KEYS=config.block_keys,
        MIN_TILES=config.min_tiles,
        MERGE_ROWS=merge_rows,
        MERGE_SPLITS=splits_per_load(merge_rows, block_dim(v_head_dim), num_warps=config.num_warps),
        BLOCK_REQS=None if turn is None else next_power_of_2(num_reqs),
        CHUNK_KEYS=CHUNK_KEYS,
        IS_ALONE=is_alone,
        WIDEN=q.dtype == torch.bfloat16 and interpreted(_decode_kernel),
        **overlap_options(q.device, _decode_kernel),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
