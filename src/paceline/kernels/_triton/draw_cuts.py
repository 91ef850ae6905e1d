"""Triton kernels of draw, second part: the cuts of top-k and top-p.

    masses    mass and count by bucket of -scaled, linear from the row's best logit to its lowest
    members   the tokens of the bucket in which the cut lies, as keys
    cuts      the cut, by bisection over the keys of the members

Keys are the bits of -scaled, which is not negative: they are ordered as the numbers are.  Sums are
of whole numbers, so that their order cannot matter.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from paceline.kernels._triton.draw_blocks import (
    FILTER,
    NO_TOKEN,
    TOKENS_OF_BLOCK,
    RowBlocks,
    block_tile,
    logits_of,
    over_blocks,
    row_sizes,
)
from paceline.kernels._triton.launch import (
    launch,
    let_next_start,
    overlap_options,
    wait_for_inputs,
)
from paceline.kernels._triton.runtime import interpreted
from paceline.kernels.draw import Laws
from paceline.kernels.edit_logits import Edits, SampledRows

_BUCKETS = 16
_WIDEST = tl.constexpr(32.0)  # of -scaled: tokens further below the best have no mass
_WEIGHT_SCALE = tl.constexpr(1099511627776.0)  # keep_mask.WEIGHT_SCALE
_BLOCK_MEMBERS = 4096


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
    lowest,  # float32, of a row: -scaled of its lowest logit
    BUCKETS: tl.constexpr,
):
    """int32: 0 holds the best; none is above the one of a lower logit."""
    width = tl.minimum(lowest, _WIDEST)
    below = tl.minimum(-scaled, _WIDEST)
    share = tl.where(width > 0.0, below / tl.where(width > 0.0, width, 1.0), below)
    return tl.minimum(share * BUCKETS, BUCKETS - 1.0).to(tl.int32)


@triton.jit
def _in_buckets(
    logits_ptr,  # [num_rows, vocab]
    edited_ptr,  # [num_rows, vocab] float32
    best_ptr,  # [num_rows, blocks] float32
    lowest_ptr,  # [num_rows, blocks] float32
    n,
    asks,
    temperature,  # float32
    stride_logits_row,
    vocab,
    num_blocks,
    tokens,  # [BLOCK_VOCAB] int32, of one block
    BUCKETS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(scaled float32, buckets int32, best float32) of some tokens of a row that filters."""
    best = tl.max(over_blocks(best_ptr, n, num_blocks, float("-inf"), BLOCK), axis=0)
    low = tl.min(over_blocks(lowest_ptr, n, num_blocks, float("inf"), BLOCK), axis=0)
    logits = logits_of(logits_ptr, edited_ptr, n, asks, stride_logits_row, vocab, tokens)
    scaled = tl.div_rn(logits - best, temperature)
    return scaled, _buckets(scaled, tl.div_rn(best - low, temperature), BUCKETS), best


@triton.jit
def _masses_kernel(
    logits_ptr,  # [num_rows, vocab]
    edited_ptr,  # [num_rows, vocab] float32
    rows_ptr,  # [num_rows] int64
    asks_ptr,  # [table rows] int64
    temperature_ptr,  # [table rows] float32
    best_ptr,  # [num_rows, blocks] float32
    lowest_ptr,  # [num_rows, blocks] float32
    masses_ptr,  # [num_rows, blocks, BUCKETS] int64
    counts_ptr,  # [num_rows, blocks, BUCKETS] int32
    stride_logits_row,
    stride_ints,
    stride_floats,
    vocab,
    num_blocks,
    BUCKETS: tl.constexpr,
    BLOCK: tl.constexpr,
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
        temperature = tl.load(temperature_ptr + row * stride_floats)
        tokens = block * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB)
        scaled, buckets, _best = _in_buckets(
            logits_ptr, edited_ptr, best_ptr, lowest_ptr, n, asks, temperature,
            stride_logits_row, vocab, num_blocks, tokens, BUCKETS, BLOCK,
        )  # fmt: skip
        _, weights = weigh(scaled, LIBDEVICE)
        slots = tl.arange(0, BUCKETS)
        masses = tl.zeros((BUCKETS,), tl.int64)
        counts = tl.zeros((BUCKETS,), tl.int32)
        for bucket in tl.static_range(BUCKETS):
            here = (buckets == bucket) & (tokens < vocab)
            masses = tl.where(slots == bucket, tl.sum(tl.where(here, weights, 0), axis=0), masses)
            counts = tl.where(slots == bucket, tl.sum(here.to(tl.int32), axis=0), counts)
        at = (n * num_blocks + block) * BUCKETS + slots
        tl.store(masses_ptr + at, masses)
        tl.store(counts_ptr + at, counts)


