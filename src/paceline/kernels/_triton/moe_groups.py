"""moe_experts of many pairs an expert on Hopper: groups of warps with a part each.

One group asks for tiles of rows and of a weight as their places become free, two multiply, each 64
rows of a block by the same 256 columns.  Rows of the weight come by the copy engine; of the first
product the rows of x, which lie apart, by copies of 16 bytes.  Where a block has 64 rows or fewer
only one group multiplies.

A program for each processor takes tiles in turns: of the first block all columns, then of the next,
so that what runs at a time reads few experts.
"""

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from paceline.kernels._triton.gluon_tiles import load_tile, tiles_of
from paceline.kernels._triton.launch import launch, overlap_options, wait_for_inputs
from paceline.kernels._triton.moe_align import read_block
from paceline.kernels._triton.primitives import swiglu
from paceline.kernels._triton.runtime import cdiv
from paceline.kernels.moe_align import Alignment
from paceline.kernels.moe_experts import ExpertWeights, SwiGLU
from paceline.kernels.stand_in import multiprocessors

_ROWS = gl.constexpr(64)  # of a group of warps, as many as an instruction multiplies
_GROUPS = gl.constexpr(2)
_COLS = gl.constexpr(256)
_STEP = gl.constexpr(64)  # of the inner dimension
_STAGES = gl.constexpr(4)
_WARPS = gl.constexpr(4)  # of each group
_BEHIND = gl.constexpr(2)  # steps of rows that are asked for while an earlier one is awaited
# Registers of a thread: of those that multiply, and of those that load.
_REGISTERS, _FEW_REGISTERS = gl.constexpr(224), gl.constexpr(56)
BLOCK_ROWS = _ROWS.value * _GROUPS.value
# By the name that a version of Triton has for it.
_load_rows = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def _tokens(rows, begin, end, order_ptr, EXPERTS_PER_TOKEN: gl.constexpr):
    """Of a block's rows; those behind its last are the last's."""
    place = gl.minimum(begin + rows, gl.maximum(end, 1) - 1)
    return (gl.load(order_ptr + place) // EXPERTS_PER_TOKEN).to(gl.int64)


@gluon.jit
def _block(tile, blocks_ptr, num_tiles, COLUMN_TILES: gl.constexpr):
    """(expert, begin, end) of a tile's block; end <= begin: none is left."""
    block = gl.minimum(tile, num_tiles - 1) // COLUMN_TILES
    expert, begin, end = read_block(blocks_ptr, block)
    return expert.to(gl.int32), begin, gl.where(tile < num_tiles, end, begin)


@gluon.jit
def _load(
    a, w_tiles, a_smem, w_smem, ready, free, order_ptr, blocks_ptr, stride_a, num_tiles,
    EXPERTS_PER_TOKEN: gl.constexpr, INNER: gl.constexpr, FEATURES: gl.constexpr,
):  # fmt: skip
    """What one group does: ask for each tile's rows and columns, step by step.  a: x, whose rows
    `order` says; where EXPERTS_PER_TOKEN is None tiles of rows that lie in that order."""
    COLUMN_TILES: gl.constexpr = (FEATURES + _COLS - 1) // _COLS
    BYTES: gl.constexpr = _STEP * w_smem.dtype.primitive_bitwidth // 8
    GATHERED: gl.constexpr = EXPERTS_PER_TOKEN is not None
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [_WARPS, 1], [1, 0])
    rows = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, LAYOUT))
    cols = gl.arange(0, _STEP, layout=gl.SliceLayout(0, LAYOUT))
    asked = 0
    tile = gl.program_id(0)
    expert, begin, end = _block(tile, blocks_ptr, num_tiles, COLUMN_TILES)
    # What the next tile needs is asked for before this one's steps.
    following = _block(tile + gl.num_programs(0), blocks_ptr, num_tiles, COLUMN_TILES)
    if GATHERED:
        tokens = _tokens(rows, begin, end, order_ptr, EXPERTS_PER_TOKEN)
        more_tokens = _tokens(rows + _ROWS, begin, end, order_ptr, EXPERTS_PER_TOKEN)
    while begin < end:
        w_row = expert * FEATURES + tile % COLUMN_TILES * _COLS
        has_both = end - begin > _ROWS
        if GATHERED:
            pointers = a + (tokens * stride_a)[:, None] + cols[None, :]
            more_pointers = a + (more_tokens * stride_a)[:, None] + cols[None, :]
            _expert, next_begin, next_end = following
            tokens = _tokens(rows, next_begin, next_end, order_ptr, EXPERTS_PER_TOKEN)
            more_tokens = _tokens(rows + _ROWS, next_begin, next_end, order_ptr, EXPERTS_PER_TOKEN)
        tile += gl.num_programs(0)
        behind = _block(tile + gl.num_programs(0), blocks_ptr, num_tiles, COLUMN_TILES)
        for start in range(0, INNER, _STEP):
            stage = asked % _STAGES
            mbarrier.wait(free.index(stage), asked // _STAGES & 1 ^ 1)
            if GATHERED:
                mbarrier.expect(ready.index(stage), _COLS * BYTES)
                load_tile(w_tiles, [w_row, start], ready.index(stage), w_smem.index(stage))
                _load_rows(a_smem.index(stage * _GROUPS), pointers)
                if has_both:
                    _load_rows(a_smem.index(stage * _GROUPS + 1), more_pointers)
                async_copy.commit_group()
                async_copy.wait_group(_BEHIND)
                fence_async_shared()
                arrived = gl.maximum(asked - _BEHIND, 0) % _STAGES
                mbarrier.arrive(ready.index(arrived), count=1, pred=asked >= _BEHIND)
                pointers += _STEP
                more_pointers += _STEP
            else:
                mbarrier.expect(ready.index(stage), _COLS * BYTES + _GROUPS * _ROWS * BYTES)
                load_tile(w_tiles, [w_row, start], ready.index(stage), w_smem.index(stage))
                for part in gl.static_range(_GROUPS):
                    place = a_smem.index(stage * _GROUPS + part)
                    load_tile(a, [begin + part * _ROWS, start], ready.index(stage), place)
            asked += 1
        expert, begin, end = following
        following = behind
    if GATHERED:
        async_copy.wait_group(0)
        fence_async_shared()
        for step in gl.static_range(_BEHIND):
            arrived = gl.maximum(asked - _BEHIND + step, 0) % _STAGES
            mbarrier.arrive(ready.index(arrived), count=1, pred=asked > 0)


@gluon.jit
def _multiply(
    PART: gl.constexpr, live, asked, a_smem, w_smem, ready, free,
    INNER: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """[_ROWS, _COLS] float32 of one group's rows of a tile; nothing, but its turns, where none of
    them is live."""
    acc = gl.zeros([_ROWS, _COLS], gl.float32, layout=SUMS)
    STEPS: gl.constexpr = INNER // _STEP
    if live:
        for step in range(STEPS):
            stage = (asked + step) % _STAGES
            mbarrier.wait(ready.index(stage), (asked + step) // _STAGES & 1)
            acc = warpgroup_mma(
                a_smem.index(stage * _GROUPS + PART),
                w_smem.index(stage).permute((1, 0)),
                acc,
                use_acc=step > 0,
                is_async=True,
            )
            acc = warpgroup_mma_wait(1, deps=(acc,))
            done = (asked + gl.maximum(step, 1) - 1) % _STAGES
            mbarrier.arrive(free.index(done), count=1, pred=step > 0)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(free.index((asked + STEPS - 1) % _STAGES), count=1)
    else:
        for step in range(STEPS):
            stage = (asked + step) % _STAGES
            mbarrier.wait(ready.index(stage), (asked + step) // _STAGES & 1)
            mbarrier.arrive(free.index(stage), count=1)
    return acc


@gluon.jit
def _gate_up(
    PART: gl.constexpr, a_smem, w_smem, ready, free, blocks_ptr, bias_ptr, out_ptr, num_tiles,
    alpha, up_offset, LIMIT: gl.constexpr, INNER: gl.constexpr, FEATURES: gl.constexpr,
):  # fmt: skip
    """What each other group does in the first product."""
    COLUMN_TILES: gl.constexpr = (FEATURES + _COLS - 1) // _COLS
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, _COLS, 16])
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [_WARPS, 1], [1, 0])
    INTER: gl.constexpr = FEATURES // 2
    rows = PART * _ROWS + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, OUT))
    inter = gl.arange(0, _COLS // 2, layout=gl.SliceLayout(0, OUT))
    cols = gl.arange(0, _COLS, layout=gl.SliceLayout(0, SUMS))
    asked = 0
    tile = gl.program_id(0)
    expert, begin, end = _block(tile, blocks_ptr, num_tiles, COLUMN_TILES)
    while begin < end:
        first = tile % COLUMN_TILES * _COLS
        tile += gl.num_programs(0)
        following = _block(tile, blocks_ptr, num_tiles, COLUMN_TILES)
        live = end - begin > PART * _ROWS
        acc = _multiply(PART, live, asked, a_smem, w_smem, ready, free, INNER, SUMS)
        asked += INNER // _STEP
        if live:
            if bias_ptr is not None:
                at = gl.minimum(first + cols, FEATURES - 1)
                bias = gl.load(bias_ptr + expert.to(gl.int64) * FEATURES + at)
                acc += bias.to(gl.float32)[None, :]
            gate, up = gl.split(gl.reshape(acc, [_ROWS, _COLS // 2, 2]))
            gated = swiglu(gate, up, alpha, up_offset, LIMIT)
            out = gl.convert_layout(gated.to(out_ptr.dtype.element_ty), OUT)
            at = (begin + rows).to(gl.int64)[:, None] * INTER + (first // 2 + inter)[None, :]
            mask = (begin + rows < end)[:, None] & (first // 2 + inter < INTER)[None, :]
            gl.store(out_ptr + at, out, mask=mask)
        expert, begin, end = following


@gluon.jit
def _store_columns(acc, first, rows_ptr, live, SPAN: gl.constexpr, COLS: gl.constexpr):
    """[_ROWS, COLS] of a tile, by rows."""
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [_WARPS, 1], [1, 0])
    out = gl.convert_layout(acc, OUT)
    cols = first + gl.arange(0, COLS, layout=gl.SliceLayout(0, OUT))
    gl.store(rows_ptr[:, None] + cols[None, :], out, mask=live[:, None] & (cols < SPAN)[None, :])


@gluon.jit
def _down(
    PART: gl.constexpr, a_smem, w_smem, ready, free, blocks_ptr, order_ptr, shares_ptr, bias_ptr,
    out_ptr, num_tiles, INNER: gl.constexpr, FEATURES: gl.constexpr,
):  # fmt: skip
    """What each other group does in the second."""
    COLUMN_TILES: gl.constexpr = (FEATURES + _COLS - 1) // _COLS
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, _COLS, 16])
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [_WARPS, 1], [1, 0])
    HALF: gl.constexpr = _COLS // 2
    rows = PART * _ROWS + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, OUT))
    share_rows = PART * _ROWS + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, SUMS))
    cols = gl.arange(0, _COLS, layout=gl.SliceLayout(0, SUMS))
    asked = 0
    tile = gl.program_id(0)
    expert, begin, end = _block(tile, blocks_ptr, num_tiles, COLUMN_TILES)
    while begin < end:
        first = tile % COLUMN_TILES * _COLS
        tile += gl.num_programs(0)
        following = _block(tile, blocks_ptr, num_tiles, COLUMN_TILES)
        pairs = gl.load(order_ptr + gl.minimum(begin + rows, end - 1))
        share_pairs = gl.load(order_ptr + gl.minimum(begin + share_rows, end - 1))
        live = end - begin > PART * _ROWS
        acc = _multiply(PART, live, asked, a_smem, w_smem, ready, free, INNER, SUMS)
        asked += INNER // _STEP
        if live:
            if bias_ptr is not None:
                at = gl.minimum(first + cols, FEATURES - 1)
                bias = gl.load(bias_ptr + expert.to(gl.int64) * FEATURES + at)
                acc += bias.to(gl.float32)[None, :]
            acc = acc * gl.load(shares_ptr + share_pairs)[:, None]
            halves = gl.permute(
                gl.reshape(acc.to(out_ptr.dtype.element_ty), [_ROWS, 2, HALF]), (0, 2, 1)
            )
            left, right = gl.split(halves)
            rows_ptr = out_ptr + pairs.to(gl.int64) * FEATURES
            is_row = begin + rows < end
            _store_columns(left, first, rows_ptr, is_row, FEATURES, HALF)
            _store_columns(right, first + HALF, rows_ptr, is_row, FEATURES, HALF)
        expert, begin, end = following


