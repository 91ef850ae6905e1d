"""Triton kernel of moe_align; see kernels/moe_align.py for the definition and an example."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.launch import launch
from paceline.kernels._triton.runtime import cdiv, next_power_of_2
from paceline.kernels.moe_align import Alignment, max_blocks

# (pairs up to which it serves, pairs that one program places, pairs counted at a time).  Few sizes,
# as each is compiled.  What one program places is compared pair by pair.
_SIZES = ((16, 16, 128), (128, 128, 128), (1 << 31, 128, 2048))
_MAP = 64  # blocks that one program describes at a time


@triton.jit(do_not_specialize=["num_pairs", "max_blocks"])
def _moe_align_kernel(
    expert_ids_ptr,  # [num_pairs] int32
    order_ptr,  # [num_pairs] int32
    blocks_ptr,  # [max_blocks, 3] int32
    num_pairs,
    max_blocks,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BINS: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    MAP: tl.constexpr,
):
    """Every program counts all pairs, and those before its own chunk: no program waits."""
    first = tl.program_id(0) * CHUNK
    bins = tl.arange(0, BINS)
    totals = tl.zeros((BINS,), tl.int32)
    before = tl.zeros((BINS,), tl.int32)
    for start in range(0, num_pairs, TILE):
        at = start + tl.arange(0, TILE)
        ids = tl.load(expert_ids_ptr + at, mask=at < num_pairs, other=NUM_EXPERTS)
        counts = tl.histogram(ids, BINS)
        totals += counts
        if start + TILE <= first:
            before += counts
        elif start < first:
            before += tl.histogram(tl.where(at < first, ids, NUM_EXPERTS), BINS)
    starts = tl.cumsum(totals, axis=0) - totals

    places = tl.arange(0, CHUNK)
    live = first + places < num_pairs
    mine = tl.load(expert_ids_ptr + first + places, mask=live, other=NUM_EXPERTS)
    is_earlier = (mine[:, None] == mine[None, :]) & (places[:, None] > places[None, :])
    rank = tl.sum(is_earlier.to(tl.int32), axis=1)
    is_mine = mine[:, None] == bins[None, :]
    base = tl.sum(tl.where(is_mine, (starts + before)[None, :], 0), axis=1)
    tl.store(order_ptr + base + rank, first + places, mask=live)

    spans = tl.where(bins < NUM_EXPERTS, (totals + BLOCK_ROWS - 1) // BLOCK_ROWS, 0)
    ends = tl.cumsum(spans, axis=0)
    for tile in range(tl.program_id(0) * MAP, max_blocks, tl.num_programs(0) * MAP):
        block = tile + tl.arange(0, MAP)
        is_past = (ends[None, :] <= block[:, None]) & (bins < NUM_EXPERTS)[None, :]
        expert = tl.sum(is_past.to(tl.int32), axis=1)
        owns = expert[:, None] == bins[None, :]
        origin = tl.sum(tl.where(owns, (starts - (ends - spans) * BLOCK_ROWS)[None, :], 0), axis=1)
        stop = tl.sum(tl.where(owns, (starts + totals)[None, :], 0), axis=1)
        begin = origin + block * BLOCK_ROWS
        is_live = expert < NUM_EXPERTS
        row_ptr = blocks_ptr + block * 3
        exists = block < max_blocks
        tl.store(row_ptr, tl.where(is_live, expert, 0), mask=exists)
        tl.store(row_ptr + 1, tl.where(is_live, begin, 0), mask=exists)
        end = tl.minimum(begin + BLOCK_ROWS, stop)
        tl.store(row_ptr + 2, tl.where(is_live, end, 0), mask=exists)


@triton.jit
def read_block(
    blocks_ptr,  # [max_blocks, 3] int32
    block,
):
    """(expert int64, begin, end) of a block's pairs in `order`; end <= begin: it has none."""
    row_ptr = blocks_ptr + block * 3
    expert = tl.load(row_ptr).to(tl.int64)
    return expert, tl.load(row_ptr + 1), tl.load(row_ptr + 2)


def launch_moe_align(expert_ids: Tensor, num_experts: int, block_rows: int) -> Alignment:
    """Alignment of expert_ids [tokens, experts_per_token] int32, contiguous; allocates it.

    Graph-safe: the grid depends on shapes only.
    """
    num_pairs = expert_ids.numel()
    blocks = max_blocks(num_pairs, num_experts, block_rows)
    made = Alignment(
        torch.empty(num_pairs, dtype=torch.int32, device=expert_ids.device),
        torch.empty(blocks, 3, dtype=torch.int32, device=expert_ids.device),
    )
    chunk, tile = next((chunk, tile) for most, chunk, tile in _SIZES if num_pairs <= most)
    launch(
        _moe_align_kernel,
        (cdiv(num_pairs, chunk),),
        expert_ids,
        *made,
        num_pairs,
        blocks,
        NUM_EXPERTS=num_experts,
        BLOCK_ROWS=block_rows,
        BINS=max(32, next_power_of_2(num_experts + 1)),
        TILE=tile,
        CHUNK=chunk,
        MAP=_MAP,
        num_warps=8 if chunk > 16 else 4,
    )
    return made