@triton.jit
def _bracket(
    masses_ptr,  # [num_rows, blocks, BUCKETS] int64
    counts_ptr,  # [num_rows, blocks, BUCKETS] int32
    n,
    top_k,  # int64
    top_p,  # float32
    vocab,
    num_blocks,
    BUCKETS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(first, last, above, total): the buckets whose tokens tell the cut, the mass above them, and
    the mass of all.  With top-k these are all buckets down to the one of its cut."""
    slots = tl.arange(0, BUCKETS)
    blocks = tl.arange(0, BLOCK)
    at = (n * num_blocks + blocks[:, None]) * BUCKETS + slots[None, :]
    mask = (blocks < num_blocks)[:, None] & (slots >= 0)[None, :]
    masses = tl.sum(tl.load(masses_ptr + at, mask=mask, other=0), axis=0)
    counts = tl.sum(tl.load(counts_ptr + at, mask=mask, other=0), axis=0)
    total = tl.sum(masses, axis=0)
    before = tl.cumsum(masses, axis=0) - masses
    wanted = total.to(tl.float64) * top_p.to(tl.float64)
    reached = (masses > 0) & (before.to(tl.float64) < wanted)
    of_p = tl.max(tl.where(reached, slots, 0), axis=0)
    of_k = tl.min(tl.where(tl.cumsum(counts, axis=0) >= top_k, slots, BUCKETS - 1), axis=0)
    limits_k = top_k < vocab
    first = tl.where(limits_k, 0, of_p)
    last = tl.where(limits_k, of_k, of_p)
    above = tl.sum(tl.where(slots < first, masses, 0), axis=0)
    return first, last, above, total


@triton.jit
def _members_kernel(
    logits_ptr,  # [num_rows, vocab]
    edited_ptr,  # [num_rows, vocab] float32
    rows_ptr,  # [num_rows] int64
    asks_ptr,  # [table rows] int64
    temperature_ptr,  # [table rows] float32
    top_k_ptr,  # [table rows] int64
    top_p_ptr,  # [table rows] float32
    best_ptr,  # [num_rows, blocks] float32
    lowest_ptr,  # [num_rows, blocks] float32
    masses_ptr,  # [num_rows, blocks, BUCKETS] int64
    counts_ptr,  # [num_rows, blocks, BUCKETS] int32
    members_ptr,  # [num_rows] int32
    keys_ptr,  # [num_rows, vocab] int32, in any order
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
    n = tl.program_id(1).to(tl.int64)
    row = tl.load(rows_ptr + n)
    asks = tl.load(asks_ptr + row * stride_ints)
    if asks & FILTER != 0:
        top_k = tl.load(top_k_ptr + row * stride_ints)
        top_p = tl.load(top_p_ptr + row * stride_floats)
        if (top_k < vocab) | (top_p < 1.0):
            temperature = tl.load(temperature_ptr + row * stride_floats)
            tokens = tl.program_id(0) * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB)
            scaled, buckets, best = _in_buckets(
                logits_ptr, edited_ptr, best_ptr, lowest_ptr, n, asks, temperature,
                stride_logits_row, vocab, num_blocks, tokens, BUCKETS, BLOCK,
            )  # fmt: skip
            first, last, _, _ = _bracket(
                masses_ptr, counts_ptr, n, top_k, top_p, vocab, num_blocks, BUCKETS, BLOCK
            )
            last = tl.where(best < float("inf"), last, -1)  # a row that is not finite has no keys
            is_member = (buckets >= first) & (buckets <= last) & (tokens < vocab)
            num_members = tl.sum(is_member.to(tl.int32), axis=0)
            if num_members > 0:
                start = tl.atomic_add(members_ptr + n, num_members)
                place = start + tl.cumsum(is_member.to(tl.int32), axis=0) - 1
                keys = (0.0 - scaled).to(tl.int32, bitcast=True)
                tl.store(keys_ptr + n * vocab + place, keys, mask=is_member)


@triton.jit
def _count_and_mass(
    keys_ptr,  # [vocab] int32 of one row
    num_members,
    highest,  # int32: keys up to this one
    LIBDEVICE: tl.constexpr,
    BLOCK_MEMBERS: tl.constexpr,
):
    """(int32, int64): how many members have a key up to `highest`, and their mass."""
    counts = tl.zeros((BLOCK_MEMBERS,), tl.int32)
    masses = tl.zeros((BLOCK_MEMBERS,), tl.int64)
    for start in range(0, num_members, BLOCK_MEMBERS):
        index = start + tl.arange(0, BLOCK_MEMBERS)
        keys = tl.load(keys_ptr + index, mask=index < num_members, other=NO_TOKEN)
        here = (keys <= highest) & (index < num_members)
        counts += here.to(tl.int32)
        _, weights = weigh(0.0 - tl.where(here, keys, 0).to(tl.float32, bitcast=True), LIBDEVICE)
        masses += tl.where(here, weights, 0)
    return tl.sum(counts, axis=0), tl.sum(masses, axis=0)


@triton.jit
def _cuts_kernel(
    rows_ptr,  # [num_rows] int64
    asks_ptr,  # [table rows] int64
    top_k_ptr,  # [table rows] int64
    top_p_ptr,  # [table rows] float32
    masses_ptr,  # [num_rows, blocks, BUCKETS] int64
    counts_ptr,  # [num_rows, blocks, BUCKETS] int32
    members_ptr,  # [num_rows] int32
    keys_ptr,  # [num_rows, vocab] int32
    cuts_ptr,  # [num_rows] int32: tokens with keys up to this one pass top-k and top-p
    stride_ints,
    stride_floats,
    vocab,
    num_blocks,
    BUCKETS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_MEMBERS: tl.constexpr,
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
            _first, _last, above, total = _bracket(
                masses_ptr, counts_ptr, n, top_k, top_p, vocab, num_blocks, BUCKETS, BLOCK
            )
            members = tl.load(members_ptr + n)
            row_ptr = keys_ptr + n * vocab
            lows = tl.full((BLOCK_MEMBERS,), 0x7FFFFFFF, tl.int32)
            highs = tl.zeros((BLOCK_MEMBERS,), tl.int32)
            for start in range(0, members, BLOCK_MEMBERS):
                index = start + tl.arange(0, BLOCK_MEMBERS)
                mask = index < members
                lows = tl.minimum(lows, tl.load(row_ptr + index, mask=mask, other=0x7FFFFFFF))
                highs = tl.maximum(highs, tl.load(row_ptr + index, mask=mask, other=0))
            low, high = tl.min(lows, axis=0), tl.max(highs, axis=0)
            if top_k < vocab:
                # The lowest key up to which there are top_k members.
                bottom, top = low, high
                while bottom < top:
                    middle = bottom + (top - bottom) // 2
                    count, _mass = _count_and_mass(
                        row_ptr, members, middle, LIBDEVICE, BLOCK_MEMBERS
                    )
                    enough = count >= top_k
                    top = tl.where(enough, middle, top)
                    bottom = tl.where(enough, bottom, middle + 1)
                high = top
                _count, total = _count_and_mass(row_ptr, members, high, LIBDEVICE, BLOCK_MEMBERS)
            cut = high
            if top_p < 1.0:
                # The highest key below which there is less mass than wanted.
                wanted = total.to(tl.float64) * top_p.to(tl.float64)
                bottom, top = low, high
                while bottom < top:
                    middle = top - (top - bottom) // 2
                    _below, mass = _count_and_mass(
                        row_ptr, members, middle - 1, LIBDEVICE, BLOCK_MEMBERS
                    )
                    is_less = (above + mass).to(tl.float64) < wanted
                    bottom = tl.where(is_less, middle, bottom)
                    top = tl.where(is_less, top, middle - 1)
                cut = bottom
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
    shape = (num_rows, num_blocks, _BUCKETS)
    masses = torch.empty(shape, dtype=torch.int64, device=device)
    counts = torch.empty(shape, dtype=torch.int32, device=device)
    keys = torch.empty(num_rows, vocab, dtype=torch.int32, device=device)
    cuts = torch.empty(num_rows, dtype=torch.int32, device=device)
    sizes = row_sizes(logits, laws, edits, num_blocks)
    launch(
        _masses_kernel,
        (num_blocks, num_rows),
        logits,
        blocks.edited,
        at.rows,
        edits.asks,
        laws.temperature,
        blocks.best,
        blocks.lowest,
        masses,
        counts,
        BUCKETS=_BUCKETS,
        LIBDEVICE=not interpreted(_masses_kernel),
        **sizes,
        **block_tile(block_vocab),
        **overlap_options(device, _masses_kernel),
    )
    launch(
        _members_kernel,
        (num_blocks, num_rows),
        logits,
        blocks.edited,
        at.rows,
        edits.asks,
        laws.temperature,
        laws.top_k,
        laws.top_p,
        blocks.best,
        blocks.lowest,
        masses,
        counts,
        blocks.members,
        keys,
        BUCKETS=_BUCKETS,
        **sizes,
        **block_tile(block_vocab),
        **overlap_options(device, _members_kernel),
    )
    del sizes["stride_logits_row"]
    launch(
        _cuts_kernel,
        (num_rows,),
        at.rows,
        edits.asks,
        laws.top_k,
        laws.top_p,
        masses,
        counts,
        blocks.members,
        keys,
        cuts,
        BUCKETS=_BUCKETS,
        BLOCK_MEMBERS=block_members,
        LIBDEVICE=not interpreted(_cuts_kernel),
        num_warps=min(max(block_members // 256, 1), 16),
        **sizes,
        **overlap_options(device, _cuts_kernel),
    )
    return cuts