@gluon.jit
def _places(w_tiles, ARRIVALS: gl.constexpr):
    """(rows, columns, barriers of what is there, and of what is free)."""
    a_smem = gl.allocate_shared_memory(
        w_tiles.dtype, [_STAGES * _GROUPS, _ROWS, _STEP], w_tiles.layout
    )
    w_smem = gl.allocate_shared_memory(w_tiles.dtype, [_STAGES, _COLS, _STEP], w_tiles.layout)
    ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(_STAGES):
        mbarrier.init(ready.index(stage), count=ARRIVALS)
        mbarrier.init(free.index(stage), count=_GROUPS)
    fence_async_shared()
    return a_smem, w_smem, ready, free


@gluon.jit(do_not_specialize=["num_tiles"])
def _groups_gate_up_kernel(
    x_ptr,  # [tokens, INNER]
    w_tiles,  # of [num_experts * FEATURES, INNER] gate and up rows interleaved
    bias_ptr,  # [num_experts, FEATURES] or None
    order_ptr,  # [num_pairs] int32
    blocks_ptr,  # [max_blocks, 3] int32 expert, begin, end
    out_ptr,  # [num_pairs, FEATURES / 2] in the order of `order`
    stride_x_token,
    num_tiles,
    alpha,
    up_offset,
    LIMIT: gl.constexpr,
    EXPERTS_PER_TOKEN: gl.constexpr,
    INNER: gl.constexpr,
    FEATURES: gl.constexpr,
    OVERLAPPED: gl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    a_smem, w_smem, ready, free = _places(w_tiles, 2)
    gl.warp_specialize(
        [
            (_gate_up, (
                0, a_smem, w_smem, ready, free, blocks_ptr, bias_ptr, out_ptr, num_tiles, alpha,
                up_offset, LIMIT, INNER, FEATURES,
            )),
            (_gate_up, (
                1, a_smem, w_smem, ready, free, blocks_ptr, bias_ptr, out_ptr, num_tiles, alpha,
                up_offset, LIMIT, INNER, FEATURES,
            )),
            (_load, (
                x_ptr, w_tiles, a_smem, w_smem, ready, free, order_ptr, blocks_ptr,
                stride_x_token, num_tiles, EXPERTS_PER_TOKEN, INNER, FEATURES,
            )),
        ],
        [_WARPS, _WARPS],
        [_REGISTERS, _FEW_REGISTERS],
    )  # fmt: skip


@gluon.jit(do_not_specialize=["num_tiles"])
def _groups_down_kernel(
    gated_tiles,  # of [num_pairs, INNER] in the order of `order`
    w_tiles,  # of [num_experts * FEATURES, INNER]
    bias_ptr,  # [num_experts, FEATURES] or None
    routing_weights_ptr,  # [num_pairs] float32
    order_ptr,  # [num_pairs] int32
    blocks_ptr,  # [max_blocks, 3] int32 expert, begin, end
    out_ptr,  # [num_pairs, FEATURES] pair by pair
    num_tiles,
    INNER: gl.constexpr,
    FEATURES: gl.constexpr,
    OVERLAPPED: gl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    a_smem, w_smem, ready, free = _places(w_tiles, 1)
    gl.warp_specialize(
        [
            (_down, (
                0, a_smem, w_smem, ready, free, blocks_ptr, order_ptr, routing_weights_ptr,
                bias_ptr, out_ptr, num_tiles, INNER, FEATURES,
            )),
            (_down, (
                1, a_smem, w_smem, ready, free, blocks_ptr, order_ptr, routing_weights_ptr,
                bias_ptr, out_ptr, num_tiles, INNER, FEATURES,
            )),
            (_load, (
                gated_tiles, w_tiles, a_smem, w_smem, ready, free, order_ptr, blocks_ptr, 0,
                num_tiles, None, INNER, FEATURES,
            )),
        ],
        [_WARPS, _WARPS],
        [_REGISTERS, _FEW_REGISTERS],
    )  # fmt: skip


def launch_group_products(
    x: Tensor,
    routing_weights: Tensor,
    weights: ExpertWeights,
    aligned: Alignment,
    *,
    gate: SwiGLU,
    gated: Tensor,
    parts: Tensor,
) -> None:
    """gated [num_pairs, inter] and of it parts [num_pairs, hidden]; blocks of BLOCK_ROWS."""
    num_pairs, inter = gated.shape
    hidden, blocks = x.shape[1], aligned.blocks.shape[0]
    processors = multiprocessors(x.device)
    num_tiles = blocks * cdiv(2 * inter, _COLS.value)
    launch(
        _groups_gate_up_kernel,
        (min(num_tiles, processors),),
        x,
        _steps_of(weights.gate_up, _COLS.value),
        weights.gate_up_bias,
        *aligned,
        gated,
        x.stride(0),
        num_tiles,
        gate.alpha,
        gate.up_offset,
        LIMIT=gate.limit,
        EXPERTS_PER_TOKEN=num_pairs // x.shape[0],
        INNER=hidden,
        FEATURES=2 * inter,
        num_warps=_WARPS.value,
        **overlap_options(x.device, _groups_gate_up_kernel),
    )
    num_tiles = blocks * cdiv(hidden, _COLS.value)
    launch(
        _groups_down_kernel,
        (min(num_tiles, processors),),
        _steps_of(gated, _ROWS.value),
        _steps_of(weights.down, _COLS.value),
        weights.down_bias,
        routing_weights,
        *aligned,
        parts,
        num_tiles,
        INNER=inter,
        FEATURES=hidden,
        num_warps=_WARPS.value,
        **overlap_options(x.device, _groups_down_kernel),
    )


def _steps_of(x: Tensor, rows: int) -> Any:
    """x [..., inner], contiguous, in tiles of `rows` rows and _STEP columns."""
    return tiles_of(x.view(-1, x.shape[-1]), [rows, _STEP.value])
