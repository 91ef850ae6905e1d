"""ragged_attention of many queries on Hopper: groups of warps with a part each.

One group asks for tiles by the copy engine, two multiply, each 64 queries against the same keys,
and while one has its softmax the other multiplies.  A group, too, asks for the scores of a tile
before it multiplies the weights of the one before, so that its softmax stands beside that product
(FlashAttention 3, arXiv:2407.08608, section 3).  The two have the same queries of two heads that
share a KV head, or neighbours of one head.

A program for each processor takes items in turns: of a head, or pair, each request, and of that
each tile of queries, the last, which see the most keys, first; of its keys the last tile first, the
one that masks divide.  Rows behind cu_q[-1] are one more request, without keys.  Programs have
ranges of the same cost, as far as items are whole: an item costs a tile of keys for each that it
walks, and as much as _COST_OF_ITEM of them.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from paceline.kernels._triton.launch import launch, overlap_options, wait_for_inputs
from paceline.kernels._triton.runtime import cdiv
from paceline.kernels.stand_in import multiprocessors

_ROWS = gl.constexpr(64)  # queries of a group of warps, as many as an instruction multiplies
_GROUPS = gl.constexpr(2)
_WARPS = gl.constexpr(4)  # of each group
_BLOCK_REQS = gl.constexpr(512)  # requests that are looked at together
_COST_OF_ITEM = gl.constexpr(2)  # beside its tiles of keys, in these
# Registers of a thread: of those that multiply, and of those that load.
_REGISTERS, _FEW_REGISTERS = gl.constexpr(240), gl.constexpr(24)
# By the name that a version of Triton has for it.
_load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


class GroupTiles(NamedTuple):
    """Of keys, how many at a time, and how many of these are held."""

    block_keys: int
    key_stages: int
    query_stages: int


_TILES = GroupTiles(block_keys=64, key_stages=3, query_stages=2)


@gluon.jit
def _cost(
    tile,
    num_q,
    num_k,
    CAUSAL: gl.constexpr,
    BLOCK_ROWS: gl.constexpr,
    BLOCK_KEYS: gl.constexpr,
):
    """Of a tile of queries: of the first, and what each is more than the one before."""
    if CAUSAL:
        rise: gl.constexpr = BLOCK_ROWS // BLOCK_KEYS
        cost = gl.maximum(num_k - num_q, 0) // BLOCK_KEYS + rise * (tile + 1)
    else:
        cost = (num_k + BLOCK_KEYS - 1) // BLOCK_KEYS + 0 * tile
    return gl.where(num_k > 0, cost, 0) + _COST_OF_ITEM


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _lens(requests, cu_q_ptr, cu_k_ptr, tokens, reqs):
    """[requests] queries and keys of each."""
    following = gl.minimum(requests + 1, reqs)
    begin_q = gl.load(cu_q_ptr + gl.minimum(requests, reqs))
    begin_k = gl.load(cu_k_ptr + gl.minimum(requests, reqs))
    end_q = gl.where(requests < reqs, gl.load(cu_q_ptr + following), tokens)
    num_q = gl.where(requests > reqs, 0, end_q - begin_q)
    return num_q, gl.load(cu_k_ptr + following) - begin_k


@gluon.jit
def _costs(
    first,
    cu_q_ptr,
    cu_k_ptr,
    tokens,
    reqs,
    CAUSAL: gl.constexpr,
    BLOCK_ROWS: gl.constexpr,
    BLOCK_KEYS: gl.constexpr,
):
    """[_BLOCK_REQS] of requests from `first` on: tiles of queries, and what all these cost."""
    layout: gl.constexpr = gl.BlockedLayout([_BLOCK_REQS // 128], [32], [_WARPS], [0])
    requests = first + gl.arange(0, _BLOCK_REQS, layout=layout)
    num_q, num_k = _lens(requests, cu_q_ptr, cu_k_ptr, tokens, reqs)
    tiles = (num_q + BLOCK_ROWS - 1) // BLOCK_ROWS
    least = _cost(0, num_q, num_k, CAUSAL, BLOCK_ROWS, BLOCK_KEYS)
    rise = _cost(1, num_q, num_k, CAUSAL, BLOCK_ROWS, BLOCK_KEYS) - least
    return tiles, tiles * least + rise * (tiles * (tiles - 1) // 2)


@gluon.jit
def _begin(
    program,
    cu_q_ptr,
    cu_k_ptr,
    tokens,
    reqs,
    units,  # heads, or pairs
    CAUSAL: gl.constexpr,
    BLOCK_ROWS: gl.constexpr,
    BLOCK_KEYS: gl.constexpr,
):
    """(index, unit, request, tile of queries) of a program's first item."""
    all_tiles = 0
    all_costs = 0
    for block in range(0, reqs + 1, _BLOCK_REQS):
        tiles, costs = _costs(
            block, cu_q_ptr, cu_k_ptr, tokens, reqs, CAUSAL, BLOCK_ROWS, BLOCK_KEYS
        )
        all_tiles += gl.sum(tiles, 0)
        all_costs += gl.sum(costs, 0)
    target = all_costs.to(gl.int64) * units * program // gl.num_programs(0)
    unit = (target // all_costs).to(gl.int32)
    rest = (target % all_costs).to(gl.int32)
    request = 0
    before = 0  # tiles of earlier requests
    spent = 0  # what these cost
    sum_costs = 0
    for block in range(0, reqs + 1, _BLOCK_REQS):
        tiles, costs = _costs(
            block, cu_q_ptr, cu_k_ptr, tokens, reqs, CAUSAL, BLOCK_ROWS, BLOCK_KEYS
        )
        up_to = sum_costs + gl.associative_scan(costs, 0, _add)
        is_before = up_to <= rest
        request += gl.sum(is_before.to(gl.int32), 0)
        before += gl.sum(gl.where(is_before, tiles, 0), 0)
        spent += gl.sum(gl.where(is_before, costs, 0), 0)
        sum_costs += gl.sum(costs, 0)
    request = gl.minimum(request, reqs)
    num_q, num_k = _lens(request, cu_q_ptr, cu_k_ptr, tokens, reqs)
    tile = (num_q + BLOCK_ROWS - 1) // BLOCK_ROWS - 1
    index = unit * all_tiles + before
    rest -= spent
    cost = _cost(tile, num_q, num_k, CAUSAL, BLOCK_ROWS, BLOCK_KEYS)
    while rest >= cost:
        rest -= cost
        tile -= 1
        index += 1
        cost = _cost(tile, num_q, num_k, CAUSAL, BLOCK_ROWS, BLOCK_KEYS)
    return index, unit, request, tile


@gluon.jit
def _next(unit, request, tile, cu_q_ptr, tokens, reqs, BLOCK_ROWS: gl.constexpr):
    """The item behind one; some request has a query."""
    tile -= 1
    while tile < 0:
        request += 1
        if request > reqs:
            request = 0
            unit += 1
        end_q = gl.where(request < reqs, gl.load(cu_q_ptr + gl.minimum(request + 1, reqs)), tokens)
        tile = (end_q - gl.load(cu_q_ptr + request) + BLOCK_ROWS - 1) // BLOCK_ROWS - 1
    return unit, request, tile


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
def _load(
    count, first_item, q_tiles, k_tiles, v_tiles, q_smem, k_smem, v_smem, barriers, cu_q_ptr,
    cu_k_ptr, tokens, reqs, group,
    CAUSAL: gl.constexpr, HEADS: gl.constexpr, DIM: gl.constexpr, BLOCK_KEYS: gl.constexpr,
    Q_STAGES: gl.constexpr, K_STAGES: gl.constexpr,
):  # fmt: skip
    """What one group does: ask for each item's queries, and for each tile of keys and values, as
    their places become free."""
    q_ready, q_free, k_ready, k_free, v_ready, v_free = barriers
    BLOCK_ROWS: gl.constexpr = _ROWS * _GROUPS // HEADS
    BYTES: gl.constexpr = DIM * q_smem.dtype.primitive_bitwidth // 8
    num_items = 0
    num_tiles = 0
    unit, request, query_tile = first_item
    for _item in range(count):
        num_q, num_k = _lens(request, cu_q_ptr, cu_k_ptr, tokens, reqs)
        begin_q, begin_k = gl.load(cu_q_ptr + request), gl.load(cu_k_ptr + request)
        head, first = unit * HEADS, query_tile * BLOCK_ROWS
        tiles = _num_tiles(first, num_q, num_k, CAUSAL, BLOCK_ROWS, BLOCK_KEYS)
        if tiles > 0:
            stage = num_items % Q_STAGES
            mbarrier.wait(q_free.index(stage), num_items // Q_STAGES & 1 ^ 1)
            mbarrier.expect(q_ready.index(stage), _GROUPS * _ROWS * BYTES)
            for part in gl.static_range(_GROUPS):
                row = begin_q + first + (part * _ROWS if HEADS == 1 else 0)
                col = (head + (part if HEADS == 2 else 0)) * DIM
                place = q_smem.index(stage * _GROUPS + part)
                _load_tile(q_tiles, [row, col], q_ready.index(stage), place)
            num_items += 1
            col = head // group * DIM
            for tile in range(tiles):
                row = begin_k + (tiles - 1 - tile) * BLOCK_KEYS
                stage = num_tiles % K_STAGES
                phase = num_tiles // K_STAGES & 1 ^ 1
                mbarrier.wait(k_free.index(stage), phase)
                mbarrier.expect(k_ready.index(stage), BLOCK_KEYS * BYTES)
                _load_tile(k_tiles, [row, col], k_ready.index(stage), k_smem.index(stage))
                mbarrier.wait(v_free.index(stage), phase)
                mbarrier.expect(v_ready.index(stage), BLOCK_KEYS * BYTES)
                _load_tile(v_tiles, [row, col], v_ready.index(stage), v_smem.index(stage))
                num_tiles += 1
        unit, request, query_tile = _next(
            unit, request, query_tile, cu_q_ptr, tokens, reqs, BLOCK_ROWS
        )


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
    count, first_item, q_smem, k_smem, v_smem, barriers, cu_q_ptr, cu_k_ptr, out_ptr, lse_ptr,
    stride_out_token, stride_out_head, stride_lse_token, tokens, reqs, scale,
    CAUSAL: gl.constexpr, HEADS: gl.constexpr, DIM: gl.constexpr, BLOCK_KEYS: gl.constexpr,
    Q_STAGES: gl.constexpr, K_STAGES: gl.constexpr,
):  # fmt: skip
    """What each other group does: attention of _ROWS queries of each item."""
    q_ready, q_free, k_ready, k_free, v_ready, v_free = barriers
    DTYPE: gl.constexpr = q_smem.dtype
    BLOCK_ROWS: gl.constexpr = _ROWS * _GROUPS // HEADS
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, BLOCK_KEYS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [_WARPS, 1], [1, 0])
    none = gl.zeros([_ROWS, BLOCK_KEYS], gl.float32, layout=SCORES)
    num_items = 0
    num_tiles = 0
    unit, request, query_tile = first_item
    for _item in range(count):
        num_q, num_k = _lens(request, cu_q_ptr, cu_k_ptr, tokens, reqs)
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
            place = mine + num_k - num_q  # of the first query among the keys
            position = place + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, SCORES))
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
            weights = gl.convert_layout(wide.to(DTYPE), WEIGHTS)
            mbarrier.wait(v_ready.index(stage), phase)
            if low + BLOCK_KEYS > num_k:
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
                if CAUSAL and low + BLOCK_KEYS > place + 1:
                    scores = _hide(scores, low, position, num_k, CAUSAL)
                wide, running_max, running_sum, decay = _weigh(
                    scores, running_max, running_sum, scale
                )
                acc = warpgroup_mma_wait(0, deps=(summed,))
                mbarrier.arrive(v_free.index(v_stage), count=1)
                acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, SUMS))[:, None]
                weights = gl.convert_layout(wide.to(DTYPE), WEIGHTS)
            mbarrier.arrive(q_free.index(q_stage), count=1)
            mbarrier.wait(v_ready.index(stage), phase)
            summed = warpgroup_mma(weights, v_smem.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(summed,))
            mbarrier.arrive(v_free.index(stage), count=1)
            num_items += 1
            num_tiles += tiles
        empty = running_sum == 0.0
        divisor = gl.where(empty, 1.0, running_sum)
        inverse = gl.convert_layout(1.0 / divisor, gl.SliceLayout(1, SUMS))
        out = gl.convert_layout((acc * inverse[:, None]).to(DTYPE), ROWS)
        rows = mine + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, ROWS))
        places = (begin_q + rows).to(gl.int64) * stride_out_token + head * stride_out_head
        cols = gl.arange(0, DIM, layout=gl.SliceLayout(0, ROWS))
        places = places[:, None] + cols[None, :]
        gl.store(out_ptr + places, out, mask=(rows < num_q)[:, None])
        rows = mine + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, SCORES))
        lse = gl.where(empty, float("-inf"), running_max * scale + gl.log2(divisor))
        places = (begin_q + rows).to(gl.int64) * stride_lse_token + head
        gl.store(lse_ptr + places, lse * 0.6931471805599453, mask=rows < num_q)
        unit, request, query_tile = _next(
            unit, request, query_tile, cu_q_ptr, tokens, reqs, BLOCK_ROWS
        )


