"""Triton kernels of draw, second part: the cuts of top-k and top-p.

    masses    about how much mass, or with top-k how many tokens, lies in each bucket of -scaled;
              the last program of a row tells the bucket in which the cut lies
    members   the tokens of that bucket, as keys; the exact mass above them
    cuts      the cut, by bisection over the keys of the members

Keys are the bits of -scaled, which is not negative: they are ordered as the numbers are.  Masses of
buckets are sums of float32, so where they leave two
open both have members.  What decides is a sum of whole numbers, whose order cannot matter.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from paceline.kernels._triton.draw_blocks import (
    FILTER,
    NO_TOKEN,
    WIDEST,
    RowBlocks,
    block_tile,
    inverse_of,
    logits_of,
    row_sizes,
)
from paceline.kernels._triton.launch import (
    launch,
    let_next_start,
    overlap_options,
    wait_for_inputs,
)
from paceline.kernels._triton.runtime import interpreted
from paceline.kernels._triton.split_merge import finishes_last
from paceline.kernels.draw import BUCKETS, TOKENS_OF_BLOCK, Laws
from paceline.kernels.edit_logits import Edits, SampledRows

_SLACK = tl.constexpr(1e-4)  # relative error of masses; of a float32 sum over a row far less
_WEIGHT_SCALE = tl.constexpr(1099511627776.0)  # keep_mask.WEIGHT_SCALE
_BLOCK_MEMBERS = 8192  # that a program of cuts holds in registers
_FEW = 8  # a row with an eighth of that has tiles of an eighth


@triton.jit
def weigh(
    scaled,  # float32, 0 or below
    LIBDEVICE: tl.constexpr,
):
    """(odds float32, masses int64), as keep_mask has them: with the exponential that torch has."""
    odds = libdevice.exp(scaled) if LIBDEVICE else tl.exp(scaled)
    return odds, (odds * _WEIGHT_SCALE).to(tl.int64)


@triton.jit
def _buckets(
    scaled,  # float32
    edges_ptr,  # [5] float32, a row's: as row_edges has them
    BUCKETS: tl.constexpr,
):
    """int32: 0 holds the best; none is above the one of a lower logit.

    Two kernels must agree, so no product is left to the compiler to fuse with a sum.
    """
    near, far = tl.load(edges_ptr), tl.load(edges_ptr + 1)
    depth = tl.minimum(-scaled, WIDEST)
    found = tl.fma(tl.minimum(depth, near), tl.load(edges_ptr + 2), 0.0)
    between = tl.maximum(tl.minimum(depth, far) - near, 0.0)
    found = tl.fma(between, tl.load(edges_ptr + 3), found)
    found = tl.fma(tl.maximum(depth - far, 0.0), tl.load(edges_ptr + 4), found)
    return tl.minimum(found, BUCKETS - 1.0).to(tl.int32)


@triton.jit
def _bracket(
    masses_ptr,  # [num_rows, blocks, BUCKETS] float32
    n,
    num_blocks,
    top_k,  # int64
    top_p,  # float32
    vocab,
    BUCKETS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(first, last): the buckets whose tokens tell the cut; with top-k all down to that cut's."""
    slots = tl.arange(0, BUCKETS)
    blocks = tl.arange(0, BLOCK)
    at = (n * num_blocks + blocks[:, None]) * BUCKETS + slots[None, :]
    mask = (blocks < num_blocks)[:, None] & (slots >= 0)[None, :]
    by_block = tl.load(masses_ptr + at, mask=mask, other=0.0, cache_modifier=".cg")
    masses = tl.sum(by_block.to(tl.float64), axis=0)
    until = tl.cumsum(masses, axis=0)
    if top_k < vocab:
        first = 0
        last = tl.min(tl.where(until >= top_k.to(tl.float64), slots, BUCKETS - 1), axis=0)
    else:
        before = until - masses
        wanted = tl.sum(masses, axis=0) * top_p.to(tl.float64)
        first = tl.max(tl.where(before <= wanted * (1.0 - _SLACK), slots, 0), axis=0)
        last = tl.max(tl.where(before < wanted * (1.0 + _SLACK), slots, 0), axis=0)
    return first, last


