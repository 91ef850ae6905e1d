"""Triton kernel of moe_align; see kernels/moe_align.py for the definition and an example."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.core.parallel import Span
from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.runtime import cdiv, next_power_of_2
from paceline.kernels.moe_align import Alignment, max_blocks

_FEW = 16  # pairs up to which they are compared with one another
# (more pairs up to which it serves, pairs that one program places, comparing pair by pair, pairs
# counted at a time, warps)
_MANY = ((128, 32, 128, 4), (1024, 32, 1024, 4), (8192, 128, 2048, 8))
# Of still more: pairs of a program, so many compared at a time, and counts that are added up at a
# time.
_CHUNK, _PLACED, _COUNTS = 512, 64, 4096

_SIZES = ["num_pairs", "max_blocks", "first_expert", "end_expert"]


@triton.jit(do_not_specialize=_SIZES)
def _moe_align_few_kernel(
    expert_ids_ptr,  # [num_pairs] int32
    order_ptr,  # [num_pairs] int32
    blocks_ptr,  # [max_blocks, 3] int32
    num_pairs,
    max_blocks,
    first_expert,
    end_expert,
    BLOCK_ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    LAST: tl.constexpr,  # more than any expert
    OVERLAPPED: tl.constexpr,
):
    """One program, whose threads each compare a pair with every other: no expert is counted, of
    which most have none."""
    place = tl.arange(0, PAIRS)
    live = place < num_pairs
    wait_for_inputs(OVERLAPPED)
    # Behind all experts where there is no pair.
    ids = tl.load(expert_ids_ptr + place, mask=live, other=LAST)
    let_next_start(OVERLAPPED)
    rank = tl.zeros((PAIRS,), tl.int32)
    for other in tl.static_range(PAIRS):
        theirs = tl.load(expert_ids_ptr + other, mask=other < num_pairs, other=LAST)
        rank += ((theirs < ids) | ((theirs == ids) & (other < place))).to(tl.int32)
    tl.store(order_ptr + rank, place, mask=live)
    tl.debug_barrier()  # what one thread wrote another reads

    # From here on as ordered.
    pair = tl.load(order_ptr + place, mask=live, other=0)
    expert = tl.load(expert_ids_ptr + pair, mask=live, other=LAST)
    begin = tl.zeros((PAIRS,), tl.int32)
    end = begin
    for other in tl.static_range(PAIRS):
        theirs = tl.load(expert_ids_ptr + other, mask=other < num_pairs, other=LAST)
        begin += (theirs < expert).to(tl.int32)
        end += (theirs <= expert).to(tl.int32)
    is_held = (expert >= first_expert) & (expert < end_expert)
    opens = live & is_held & ((place - begin) % BLOCK_ROWS == 0)
    row_ptr = blocks_ptr + (tl.cumsum(opens.to(tl.int32), axis=0) - 1) * 3
    tl.store(row_ptr, expert - first_expert, mask=opens)
    tl.store(row_ptr + 1, place, mask=opens)
    tl.store(row_ptr + 2, tl.minimum(place + BLOCK_ROWS, end), mask=opens)
    is_empty = (place >= tl.sum(opens.to(tl.int32), axis=0)) & (place < max_blocks)
    for field in tl.static_range(3):
        tl.store(blocks_ptr + place * 3 + field, 0, mask=is_empty)


@triton.jit(do_not_specialize=["num_pairs"])
def _moe_align_count_kernel(
    expert_ids_ptr,  # [num_pairs] int32
    counts_ptr,  # [programs, BINS] int32
    num_pairs,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """How many pairs of a program's chunk each expert has."""
    let_next_start(OVERLAPPED)
    wait_for_inputs(OVERLAPPED)
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    ids = tl.load(expert_ids_ptr + at, mask=at < num_pairs, other=NUM_EXPERTS)
    bins = tl.arange(0, BINS)
    tl.store(counts_ptr + tl.program_id(0) * BINS + bins, tl.histogram(ids, BINS))


