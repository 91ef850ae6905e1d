"""Triton kernels of draw's cuts: which tokens of a row may be where top-k and top-p cut it.

    masses    about how much mass, or with top-k how many tokens, lies in each bucket of -scaled;
              the last program of a row tells the bucket in which the cut lies
    members   the tokens of that bucket, as keys; the exact mass above them

Masses of buckets are sums of float32, so where they leave two open both have members.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from paceline.kernels._triton.draw_blocks import FILTER, WIDEST, inverse_of, logits_of
from paceline.kernels._triton.launch import let_next_start, wait_for_inputs
from paceline.kernels._triton.split_merge import finishes_last

_SLACK = tl.constexpr(1e-4)  # relative error of masses; of a float32 sum over a row far less
_WEIGHT_SCALE = tl.constexpr(1099511627776.0)  # keep_mask.WEIGHT_SCALE


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
def row_masses_kernel(
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
def row_members_kernel(
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