@triton.jit
def _masses_kernel(
    logits_ptr,  # [num_rows, vocab]
    edited_ptr,  # [num_rows, vocab] float32
    rows_ptr,  # [num_rows] int64
    asks_ptr,  # [table rows] int64
    temperature_ptr,  # [table rows] float32
    top_k_ptr,  # [table rows] int64
    top_p_ptr,  # [table rows] float32
    row_best_ptr,  # [num_rows] float32
    edges_ptr,  # [num_rows, 5] float32
    masses_ptr,  # [num_rows, blocks, BUCKETS] float32; of a row with top-k numbers of tokens
    arrived_ptr,  # [num_rows] int32, 0 before and after
    brackets_ptr,  # [num_rows, 2] int32: first and last bucket whose tokens tell the cut
    stride_logits_row,
    stride_ints,
    stride_floats,
    vocab,
    num_blocks,
    BUCKETS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    let_next_start(OVERLAPPED)
    block = tl.program_id(0)
    n = tl.program_id(1).to(tl.int64)
    row = tl.load(rows_ptr + n)
    asks = tl.load(asks_ptr + row * stride_ints)
    if asks & FILTER != 0:
        top_k = tl.load(top_k_ptr + row * stride_ints)
        top_p = tl.load(top_p_ptr + row * stride_floats)
        if (top_k < vocab) | (top_p < 1.0):
            inverse = inverse_of(tl.load(temperature_ptr + row * stride_floats))
            tokens = block * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB)
            best = tl.load(row_best_ptr + n)
            logits = logits_of(logits_ptr, edited_ptr, n, asks, stride_logits_row, vocab, tokens)
            scaled = (logits - best) * inverse
            buckets = _buckets(scaled, edges_ptr + n * 5, BUCKETS)
            weights = tl.where(top_k < vocab, 1.0, tl.exp(scaled))
            weights = tl.where(tokens < vocab, weights, 0.0)
            slots = tl.arange(0, BUCKETS)
            masses = tl.zeros((BUCKETS,), tl.float32)
            for bucket in tl.static_range(BUCKETS):
                mass = tl.sum(tl.where(buckets == bucket, weights, 0.0), axis=0)
                masses = tl.where(slots == bucket, mass, masses)
            tl.store(masses_ptr + (n * num_blocks + block) * BUCKETS + slots, masses)
            if finishes_last(arrived_ptr + n, num_blocks):
                low, high = _bracket(masses_ptr, n, num_blocks, top_k, top_p, vocab, BUCKETS, BLOCK)
                high = tl.where(best < float("inf"), high, -1)  # not finite: no keys
                tl.store(brackets_ptr + n * 2, low)
                tl.store(brackets_ptr + n * 2 + 1, high)


@triton.jit
def _members_kernel(
    logits_ptr,  # [num_rows, vocab]
    edited_ptr,  # [num_rows, vocab] float32
    rows_ptr,  # [num_rows] int64
    asks_ptr,  # [table rows] int64
    temperature_ptr,  # [table rows] float32
    top_k_ptr,  # [table rows] int64
    top_p_ptr,  # [table rows] float32
    row_best_ptr,  # [num_rows] float32
    edges_ptr,  # [num_rows, 5] float32
    brackets_ptr,  # [num_rows, 2] int32
    members_ptr,  # [num_rows] int32
    keys_ptr,  # [num_rows, vocab] int32, in any order
    sums_ptr,  # [2, num_rows, blocks] int64: mass above the members, of all; not of top-k
    stride_logits_row,
    stride_ints,
    stride_floats,
    vocab,
    num_blocks,
    BUCKETS: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr,
    LIBDEVICE: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    let_next_start(OVERLAPPED)
    block = tl.program_id(0)
    n = tl.program_id(1).to(tl.int64)
    row = tl.load(rows_ptr + n)
    asks = tl.load(asks_ptr + row * stride_ints)
    if asks & FILTER != 0:
        top_k = tl.load(top_k_ptr + row * stride_ints)
        top_p = tl.load(top_p_ptr + row * stride_floats)
        if (top_k < vocab) | (top_p < 1.0):
            inverse = inverse_of(tl.load(temperature_ptr + row * stride_floats))
            low, high = tl.load(brackets_ptr + n * 2), tl.load(brackets_ptr + n * 2 + 1)
            tokens = block * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB)
            best = tl.load(row_best_ptr + n)
            logits = logits_of(logits_ptr, edited_ptr, n, asks, stride_logits_row, vocab, tokens)
            scaled = (logits - best) * inverse
            buckets = _buckets(scaled, edges_ptr + n * 5, BUCKETS)
            if top_k >= vocab:
                _, weights = weigh(scaled, LIBDEVICE)
                weights = tl.where(tokens < vocab, weights, 0)
                at = sums_ptr + n * num_blocks + block
                tl.store(at, tl.sum(tl.where(buckets < low, weights, 0), axis=0))
                tl.store(at + tl.num_programs(1) * num_blocks, tl.sum(weights, axis=0))
            is_member = (buckets >= low) & (buckets <= high) & (tokens < vocab)
            num_members = tl.sum(is_member.to(tl.int32), axis=0)
            if num_members > 0:
                start = tl.atomic_add(members_ptr + n, num_members)
                place = start + tl.cumsum(is_member.to(tl.int32), axis=0) - 1
                keys = (0.0 - scaled).to(tl.int32, bitcast=True)
                tl.store(keys_ptr + n * vocab + place, keys, mask=is_member)