@triton.jit(do_not_specialize=_SIZES)
def _moe_align_kernel(
    expert_ids_ptr,  # [num_pairs] int32
    counts_ptr,  # [programs, BINS] int32 of each chunk, or None
    order_ptr,  # [num_pairs] int32
    blocks_ptr,  # [max_blocks, 3] int32
    num_pairs,
    max_blocks,
    first_expert,
    end_expert,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BINS: tl.constexpr,
    TILE: tl.constexpr,  # pairs, or chunks, that are counted at a time
    CHUNK: tl.constexpr,  # pairs of a program
    PLACED: tl.constexpr,  # of these, that are compared with one another
    OVERLAPPED: tl.constexpr,
):
    """Every program counts all pairs, and those before its own chunk, or adds up counts of chunks:
    no program waits for one."""
    first = tl.program_id(0) * CHUNK
    bins = tl.arange(0, BINS)
    totals = tl.zeros((BINS,), tl.int32)
    before = tl.zeros((BINS,), tl.int32)
    wait_for_inputs(OVERLAPPED)
    if counts_ptr is None:
        for start in range(0, num_pairs, TILE):
            at = start + tl.arange(0, TILE)
            ids = tl.load(expert_ids_ptr + at, mask=at < num_pairs, other=NUM_EXPERTS)
            counts = tl.histogram(ids, BINS)
            totals += counts
            if start + TILE <= first:
                before += counts
            elif start < first:
                before += tl.histogram(tl.where(at < first, ids, NUM_EXPERTS), BINS)
    else:
        for start in range(0, tl.num_programs(0), TILE):
            chunk = start + tl.arange(0, TILE)
            count_ptrs = counts_ptr + (chunk * BINS)[:, None] + bins[None, :]
            counts = tl.load(count_ptrs, mask=(chunk < tl.num_programs(0))[:, None], other=0)
            totals += tl.sum(counts, axis=0)
            is_before = (chunk < tl.program_id(0))[:, None]
            before += tl.sum(tl.where(is_before, counts, 0), axis=0)
    let_next_start(OVERLAPPED)
    starts = tl.cumsum(totals, axis=0) - totals

    places = tl.arange(0, PLACED)
    for part in range(first, first + CHUNK, PLACED):
        live = part + places < num_pairs
        mine = tl.load(expert_ids_ptr + part + places, mask=live, other=NUM_EXPERTS)
        is_earlier = (mine[:, None] == mine[None, :]) & (places[:, None] > places[None, :])
        rank = tl.sum(is_earlier.to(tl.int32), axis=1)
        base = tl.gather(starts + before, mine, axis=0)
        tl.store(order_ptr + base + rank, part + places, mask=live)
        if CHUNK > PLACED:
            before += tl.histogram(mine, BINS)

    # The first block of every expert held, the second, and so on; programs take turns.
    is_held = (bins >= first_expert) & (bins < end_expert)
    spans = tl.where(is_held, (totals + BLOCK_ROWS - 1) // BLOCK_ROWS, 0)
    row_ptr = blocks_ptr + (tl.cumsum(spans, axis=0) - spans) * 3
    for turn in range(tl.program_id(0), tl.max(spans, axis=0), tl.num_programs(0)):
        exists = turn < spans
        begin = starts + turn * BLOCK_ROWS
        tl.store(row_ptr + turn * 3, bins - first_expert, mask=exists)
        tl.store(row_ptr + turn * 3 + 1, begin, mask=exists)
        end = tl.minimum(begin + BLOCK_ROWS, starts + totals)
        tl.store(row_ptr + turn * 3 + 2, end, mask=exists)
    used = tl.sum(spans, axis=0)
    for tile in range(used + tl.program_id(0) * PLACED, max_blocks, tl.num_programs(0) * PLACED):
        block = tile + places
        for field in tl.static_range(3):
            tl.store(blocks_ptr + block * 3 + field, 0, mask=block < max_blocks)


@triton.jit
def read_block(
    blocks_ptr,  # [max_blocks, 3] int32
    block,
):
    """(expert int64 of those held, begin, end) of a block's pairs in `order`; end <= begin: it has
    none."""
    row_ptr = blocks_ptr + block * 3
    expert = tl.load(row_ptr).to(tl.int64)
    return expert, tl.load(row_ptr + 1), tl.load(row_ptr + 2)


def launch_moe_align(expert_ids: Tensor, experts: Span, block_rows: int) -> Alignment:
    """Alignment of expert_ids [tokens, experts_per_token] int32, contiguous; allocates it.
    experts: whose blocks.

    Graph-safe: the grid depends on shapes only.
    """
    num_pairs = expert_ids.numel()
    blocks = max_blocks(num_pairs, experts.size, block_rows)
    sizes = num_pairs, blocks, experts.first, experts.end
    made = Alignment(
        torch.empty(num_pairs, dtype=torch.int32, device=expert_ids.device),
        torch.empty(blocks, 3, dtype=torch.int32, device=expert_ids.device),
    )
    if num_pairs <= _FEW:
        launch(
            _moe_align_few_kernel,
            (1,),
            expert_ids,
            *made,
            *sizes,
            BLOCK_ROWS=block_rows,
            PAIRS=_FEW,
            LAST=next_power_of_2(experts.total),
            num_warps=1,
            **overlap_options(expert_ids.device, _moe_align_few_kernel),
        )
        return made
    bins = max(32, next_power_of_2(experts.total + 1))
    is_counted = num_pairs > _MANY[-1][0]
    if is_counted:
        chunk, placed, tile, warps = _CHUNK, _PLACED, max(1, _COUNTS // bins), 8
    else:
        chunk, tile, warps = next(size for most, *size in _MANY if num_pairs <= most)
        placed = chunk
    programs, counts = cdiv(num_pairs, chunk), None
    if is_counted:
        counts = torch.empty(programs, bins, dtype=torch.int32, device=expert_ids.device)
        launch(
            _moe_align_count_kernel,
            (programs,),
            expert_ids,
            counts,
            num_pairs,
            NUM_EXPERTS=experts.total,
            BINS=bins,
            CHUNK=chunk,
            num_warps=4,
            **overlap_options(expert_ids.device, _moe_align_count_kernel),
        )
    launch(
        _moe_align_kernel,
        (programs,),
        expert_ids,
        counts,
        *made,
        *sizes,
        NUM_EXPERTS=experts.total,
        BLOCK_ROWS=block_rows,
        BINS=bins,
        TILE=tile,
        CHUNK=chunk,
        PLACED=placed,
        num_warps=warps,
        **overlap_options(expert_ids.device, _moe_align_kernel),
    )
    return made