@gluon.jit(do_not_specialize=["tokens", "reqs"])
def _ragged_groups_kernel(
    q_tiles,  # of [tokens, heads * DIM]
    k_tiles,  # of [keys, kv_heads * DIM]
    v_tiles,  # likewise
    cu_q_ptr,  # [reqs + 1] int32
    cu_k_ptr,  # [reqs + 1] int32
    out_ptr,  # [tokens, heads, DIM]
    lse_ptr,  # [tokens, heads] float32
    stride_out_token,
    stride_out_head,
    stride_lse_token,
    tokens,
    reqs,
    units,  # heads, or pairs
    group,  # query heads of a KV head
    scale,  # to units of log2
    CAUSAL: gl.constexpr,
    HEADS: gl.constexpr,  # of an item: 2, of one KV head, or 1
    DIM: gl.constexpr,
    BLOCK_KEYS: gl.constexpr,
    Q_STAGES: gl.constexpr,
    K_STAGES: gl.constexpr,
    OVERLAPPED: gl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    q_smem = gl.allocate_shared_memory(
        q_tiles.dtype, [Q_STAGES * _GROUPS, _ROWS, DIM], q_tiles.layout
    )
    k_smem = gl.allocate_shared_memory(k_tiles.dtype, [K_STAGES, BLOCK_KEYS, DIM], k_tiles.layout)
    v_smem = gl.allocate_shared_memory(v_tiles.dtype, [K_STAGES, BLOCK_KEYS, DIM], v_tiles.layout)
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
    program = gl.program_id(0)
    stop, _unit, _request, _tile = _begin(
        program + 1, cu_q_ptr, cu_k_ptr, tokens, reqs, units, CAUSAL, BLOCK_ROWS, BLOCK_KEYS
    )
    start, unit, request, tile = _begin(
        program, cu_q_ptr, cu_k_ptr, tokens, reqs, units, CAUSAL, BLOCK_ROWS, BLOCK_KEYS
    )
    count, first_item = stop - start, (unit, request, tile)
    gl.warp_specialize(
        [
            (_attend, (
                0, count, first_item, q_smem, k_smem, v_smem, barriers, cu_q_ptr, cu_k_ptr,
                out_ptr, lse_ptr, stride_out_token, stride_out_head, stride_lse_token, tokens,
                reqs, scale, CAUSAL, HEADS, DIM, BLOCK_KEYS, Q_STAGES, K_STAGES,
            )),
            (_attend, (
                1, count, first_item, q_smem, k_smem, v_smem, barriers, cu_q_ptr, cu_k_ptr,
                out_ptr, lse_ptr, stride_out_token, stride_out_head, stride_lse_token, tokens,
                reqs, scale, CAUSAL, HEADS, DIM, BLOCK_KEYS, Q_STAGES, K_STAGES,
            )),
            (_load, (
                count, first_item, q_tiles, k_tiles, v_tiles, q_smem, k_smem, v_smem, barriers,
                cu_q_ptr, cu_k_ptr, tokens, reqs, group, CAUSAL, HEADS, DIM, BLOCK_KEYS, Q_STAGES,
                K_STAGES,
            )),
        ],
        [_WARPS, _WARPS],
        [_REGISTERS, _FEW_REGISTERS],
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
    tiles: GroupTiles = _TILES,
) -> None:
    """A program for each processor; arguments as `fits_groups` takes them."""
    (tokens, heads, dim), group, reqs = q.shape, q.shape[1] // k.shape[1], cu_q.shape[0] - 1
    heads_of_item = 1 if group % _GROUPS.value else _GROUPS.value
    units = heads // heads_of_item
    tiles_of_queries = cdiv(tokens, _ROWS.value * _GROUPS.value // heads_of_item) + reqs
    launch(
        _ragged_groups_kernel,
        (min(tiles_of_queries * units, multiprocessors(q.device)),),
        _tiles_of(q, _ROWS.value),
        _tiles_of(k, tiles.block_keys),
        _tiles_of(v, tiles.block_keys),
        cu_q,
        cu_k,
        out,
        lse,
        out.stride(0),
        out.stride(1),
        lse.stride(0),
        tokens,
        reqs,
        units,
        group,
        scale * 1.4426950408889634,
        CAUSAL=causal,
        HEADS=heads_of_item,
        DIM=dim,
        BLOCK_KEYS=tiles.block_keys,
        Q_STAGES=tiles.query_stages,
        K_STAGES=tiles.key_stages,
        num_warps=_WARPS.value,
        **overlap_options(q.device, _ragged_groups_kernel),
    )


def _tiles_of(x: Tensor, rows: int) -> Any:
    """x [rows, heads, dim], whose heads lie side by side, in tiles of one head's rows."""
    num_rows, heads, dim = x.shape
    flat = x.as_strided((num_rows, heads * dim), (x.stride(0), 1))
    dtype = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for([rows, dim], dtype)
    return TensorDescriptor.from_tensor(flat, [rows, dim], layout)