@triton.jit
def _keys_at(
    keys_ptr,  # [vocab] int32 of one row
    start,
    num_members,
    BLOCK_MEMBERS: tl.constexpr,
):
    """[BLOCK_MEMBERS] int32 from `start` on; above every key where there is no member."""
    index = start + tl.arange(0, BLOCK_MEMBERS)
    return tl.load(keys_ptr + index, mask=index < num_members, other=NO_TOKEN)


@triton.jit
def _masses_of(
    keys,  # int32
    LIBDEVICE: tl.constexpr,
):
    """int64, as weigh; 0 where there is no member."""
    is_member = keys != NO_TOKEN
    _, masses = weigh(0.0 - tl.where(is_member, keys, 0).to(tl.float32, bitcast=True), LIBDEVICE)
    return tl.where(is_member, masses, 0)


@triton.jit
def _count(
    keys,  # [BLOCK_MEMBERS] int32: the first members
    keys_ptr,  # [vocab] int32 of one row
    num_members,
    highest,  # int32
    BLOCK_MEMBERS: tl.constexpr,
):
    """int32: how many members have a key up to `highest`."""
    count = tl.sum((keys <= highest).to(tl.int32), axis=0)
    for start in range(BLOCK_MEMBERS, num_members, BLOCK_MEMBERS):
        more = _keys_at(keys_ptr, start, num_members, BLOCK_MEMBERS)
        count += tl.sum((more <= highest).to(tl.int32), axis=0)
    return count


@triton.jit
def _mass(
    keys,  # [BLOCK_MEMBERS] int32: the first members
    masses,  # [BLOCK_MEMBERS] int64: theirs
    keys_ptr,  # [vocab] int32 of one row
    num_members,
    highest,  # int32
    LIBDEVICE: tl.constexpr,
    BLOCK_MEMBERS: tl.constexpr,
):
    """int64: the mass of the members with a key up to `highest`."""
    mass = tl.sum(tl.where(keys <= highest, masses, 0), axis=0)
    for start in range(BLOCK_MEMBERS, num_members, BLOCK_MEMBERS):
        more = _keys_at(keys_ptr, start, num_members, BLOCK_MEMBERS)
        mass += tl.sum(tl.where(more <= highest, _masses_of(more, LIBDEVICE), 0), axis=0)
    return mass


@triton.jit
def _cut(
    keys_ptr,  # [vocab] int32 of one row
    num_members,
    top_k,  # int64
    top_p,  # float32
    above,  # int64: mass above the members; without top-k
    total,  # int64: mass of all; without top-k
    vocab,
    LIBDEVICE: tl.constexpr,
    BLOCK_MEMBERS: tl.constexpr,
):
    """int32: the highest key that passes."""
    keys = _keys_at(keys_ptr, 0, num_members, BLOCK_MEMBERS)
    low = tl.min(keys, axis=0)
    high = tl.max(tl.where(keys != NO_TOKEN, keys, 0), axis=0)
    for start in range(BLOCK_MEMBERS, num_members, BLOCK_MEMBERS):
        more = _keys_at(keys_ptr, start, num_members, BLOCK_MEMBERS)
        low = tl.minimum(low, tl.min(more, axis=0))
        high = tl.maximum(high, tl.max(tl.where(more != NO_TOKEN, more, 0), axis=0))
    if top_k < vocab:
        # The lowest key up to which there are top_k members.
        bottom, top = low, high
        while bottom < top:
            middle = bottom + (top - bottom) // 2
            count = _count(keys, keys_ptr, num_members, middle, BLOCK_MEMBERS)
            enough = count >= top_k
            top = tl.where(enough, middle, top)
            bottom = tl.where(enough, bottom, middle + 1)
        high = top
    cut = high
    if top_p < 1.0:
        # The highest key below which there is less mass than wanted.
        masses = _masses_of(keys, LIBDEVICE)
        if top_k < vocab:
            total = _mass(keys, masses, keys_ptr, num_members, high, LIBDEVICE, BLOCK_MEMBERS)
        wanted = total.to(tl.float64) * top_p.to(tl.float64)
        bottom, top = low, high
        while bottom < top:
            middle = top - (top - bottom) // 2
            mass = _mass(keys, masses, keys_ptr, num_members, middle - 1, LIBDEVICE, BLOCK_MEMBERS)
            is_less = (above + mass).to(tl.float64) < wanted
            bottom = tl.where(is_less, middle, bottom)
            top = tl.where(is_less, top, middle - 1)
        cut = bottom
    return cut


