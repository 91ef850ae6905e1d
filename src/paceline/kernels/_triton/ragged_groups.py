"""ragged_attention and paged_extend of many queries on Hopper: groups of warps with a part each.

One group asks for tiles by the copy engine, two multiply, each 64 queries against the same keys,
and while one has its softmax the other multiplies.  A group, too, asks for the scores of a tile
before it multiplies the weights of the one before, so that its softmax stands beside that product
(FlashAttention 3, arXiv:2407.08608, section 3).  The two have the same queries of two heads that
share a KV head, or neighbours of one head.  Keys lie side by side, or in pages: a tile is then
asked for in pieces; of pages in e4m3 that group makes numbers itself (code_tiles.py).

A program for each processor takes items in turns: of a request each unit, a head or a pair, and of
that each tile of queries; of its keys the last tile first, the one that masks divide.  Rows behind
cu_q[-1] are one more request, without keys.  Programs have ranges of the same cost, as far as items
are whole: an item costs what it walks, in 64 keys, and as much as _COST_OF_ITEM of these.  So that
ranges are alike, tiles come by pairs of a long and a short one, whose costs are the same together,
and a unit begins with the pair that the one before ended with.  Worked example, 5 tiles, causal:

    place        0 1 2 3 4      the last tile of queries sees the most keys
    even units   4 0 3 1 2
    odd units    3 1 4 0 2
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from paceline.kernels._triton.code_tiles import convert_tiles
from paceline.kernels._triton.gluon_tiles import load_tile, tiles_of
from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.runtime import cdiv
from paceline.kernels.paged_attention.call import PagedCall
from paceline.kernels.stand_in import multiprocessors

_ROWS = gl.constexpr(64)  # queries of a group of warps, as many as an instruction multiplies
_GROUPS = gl.constexpr(2)
_WARPS = gl.constexpr(4)  # of each group
_BLOCK_REQS = gl.constexpr(512)  # requests that are looked at together
_COST_KEYS = gl.constexpr(64)  # whose products are a unit of cost
_COST_OF_ITEM = gl.constexpr(4)  # beside its keys
# Registers of a thread: of those that multiply, and of those that load; and where the latter are as
# many warps and make numbers of codes.
_REGISTERS, _FEW_REGISTERS = gl.constexpr(232), gl.constexpr(40)
_CODES_REGISTERS, _MORE_REGISTERS = gl.constexpr(192), gl.constexpr(120)
_QUERY_STAGES = 2  # tiles of queries that are held
_PIECE_BYTES = 128  # of a row that lie together in shared memory, by which it is swizzled
# By the names that a version of Triton has for them.
_SMEM = gl.shared_memory_descriptor
_as_pieces = getattr(_SMEM, "reinterpret", None) or _SMEM._reinterpret


class GroupTiles(NamedTuple):
    """Of keys, how many at a time, and how many of these are held."""

    block_keys: int
    key_stages: int


_TILES = GroupTiles(block_keys=64, key_stages=3)
_LONG_TILES = GroupTiles(block_keys=128, key_stages=2)
# More queries: of these a tile that a mask divides is a small part.  A graph of so many tokens says
# that any of its requests may have all of them.
_LONG = 2048


@gluon.jit
def _costs(num_q, num_k, is_even, CAUSAL: gl.constexpr, BLOCK_ROWS: gl.constexpr):
    """Of one head's, or pair's, tiles of queries: how many, what the first costs, what each is more
    than the one before, and what the first and the last do together.  is_even: all the same."""
    is_even |= num_k == 0
    rise = gl.where(is_even, 0, BLOCK_ROWS // _COST_KEYS if CAUSAL else 0)
    if CAUSAL:
        walked = gl.maximum(num_k - num_q, 0) // _COST_KEYS + rise
    else:
        walked = (num_k + _COST_KEYS - 1) // _COST_KEYS
    tiles = (num_q + BLOCK_ROWS - 1) // BLOCK_ROWS
    least = gl.where(is_even, 0, walked) + _COST_OF_ITEM
    return tiles, least, rise, 2 * least + rise * (tiles - 1)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _num_queries(requests, cu_q_ptr, tokens, reqs, above):
    """[requests] queries of each; none where there are `above` or fewer."""
    begin = gl.load(cu_q_ptr + gl.minimum(requests, reqs))
    end = gl.where(requests < reqs, gl.load(cu_q_ptr + gl.minimum(requests + 1, reqs)), tokens)
    return gl.where((requests <= reqs) & (end - begin > above), end - begin, 0)


@gluon.jit
def _num_keys(requests, k_lens_ptr, reqs, PAGE_SIZE: gl.constexpr):
    """[requests] keys of each."""
    if PAGE_SIZE is None:
        begin = gl.load(k_lens_ptr + gl.minimum(requests, reqs))
        return gl.load(k_lens_ptr + gl.minimum(requests + 1, reqs)) - begin
    num_k = gl.load(k_lens_ptr + gl.minimum(requests, reqs - 1))
    return gl.where(requests < reqs, num_k, 0)


@gluon.jit
def _all_costs(
    first,
    texts,
    is_even,
    CAUSAL: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    BLOCK_ROWS: gl.constexpr,
):
    """[_BLOCK_REQS] of requests from `first` on: tiles of queries, and what all of them cost."""
    cu_q_ptr, k_lens_ptr, tokens, reqs, above = texts
    layout: gl.constexpr = gl.BlockedLayout([_BLOCK_REQS // 128], [32], [_WARPS], [0])
    requests = first + gl.arange(0, _BLOCK_REQS, layout=layout)
    num_q = _num_queries(requests, cu_q_ptr, tokens, reqs, above)
    num_k = _num_keys(requests, k_lens_ptr, reqs, PAGE_SIZE)
    tiles, _least, _rise, ends = _costs(num_q, num_k, is_even, CAUSAL, BLOCK_ROWS)
    return tiles, tiles * ends // 2


@gluon.jit
def _pair(pair, unit, tiles):
    """The number, by what its last tile sees, of a pair of tiles; what has no partner is last."""
    half = tiles // 2
    return gl.where((unit % 2 == 1) & (pair < half), half - 1 - pair, pair)


@gluon.jit
def _tile_at(place, unit, tiles):
    """The tile of queries that comes at a place of its unit's order."""
    pair = _pair(place // 2, unit, tiles)
    return gl.where(place % 2 == 0, tiles - 1 - pair, pair)


@gluon.jit
def _begin(
    program,
    texts,
    units,  # heads, or pairs
    CAUSAL: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    BLOCK_ROWS: gl.constexpr,
):
    """(index, request, unit, place among that's tiles) of a program's first item."""
    cu_q_ptr, k_lens_ptr, tokens, reqs, above = texts
    all_tiles = 0
    all_costs = 0
    for block in range(0, reqs + 1, _BLOCK_REQS):
        tiles, costs = _all_costs(block, texts, False, CAUSAL, PAGE_SIZE, BLOCK_ROWS)
        all_tiles += gl.sum(tiles, 0)
        all_costs += gl.sum(costs, 0)
    is_even = all_tiles * units <= gl.num_programs(0)  # one for each
    all_costs = gl.where(is_even, all_tiles * _COST_OF_ITEM, all_costs)
    target = all_costs.to(gl.int64) * units * program // gl.num_programs(0)
    request = 0
    before = 0  # tiles of earlier requests, of one unit
    spent = 0  # what these cost
    sum_costs = 0
    for block in range(0, reqs + 1, _BLOCK_REQS):
        tiles, costs = _all_costs(block, texts, is_even, CAUSAL, PAGE_SIZE, BLOCK_ROWS)
        up_to = sum_costs + gl.associative_scan(costs, 0, _add)
        is_before = up_to.to(gl.int64) * units <= target
        request += gl.sum(is_before.to(gl.int32), 0)
        before += gl.sum(gl.where(is_before, tiles, 0), 0)
        spent += gl.sum(gl.where(is_before, costs, 0), 0)
        sum_costs += gl.sum(costs, 0)
    request = gl.minimum(request, reqs)
    num_q = _num_queries(request, cu_q_ptr, tokens, reqs, above)
    num_k = _num_keys(request, k_lens_ptr, reqs, PAGE_SIZE)
    tiles, least, rise, ends = _costs(num_q, num_k, is_even, CAUSAL, BLOCK_ROWS)
    own = gl.maximum(tiles * ends // 2, 1)
    rest = target - spent.to(gl.int64) * units
    unit = (rest // own).to(gl.int32)
    rest = (rest % own).to(gl.int32)
    pair = rest // ends
    longer = least + rise * (tiles - 1 - _pair(pair, unit, tiles))
    place = 2 * pair + (rest % ends >= longer).to(gl.int32)
    return before * units + unit * tiles + place, request, unit, place


@gluon.jit
def _next(request, unit, place, texts, units, BLOCK_ROWS: gl.constexpr):
    """The item behind one that is not the last."""
    cu_q_ptr, _k_lens_ptr, tokens, reqs, above = texts
    num_q = _num_queries(request, cu_q_ptr, tokens, reqs, above)
    place += 1
    if place * BLOCK_ROWS >= num_q:
        place = 0
        unit += 1
        if unit == units:
            unit = 0
            request += 1
            while _num_queries(request, cu_q_ptr, tokens, reqs, above) == 0:
                request += 1
    return request, unit, place


@gluon.jit
def _num_tiles(
    first,
    num_q,
    num_k,
    CAUSAL: gl.constexpr,
    BLOCK_ROWS: gl.constexpr,
    BLOCK_KEYS: gl.constexpr,
):
    """Of keys, that one of an item's queries sees."""
    stop = num_k
    if CAUSAL:
        stop = gl.minimum(num_k, gl.maximum(first + BLOCK_ROWS + num_k - num_q, 0))
    return (stop + BLOCK_KEYS - 1) // BLOCK_KEYS


@gluon.jit
def _load_keys(
    tiles,
    stage,
    ready,
    smem,
    pages_ptr,  # of the request; of keys that lie side by side its first one
    low,
    num_k,
    col,
    PAGE_SIZE: gl.constexpr,
    BLOCK_KEYS: gl.constexpr,
    DIM: gl.constexpr,
):
    """A tile of keys, or of values, from the `low`th on; of pages, which smem has in pieces, the
    last key's page stands in for those behind."""
    mbarrier.expect(ready, BLOCK_KEYS * DIM * smem.dtype.primitive_bitwidth // 8)
    if PAGE_SIZE is None:
        load_tile(tiles, [pages_ptr + low, col], ready, smem.index(stage))
    else:
        ROWS: gl.constexpr = tiles.block_shape[1]
        COLS: gl.constexpr = tiles.block_shape[2]
        PARTS: gl.constexpr = BLOCK_KEYS // ROWS
        for part in gl.static_range(PARTS):
            key = gl.minimum(low + part * ROWS, num_k - 1)
            page = gl.load(pages_ptr + key // PAGE_SIZE)
            slot = key % PAGE_SIZE // ROWS * ROWS
            for piece in gl.static_range(DIM // COLS):
                place = smem.index((stage * (DIM // COLS) + piece) * PARTS + part)
                load_tile(tiles, [page, slot, col + piece * COLS], ready, place)


@gluon.jit
def _load(
    count, first_item, q_tiles, k_tiles, v_tiles, q_smem, k_smem, v_smem, barriers, texts,
    page_table_ptr, stride_pages, k_scale_ptr, strides, units, group,
    CAUSAL: gl.constexpr, PAGE_SIZE: gl.constexpr, HEADS: gl.constexpr, DIM: gl.constexpr,
    BLOCK_KEYS: gl.constexpr, Q_STAGES: gl.constexpr, K_STAGES: gl.constexpr,
):  # fmt: skip
    """What one group does: ask for each item's queries, and for each tile of keys and values, as
    their places become free."""
    q_ready, q_free, k_ready, k_free, v_ready, v_free = barriers
    cu_q_ptr, k_lens_ptr, tokens, reqs, above = texts
    BLOCK_ROWS: gl.constexpr = _ROWS * _GROUPS // HEADS
    BYTES: gl.constexpr = DIM * q_smem.dtype.primitive_bitwidth // 8
    num_items = 0
    num_tiles = 0
    request, unit, place = first_item
    for item in range(count):
        num_q = _num_queries(request, cu_q_ptr, tokens, reqs, above)
        num_k = _num_keys(request, k_lens_ptr, reqs, PAGE_SIZE)
        query_tile = _tile_at(place, unit, (num_q + BLOCK_ROWS - 1) // BLOCK_ROWS)
        head, first = unit * HEADS, query_tile * BLOCK_ROWS
        tiles = _num_tiles(first, num_q, num_k, CAUSAL, BLOCK_ROWS, BLOCK_KEYS)
        if tiles > 0:
            stage = num_items % Q_STAGES
            mbarrier.wait(q_free.index(stage), num_items // Q_STAGES & 1 ^ 1)
            mbarrier.expect(q_ready.index(stage), _GROUPS * _ROWS * BYTES)
            begin_q = gl.load(cu_q_ptr + request)
            for part in gl.static_range(_GROUPS):
                row = begin_q + first + (part * _ROWS if HEADS == 1 else 0)
                col = (head + (part if HEADS == 2 else 0)) * DIM
                into = q_smem.index(stage * _GROUPS + part)
                load_tile(q_tiles, [row, col], q_ready.index(stage), into)
            num_items += 1
            col = head // group * DIM
            if PAGE_SIZE is None:
                pages = gl.load(k_lens_ptr + request)
            else:
                pages = page_table_ptr + request * stride_pages
            if k_scale_ptr is not None:
                convert_tiles(
                    tiles, num_tiles, k_tiles + col // 4, v_tiles + col // 4, k_smem, v_smem,
                    barriers, pages, num_k, strides, q_smem.dtype, PAGE_SIZE, DIM, BLOCK_KEYS,
                    K_STAGES,
                )  # fmt: skip
                num_tiles += tiles
            else:
                for tile in range(tiles):
                    low = (tiles - 1 - tile) * BLOCK_KEYS
                    stage = num_tiles % K_STAGES
                    phase = num_tiles // K_STAGES & 1 ^ 1
                    mbarrier.wait(k_free.index(stage), phase)
                    _load_keys(
                        k_tiles, stage, k_ready.index(stage), k_smem, pages, low, num_k, col,
                        PAGE_SIZE, BLOCK_KEYS, DIM,
                    )  # fmt: skip
                    mbarrier.wait(v_free.index(stage), phase)
                    _load_keys(
                        v_tiles, stage, v_ready.index(stage), v_smem, pages, low, num_k, col,
                        PAGE_SIZE, BLOCK_KEYS, DIM,
                    )  # fmt: skip
                    num_tiles += 1
        if item + 1 < count:
            request, unit, place = _next(request, unit, place, texts, units, BLOCK_ROWS)


@gluon.jit
def _hide(
    scores,  # [_ROWS, BLOCK_KEYS] float32
    low,  # the tile's first key
    position,  # [_ROWS] of each query among the request's keys
    num_k,
    CAUSAL: gl.constexpr,
):
    """−inf where a query sees no key."""
    layout: gl.constexpr = gl.SliceLayout(0, scores.type.layout)
    keys = (low + gl.arange(0, scores.shape[1], layout=layout))[None, :]
    visible = keys < num_k
    if CAUSAL:
        visible = visible & (keys <= position[:, None])
    return gl.where(visible, scores, float("-inf"))


@gluon.jit
def _weigh(
    scores,  # [_ROWS, BLOCK_KEYS] float32
    running_max,  # [_ROWS] float32
    running_sum,  # [_ROWS] float32
    scale,  # to units of log2
):
    """(weights, new maximum, new sum, decay of what was summed), as `softmax_step` has them."""
    new_max = gl.maximum(running_max, gl.max(scores, 1))
    finite = gl.where(new_max == float("-inf"), 0.0, new_max) * scale
    weights = gl.exp2(scores * scale - finite[:, None])
    decay = gl.exp2(running_max * scale - finite)
    return weights, new_max, running_sum * decay + gl.sum(weights, 1), decay


@gluon.jit
def _clear_behind(values, num_live, LAYOUT: gl.constexpr):
    """Zeros for the rows of a tile of V behind a request's last: weights of 0 would not hide what
    another request has there, where that is infinite."""
    rows = gl.arange(0, values.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    kept = gl.where((rows < num_live)[:, None], values.load(LAYOUT), 0.0)
    values.store(kept.to(values.dtype))
    fence_async_shared()


@gluon.jit
def _attend(
    PART: gl.constexpr,
    count, first_item, q_smem, k_smem, v_smem, barriers, texts, scales, out_ptr, lse_ptr,
    stride_out_token, stride_out_head, stride_lse_token, units, scale,
    CAUSAL: gl.constexpr, PAGE_SIZE: gl.constexpr, HEADS: gl.constexpr, DIM: gl.constexpr,
    BLOCK_KEYS: gl.constexpr, Q_STAGES: gl.constexpr, K_STAGES: gl.constexpr,
):  # fmt: skip
    """What each other group does: attention of _ROWS queries of each item."""
    q_ready, q_free, k_ready, k_free, v_ready, v_free = barriers
    cu_q_ptr, k_lens_ptr, tokens, reqs, above = texts
    k_scale_ptr, v_scale_ptr = scales
    if k_scale_ptr is not None:
        scale *= gl.load(k_scale_ptr)
    BLOCK_ROWS: gl.constexpr = _ROWS * _GROUPS // HEADS
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, BLOCK_KEYS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [_WARPS, 1], [1, 0])
    none = gl.zeros([_ROWS, BLOCK_KEYS], gl.float32, layout=SCORES)
    num_items = 0
    num_tiles = 0
    request, unit, place = first_item
    for item in range(count):
        num_q = _num_queries(request, cu_q_ptr, tokens, reqs, above)
        num_k = _num_keys(request, k_lens_ptr, reqs, PAGE_SIZE)
        query_tile = _tile_at(place, unit, (num_q + BLOCK_ROWS - 1) // BLOCK_ROWS)
        begin_q = gl.load(cu_q_ptr + request)
        head, first = unit * HEADS, query_tile * BLOCK_ROWS
        tiles = _num_tiles(first, num_q, num_k, CAUSAL, BLOCK_ROWS, BLOCK_KEYS)
        if HEADS == 1:
            mine = first + PART * _ROWS
        else:
            mine = first
            head += PART
        acc = gl.zeros([_ROWS, DIM], gl.float32, layout=SUMS)
        running_max = gl.full([_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        running_sum = gl.zeros([_ROWS], gl.float32, gl.SliceLayout(1, SCORES))
        if tiles > 0:
            first_key = mine + num_k - num_q  # of the first query
            position = first_key + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, SCORES))
            q_stage = num_items % Q_STAGES
            mbarrier.wait(q_ready.index(q_stage), num_items // Q_STAGES & 1)
            q = q_smem.index(q_stage * _GROUPS + PART)
            stage = num_tiles % K_STAGES
            phase = num_tiles // K_STAGES & 1
            mbarrier.wait(k_ready.index(stage), phase)
            token = warpgroup_mma(
                q, k_smem.index(stage).permute((1, 0)), none, use_acc=False, is_async=True
            )
            scores = warpgroup_mma_wait(0, deps=(token,))
            mbarrier.arrive(k_free.index(stage), count=1)
            low = (tiles - 1) * BLOCK_KEYS
            scores = _hide(scores, low, position, num_k, CAUSAL)
            wide, running_max, running_sum, decay = _weigh(scores, running_max, running_sum, scale)
            weights = gl.convert_layout(wide.to(v_smem.dtype), WEIGHTS)
            mbarrier.wait(v_ready.index(stage), phase)
            if k_scale_ptr is None and low + BLOCK_KEYS > num_k:
                _clear_behind(v_smem.index(stage), num_k - low, ROWS)
            for tile in range(1, tiles):
                v_stage = stage
                v_phase = phase
                stage = (num_tiles + tile) % K_STAGES
                phase = (num_tiles + tile) // K_STAGES & 1
                mbarrier.wait(k_ready.index(stage), phase)
                token = warpgroup_mma(
                    q, k_smem.index(stage).permute((1, 0)), none, use_acc=False, is_async=True
                )
                mbarrier.wait(v_ready.index(v_stage), v_phase)
                summed = warpgroup_mma(weights, v_smem.index(v_stage), acc, is_async=True)
                scores = warpgroup_mma_wait(1, deps=(token,))
                mbarrier.arrive(k_free.index(stage), count=1)
                low -= BLOCK_KEYS
                if CAUSAL and low + BLOCK_KEYS > first_key + 1:
                    scores = _hide(scores, low, position, num_k, CAUSAL)
                wide, running_max, running_sum, decay = _weigh(
                    scores, running_max, running_sum, scale
                )
                acc = warpgroup_mma_wait(0, deps=(summed,))
                mbarrier.arrive(v_free.index(v_stage), count=1)
                acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, SUMS))[:, None]
                weights = gl.convert_layout(wide.to(v_smem.dtype), WEIGHTS)
            mbarrier.arrive(q_free.index(q_stage), count=1)
            mbarrier.wait(v_ready.index(stage), phase)
            summed = warpgroup_mma(weights, v_smem.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(summed,))
            mbarrier.arrive(v_free.index(stage), count=1)
            num_items += 1
            num_tiles += tiles
        empty = running_sum == 0.0
        divisor = gl.where(empty, 1.0, running_sum)
        inverse = 1.0 / divisor
        if v_scale_ptr is not None:
            inverse *= gl.load(v_scale_ptr)
        inverse = gl.convert_layout(inverse, gl.SliceLayout(1, SUMS))
        out = gl.convert_layout((acc * inverse[:, None]).to(q_smem.dtype), ROWS)
        rows = mine + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, ROWS))
        places = (begin_q + rows).to(gl.int64) * stride_out_token + head * stride_out_head
        cols = gl.arange(0, DIM, layout=gl.SliceLayout(0, ROWS))
        places = places[:, None] + cols[None, :]
        gl.store(out_ptr + places, out, mask=(rows < num_q)[:, None])
        rows = mine + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, SCORES))
        lse = gl.where(empty, float("-inf"), running_max * scale + gl.log2(divisor))
        places = (begin_q + rows).to(gl.int64) * stride_lse_token + head
        gl.store(lse_ptr + places, lse * 0.6931471805599453, mask=rows < num_q)
        if item + 1 < count:
            request, unit, place = _next(request, unit, place, texts, units, BLOCK_ROWS)


@gluon.jit(do_not_specialize=["tokens", "reqs", "above"])
def _ragged_groups_kernel(
    q_tiles,  # of [tokens, heads * DIM]
    k_tiles,  # of [keys, kv_heads * DIM], or [pages, PAGE_SIZE, kv_heads * DIM]; of codes a pointer
    # to [pages, PAGE_SIZE, kv_heads, DIM // 4] int32
    v_tiles,  # likewise
    cu_q_ptr,  # [reqs + 1] int32
    k_lens_ptr,  # [reqs + 1] int32 prefix sums, or of pages [reqs] lengths
    page_table_ptr,  # [reqs, max_pages] int32, or None
    k_scale_ptr,  # [1] float32 of codes, or None
    v_scale_ptr,  # likewise
    out_ptr,  # [tokens, heads, DIM]
    lse_ptr,  # [tokens, heads] float32
    stride_pages,
    stride_page,  # of codes, likewise by fours
    stride_slot,
    stride_out_token,
    stride_out_head,
    stride_lse_token,
    tokens,
    reqs,
    above,  # requests of so many queries or fewer are another launch's
    units,  # heads, or pairs
    group,  # query heads of a KV head
    scale,  # to units of log2
    CAUSAL: gl.constexpr,
    PAGE_SIZE: gl.constexpr,  # None: keys lie side by side
    HEADS: gl.constexpr,  # of an item: 2, of one KV head, or 1
    DIM: gl.constexpr,
    BLOCK_KEYS: gl.constexpr,
    Q_STAGES: gl.constexpr,
    K_STAGES: gl.constexpr,
    LEADS: gl.constexpr,  # the launch behind is of other requests of the same call
    OVERLAPPED: gl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    if LEADS:
        let_next_start(OVERLAPPED)
    q_smem = gl.allocate_shared_memory(
        q_tiles.dtype, [Q_STAGES * _GROUPS, _ROWS, DIM], q_tiles.layout
    )
    # Values in 8 bits, and so their weights, are multiplied in float16.
    V_DTYPE: gl.constexpr = q_tiles.dtype if v_scale_ptr is None else gl.float16
    k_smem = gl.allocate_shared_memory(q_tiles.dtype, [K_STAGES, BLOCK_KEYS, DIM], q_tiles.layout)
    v_smem = gl.allocate_shared_memory(V_DTYPE, [K_STAGES, BLOCK_KEYS, DIM], q_tiles.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(Q_STAGES):
        mbarrier.init(q_ready.index(stage), count=1)
        mbarrier.init(q_free.index(stage), count=_GROUPS)
    for stage in gl.static_range(K_STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=_GROUPS)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(v_free.index(stage), count=_GROUPS)
    fence_async_shared()
    barriers = (q_ready, q_free, k_ready, k_free, v_ready, v_free)
    BLOCK_ROWS: gl.constexpr = _ROWS * _GROUPS // HEADS
    texts = (cu_q_ptr, k_lens_ptr, tokens, reqs, above)
    scales, strides = (k_scale_ptr, v_scale_ptr), (stride_page, stride_slot)
    program = gl.program_id(0)
    stop, start, request, unit, place = 0, 0, 0, 0, 0
    for turn in range(2):  # once in the code: fetching it takes longer than what it does
        stop = start
        start, request, unit, place = _begin(
            program + 1 - turn, texts, units, CAUSAL, PAGE_SIZE, BLOCK_ROWS
        )
    count, first_item = stop - start, (request, unit, place)
    if k_scale_ptr is not None:
        # The same memory, as numbers come into it by twos.
        TWOS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
        k_pieces = _as_pieces(k_smem, gl.int32, [K_STAGES, BLOCK_KEYS, DIM // 2], TWOS)
        v_pieces = _as_pieces(v_smem, gl.int32, [K_STAGES, BLOCK_KEYS, DIM // 2], TWOS)
    elif PAGE_SIZE is None:
        k_pieces, v_pieces = k_smem, v_smem
    else:
        # The same memory, as pages come into it.
        ROWS: gl.constexpr = k_tiles.block_shape[1]
        COLS: gl.constexpr = k_tiles.block_shape[2]
        PIECES: gl.constexpr = K_STAGES * BLOCK_KEYS * DIM // (ROWS * COLS)
        k_pieces = _as_pieces(k_smem, k_tiles.dtype, [PIECES, 1, ROWS, COLS], k_tiles.layout)
        v_pieces = _as_pieces(v_smem, k_tiles.dtype, [PIECES, 1, ROWS, COLS], k_tiles.layout)
    REGISTERS: gl.constexpr = _REGISTERS if k_scale_ptr is None else _CODES_REGISTERS
    FEW_REGISTERS: gl.constexpr = _FEW_REGISTERS if k_scale_ptr is None else _MORE_REGISTERS
    gl.warp_specialize(
        [
            (_attend, (
                0, count, first_item, q_smem, k_smem, v_smem, barriers, texts, scales, out_ptr,
                lse_ptr, stride_out_token, stride_out_head, stride_lse_token, units, scale, CAUSAL,
                PAGE_SIZE, HEADS, DIM, BLOCK_KEYS, Q_STAGES, K_STAGES,
            )),
            (_attend, (
                1, count, first_item, q_smem, k_smem, v_smem, barriers, texts, scales, out_ptr,
                lse_ptr, stride_out_token, stride_out_head, stride_lse_token, units, scale, CAUSAL,
                PAGE_SIZE, HEADS, DIM, BLOCK_KEYS, Q_STAGES, K_STAGES,
            )),
            (_load, (
                count, first_item, q_tiles, k_tiles, v_tiles, q_smem, k_pieces, v_pieces, barriers,
                texts, page_table_ptr, stride_pages, k_scale_ptr, strides, units, group,
                CAUSAL, PAGE_SIZE, HEADS, DIM, BLOCK_KEYS, Q_STAGES, K_STAGES,
            )),
        ],
        [_WARPS, 1 if k_scale_ptr is None else _WARPS],
        [REGISTERS, FEW_REGISTERS],
    )  # fmt: skip


def launch_ragged_groups(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    scale: float,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
) -> None:
    """A program for each processor; arguments as `fits_groups` takes them."""
    tiles = _usual_tiles(q.shape[0] // max(cu_q.shape[0] - 1, 1))
    described = (_heads_of(each, tiles.block_keys) for each in (k, v))
    _launch(
        q, *described, cu_q, cu_k, None, scale, out, lse,
        causal=causal, group=q.shape[1] // k.shape[1], tiles=tiles,
    )  # fmt: skip


def launch_paged_groups(call: PagedCall, *, above: int, leads: bool) -> None:
    """The same of paged keys under a causal mask, and of requests of more than `above` queries
    alone; a call of `takes_groups`.  leads: another launch of the call is behind this one."""
    q, cache, reqs, weighing, out, lse = call
    assert lse is not None, "the operator has one"
    tiles = _usual_tiles(reqs.max_extend_len)
    _, page_size, kv_heads, _ = cache.k.shape
    if cache.k_scale is None:
        described = [_pieces_of(each, tiles.block_keys) for each in (cache.k, cache.v)]
    else:
        described = [each.view(torch.int32) for each in (cache.k, cache.v)]
    _launch(
        q, *described, reqs.cu_seqlens_q, reqs.kv_lens, reqs.page_table, weighing.scale, out, lse,
        causal=True, group=q.shape[1] // kv_heads, page_size=page_size,
        scales=(cache.k_scale, cache.v_scale), above=above, leads=leads, tiles=tiles,
    )  # fmt: skip


def _usual_tiles(longest: int) -> GroupTiles:
    return _LONG_TILES if longest > _LONG else _TILES


def _launch(
    q: Tensor,
    k_tiles: Any,  # of codes the tensor by fours
    v_tiles: Any,
    cu_q: Tensor,
    k_lens: Tensor,
    page_table: Tensor | None,
    scale: float,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    group: int,
    tiles: GroupTiles,
    page_size: int | None = None,
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
    above: int = 0,
    leads: bool = False,
) -> None:
    (tokens, heads, dim), reqs = q.shape, cu_q.shape[0] - 1
    heads_of_item = 1 if group % _GROUPS.value else _GROUPS.value
    units = heads // heads_of_item
    query_tiles = cdiv(tokens, _ROWS.value * _GROUPS.value // heads_of_item) + reqs
    launch(
        _ragged_groups_kernel,
        (min(query_tiles * units, multiprocessors(q.device)),),
        _heads_of(q, _ROWS.value),
        k_tiles,
        v_tiles,
        cu_q,
        k_lens,
        page_table,
        *scales,
        out,
        lse,
        0 if page_table is None else page_table.stride(0),
        *((0, 0) if scales[0] is None else k_tiles.stride()[:2]),
        out.stride(0),
        out.stride(1),
        lse.stride(0),
        tokens,
        reqs,
        above,
        units,
        group,
        scale * 1.4426950408889634,
        CAUSAL=causal,
        PAGE_SIZE=page_size,
        HEADS=heads_of_item,
        DIM=dim,
        BLOCK_KEYS=tiles.block_keys,
        Q_STAGES=_QUERY_STAGES,
        K_STAGES=tiles.key_stages,
        LEADS=leads,
        num_warps=_WARPS.value,
        **overlap_options(q.device, _ragged_groups_kernel),
    )


def _heads_of(x: Tensor, rows: int) -> Any:
    """x [rows, heads, dim], whose heads lie side by side, in tiles of one head's rows."""
    num_rows, heads, dim = x.shape
    flat = x.as_strided((num_rows, heads * dim), (x.stride(0), 1))
    return tiles_of(flat, [rows, dim])


def _pieces_of(cache: Tensor, rows: int) -> Any:
    """cache [pages, page_size, kv_heads, dim], whose heads lie side by side, in pieces that a tile
    of `rows` is made of: as many columns as lie together in shared memory, and of a page as many
    rows as it has of the tile."""
    pages, page_size, heads, dim = cache.shape
    flat = cache.as_strided((pages, page_size, heads * dim), (*cache.stride()[:2], 1))
    return tiles_of(flat, [1, min(page_size, rows), _PIECE_BYTES // cache.element_size()])