@triton.jit
def _cuts_kernel(
    rows_ptr,  # [num_rows] int64
    asks_ptr,  # [table rows] int64
    top_k_ptr,  # [table rows] int64
    top_p_ptr,  # [table rows] float32
    members_ptr,  # [num_rows] int32
    keys_ptr,  # [num_rows, vocab] int32
    sums_ptr,  # [2, num_rows, num_blocks] int64: mass above the members, of all; not of top-k
    cuts_ptr,  # [num_rows] int32: tokens with keys up to this one pass top-k and top-p
    stride_ints,
    stride_floats,
    vocab,
    num_blocks,
    BLOCK: tl.constexpr,
    BLOCK_MEMBERS: tl.constexpr,
    FEW_MEMBERS: tl.constexpr,
    LIBDEVICE: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    let_next_start(OVERLAPPED)
    n = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + n)
    asks = tl.load(asks_ptr + row * stride_ints)
    if asks & FILTER != 0:
        top_k = tl.load(top_k_ptr + row * stride_ints)
        top_p = tl.load(top_p_ptr + row * stride_floats)
        cut = tl.full((), 0x7FFFFFFF, tl.int32)
        if (top_k < vocab) | (top_p < 1.0):
            num_members = tl.load(members_ptr + n)
            above = tl.full((), 0, tl.int64)
            total = tl.full((), 0, tl.int64)
            if top_k >= vocab:
                blocks = tl.arange(0, BLOCK)
                at, mask = sums_ptr + n * num_blocks + blocks, blocks < num_blocks
                above = tl.sum(tl.load(at, mask=mask, other=0), axis=0)
                at += tl.num_programs(0) * num_blocks
                total = tl.sum(tl.load(at, mask=mask, other=0), axis=0)
            row_ptr = keys_ptr + n * vocab
            if num_members <= FEW_MEMBERS:
                cut = _cut(
                    row_ptr, num_members, top_k, top_p, above, total, vocab, LIBDEVICE, FEW_MEMBERS
                )
            else:
                cut = _cut(
                    row_ptr, num_members, top_k, top_p, above, total, vocab, LIBDEVICE,
                    BLOCK_MEMBERS,
                )  # fmt: skip
        tl.store(cuts_ptr + n, cut)


def launch_cuts(
    logits: Tensor,
    at: SampledRows,
    laws: Laws,
    edits: Edits,
    blocks: RowBlocks,
    *,
    block_vocab: int = TOKENS_OF_BLOCK,
    block_members: int = _BLOCK_MEMBERS,
) -> Tensor:
    """[num_rows] int32, of rows that filter: tokens with keys up to it pass top-k and top-p."""
    (num_rows, vocab), device = logits.shape, logits.device
    num_blocks = blocks.best.shape[1]
    masses = torch.empty(num_rows, num_blocks, BUCKETS, device=device)
    brackets = torch.empty(num_rows, 2, dtype=torch.int32, device=device)
    sums = torch.empty(2, num_rows, num_blocks, dtype=torch.int64, device=device)
    keys = torch.empty(num_rows, vocab, dtype=torch.int32, device=device)
    cuts = torch.empty(num_rows, dtype=torch.int32, device=device)
    sizes = row_sizes(logits, laws, edits, num_blocks)
    block = {"BLOCK": sizes.pop("BLOCK")}
    _, arrived, members = blocks.counts
    given = (
        logits,
        blocks.edited,
        at.rows,
        edits.asks,
        laws.temperature,
        laws.top_k,
        laws.top_p,
        blocks.row_best,
        blocks.edges,
    )
    launch(
        _masses_kernel,
        (num_blocks, num_rows),
        *given,
        masses,
        arrived,
        brackets,
        BUCKETS=BUCKETS,
        **sizes,
        **block,
        **block_tile(block_vocab),
        **overlap_options(device, _masses_kernel),
    )
    launch(
        _members_kernel,
        (num_blocks, num_rows),
        *given,
        brackets,
        members,
        keys,
        sums,
        BUCKETS=BUCKETS,
        LIBDEVICE=not interpreted(_members_kernel),
        **sizes,
        **block_tile(block_vocab),
        **overlap_options(device, _members_kernel),
    )
    launch(
        _cuts_kernel,
        (num_rows,),
        at.rows,
        edits.asks,
        laws.top_k,
        laws.top_p,
        members,
        keys,
        sums,
        cuts,
        sizes["stride_ints"],
        sizes["stride_floats"],
        vocab,
        num_blocks,
        **block,
        BLOCK_MEMBERS=block_members,
        FEW_MEMBERS=block_members // _FEW,
        LIBDEVICE=not interpreted(_cuts_kernel),
        num_warps=min(max(block_members // 256, 1), 16),
        **overlap_options(device, _cuts_kernel),
    )
    return cuts
