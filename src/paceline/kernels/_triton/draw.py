"""Triton kernels of draw; see kernels/draw.py for the definition.

A row is cut into blocks, one program each, so that a single row fills the chip; a program whose row
does not ask for what its kernel does leaves at once.

    copy_edited   rows with edits: a float32 copy, edited by _triton/edit_logits.py
    best          all rows: the best and the lowest logit of each block, and whether all are finite
    masses        rows that filter: mass and count by bucket of -scaled, linear from best to lowest
    members       rows that filter: the tokens of the bucket in which the cut lies, as keys
    cuts          rows that filter: the cut, by bisection over the keys of the members
    scores        rows that draw: the best score of each block
    tokens        all rows: the best block

Keys are the bits of -scaled, which is not negative: they are ordered as the numbers are.  Sums are
of whole numbers, so that their order cannot matter.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from paceline.core.sampling_params import Asks
from paceline.kernels._triton.edit_logits import EDITS, PENALISE, launch_edit_logits
from paceline.kernels._triton.gumbel import gumbel_at
from paceline.kernels._triton.launch import (
    launch,
    let_next_start,
    overlap_options,
    wait_for_inputs,
)
from paceline.kernels._triton.runtime import interpreted
from paceline.kernels.draw import Laws
from paceline.kernels.edit_logits import Edits, SampledRows

DRAW = tl.constexpr(int(Asks.DRAW))
FILTER = tl.constexpr(int(Asks.FILTER))
_BUCKETS = 16
_WIDEST = tl.constexpr(32.0)  # of -scaled: tokens further below the best have no mass
_NO_TOKEN = tl.constexpr(2147483647)
_WEIGHT_SCALE = tl.constexpr(1099511627776.0)  # keep_mask.WEIGHT_SCALE
_BLOCK_VOCAB = 2048
_BLOCK_MEMBERS = 4096


@triton.jit
def _logits_of(
    logits_ptr,  # [num_rows, vocab]
    edited_ptr,  # [num_rows, vocab] float32
    n,
    asks,
    stride_logits_row,
    vocab,
    tokens,
):
    """float32 logits of a row, edited where it asks for that; -inf behind the vocabulary."""
    mask = tokens < vocab
    if asks & EDITS != 0:
        logits = tl.load(edited_ptr + n * vocab + tokens, mask=mask, other=float("-inf"))
    else:
        raw = tl.load(logits_ptr + n * stride_logits_row + tokens, mask=mask, other=float("-inf"))
        logits = raw.to(tl.float32)
    return logits


@triton.jit
def _over_blocks(
    ptr,  # [num_rows, blocks] float32
    n,
    num_blocks,
    other,
    BLOCK: tl.constexpr,
):
    """[BLOCK] of one row."""
    blocks = tl.arange(0, BLOCK)
    return tl.load(ptr + n * num_blocks + blocks, mask=blocks < num_blocks, other=other)


@triton.jit
def _weights(
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
def _copy_edited_kernel(
    logits_ptr,  # [num_rows, vocab]
    rows_ptr,  # [num_rows] int64
    asks_ptr,  # [table rows] int64
    edited_ptr,  # [num_rows, vocab] float32
    counts_ptr,  # [num_rows, vocab] int32
    stride_logits_row,
    stride_ints,
    vocab,
    BLOCK_VOCAB: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    let_next_start(OVERLAPPED)
    n = tl.program_id(1).to(tl.int64)
    asks = tl.load(asks_ptr + tl.load(rows_ptr + n) * stride_ints)
    if asks & EDITS != 0:
        tokens = tl.program_id(0) * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB)
        mask = tokens < vocab
        logits = tl.load(logits_ptr + n * stride_logits_row + tokens, mask=mask, other=0.0)
        tl.store(edited_ptr + n * vocab + tokens, logits.to(tl.float32), mask=mask)
        if asks & PENALISE != 0:
            zeros = tl.zeros((BLOCK_VOCAB,), tl.int32)
            tl.store(counts_ptr + n * vocab + tokens, zeros, mask=mask)


@triton.jit
def _best_kernel(
    logits_ptr,  # [num_rows, vocab]
    edited_ptr,  # [num_rows, vocab] float32
    rows_ptr,  # [num_rows] int64
    asks_ptr,  # [table rows] int64
    best_ptr,  # [num_rows, blocks] float32; inf: the block holds NaN or an infinity
    tokens_ptr,  # [num_rows, blocks] int32
    lowest_ptr,  # [num_rows, blocks] float32, -inf apart
    members_ptr,  # [num_rows] int32, becomes 0
    stride_logits_row,
    stride_ints,
    vocab,
    num_blocks,
    BLOCK_VOCAB: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    let_next_start(OVERLAPPED)
    block = tl.program_id(0)
    n = tl.program_id(1).to(tl.int64)
    tokens = block * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB)
    mask = tokens < vocab
    raw = tl.load(logits_ptr + n * stride_logits_row + tokens, mask=mask, other=float("-inf"))
    logits = raw.to(tl.float32)
    is_finite = (tl.abs(logits) < float("inf")) | (tokens >= vocab)  # false for NaN
    asks = tl.load(asks_ptr + tl.load(rows_ptr + n) * stride_ints)
    if asks & EDITS != 0:
        logits = tl.load(edited_ptr + n * vocab + tokens, mask=mask, other=float("-inf"))
    logits = tl.where(is_finite, logits, float("inf"))
    best = tl.max(logits, axis=0)
    at = n * num_blocks + block
    tl.store(best_ptr + at, best)
    tl.store(tokens_ptr + at, tl.min(tl.where(logits == best, tokens, _NO_TOKEN), axis=0))
    if asks & FILTER != 0:
        known = tl.where(logits > float("-inf"), logits, float("inf"))
        tl.store(lowest_ptr + at, tl.min(known, axis=0))
        if block == 0:
            tl.store(members_ptr + n, 0)


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
        best = tl.max(_over_blocks(best_ptr, n, num_blocks, float("-inf"), BLOCK), axis=0)
        low = tl.min(_over_blocks(lowest_ptr, n, num_blocks, float("inf"), BLOCK), axis=0)
        tokens = block * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB)
        logits = _logits_of(logits_ptr, edited_ptr, n, asks, stride_logits_row, vocab, tokens)
        scaled = tl.div_rn(logits - best, temperature)
        buckets = _buckets(scaled, tl.div_rn(best - low, temperature), BUCKETS)
        _, weights = _weights(scaled, LIBDEVICE)
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
            best = tl.max(_over_blocks(best_ptr, n, num_blocks, float("-inf"), BLOCK), axis=0)
            low = tl.min(_over_blocks(lowest_ptr, n, num_blocks, float("inf"), BLOCK), axis=0)
            first, last, _, _ = _bracket(
                masses_ptr, counts_ptr, n, top_k, top_p, vocab, num_blocks, BUCKETS, BLOCK
            )
            last = tl.where(best < float("inf"), last, -1)  # a row that is not finite has no keys
            tokens = tl.program_id(0) * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB)
            logits = _logits_of(logits_ptr, edited_ptr, n, asks, stride_logits_row, vocab, tokens)
            scaled = tl.div_rn(logits - best, temperature)
            buckets = _buckets(scaled, tl.div_rn(best - low, temperature), BUCKETS)
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
        keys = tl.load(keys_ptr + index, mask=index < num_members, other=_NO_TOKEN)
        here = (keys <= highest) & (index < num_members)
        counts += here.to(tl.int32)
        _, weights = _weights(0.0 - tl.where(here, keys, 0).to(tl.float32, bitcast=True), LIBDEVICE)
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


@triton.jit
def _scores_kernel(
    logits_ptr,  # [num_rows, vocab]
    edited_ptr,  # [num_rows, vocab] float32
    rows_ptr,  # [num_rows] int64
    positions_ptr,  # [num_rows] int64
    asks_ptr,  # [table rows] int64
    temperature_ptr,  # [table rows] float32
    min_p_ptr,  # [table rows] float32
    seed_ptr,  # [table rows] int64
    cuts_ptr,  # [num_rows] int32
    best_ptr,  # [num_rows, blocks] float32
    score_ptr,  # [num_rows, blocks] float32
    tokens_ptr,  # [num_rows, blocks] int32, of rows that draw
    stride_logits_row,
    stride_ints,
    stride_floats,
    vocab,
    num_blocks,
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
    ints, floats = row * stride_ints, row * stride_floats
    asks = tl.load(asks_ptr + ints)
    if asks & DRAW != 0:
        best = tl.max(_over_blocks(best_ptr, n, num_blocks, float("-inf"), BLOCK), axis=0)
        tokens = block * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB)
        logits = _logits_of(logits_ptr, edited_ptr, n, asks, stride_logits_row, vocab, tokens)
        scaled = tl.div_rn(logits - best, tl.load(temperature_ptr + floats))
        keep = tokens < vocab
        if asks & FILTER != 0:
            keys = (0.0 - scaled).to(tl.int32, bitcast=True)
            odds, _ = _weights(scaled, LIBDEVICE)
            keep = keep & (keys <= tl.load(cuts_ptr + n)) & (odds >= tl.load(min_p_ptr + floats))
        score = tl.full((), float("-inf"), tl.float32)
        token = tl.full((), _NO_TOKEN, tl.int32)
        if tl.sum(keep.to(tl.int32), axis=0) > 0:
            seed, position = tl.load(seed_ptr + ints), tl.load(positions_ptr + n)
            scores = scaled + gumbel_at(seed, position, tokens.to(tl.int64))
            scores = tl.where(keep, scores, float("-inf"))
            score = tl.max(scores, axis=0)
            token = tl.min(tl.where((scores == score) & keep, tokens, _NO_TOKEN), axis=0)
        tl.store(score_ptr + n * num_blocks + block, score)
        tl.store(tokens_ptr + n * num_blocks + block, token)


@triton.jit
def _tokens_kernel(
    rows_ptr,  # [num_rows] int64
    asks_ptr,  # [table rows] int64
    best_ptr,  # [num_rows, blocks] float32
    score_ptr,  # [num_rows, blocks] float32, of rows that draw
    tokens_ptr,  # [num_rows, blocks] int32
    token_ids_ptr,  # [num_rows] int64
    finite_ptr,  # [num_rows] uint8
    stride_ints,
    num_blocks,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    let_next_start(OVERLAPPED)
    n = tl.program_id(0).to(tl.int64)
    best = _over_blocks(best_ptr, n, num_blocks, float("-inf"), BLOCK)
    finite = tl.max(best, axis=0) < float("inf")
    if tl.load(asks_ptr + tl.load(rows_ptr + n) * stride_ints) & DRAW != 0:
        best = _over_blocks(score_ptr, n, num_blocks, float("-inf"), BLOCK)
    blocks = tl.arange(0, BLOCK)
    at = n * num_blocks + blocks
    tokens = tl.load(tokens_ptr + at, mask=blocks < num_blocks, other=_NO_TOKEN)
    token = tl.min(tl.where(best == tl.max(best, axis=0), tokens, _NO_TOKEN), axis=0)
    tl.store(token_ids_ptr + n, tl.where(finite, token, 0).to(tl.int64))
    tl.store(finite_ptr + n, finite.to(tl.uint8))


class RowBlocks(NamedTuple):
    """What is known of every row's blocks before anything is drawn."""

    edited: Tensor  # [num_rows, vocab]  float32  of rows with edits
    best: Tensor  # [num_rows, blocks]  float32  inf: the block is not finite
    tokens: Tensor  # [num_rows, blocks]  int32  of the best
    lowest: Tensor  # [num_rows, blocks]  float32  of rows that filter
    members: Tensor  # [num_rows]  int32  of rows that filter: 0


def launch_draw(
    logits: Tensor,
    at: SampledRows,
    laws: Laws,
    edits: Edits,
    token_ids: Tensor,
    finite: Tensor,
    *,
    block_vocab: int = _BLOCK_VOCAB,
) -> None:
    """Eight kernels; six of them leave rows alone that do not ask for what they do."""
    num_rows = logits.shape[0]
    if num_rows == 0:
        return
    blocks = launch_best(logits, at, edits, block_vocab=block_vocab)
    cuts = launch_cuts(logits, at, laws, edits, blocks, block_vocab=block_vocab)
    score, num_blocks = torch.empty_like(blocks.best), blocks.best.shape[1]
    launch(
        _scores_kernel,
        (num_blocks, num_rows),
        logits,
        blocks.edited,
        at.rows,
        at.positions,
        edits.asks,
        laws.temperature,
        laws.min_p,
        laws.seed,
        cuts,
        blocks.best,
        score,
        blocks.tokens,
        LIBDEVICE=not interpreted(_scores_kernel),
        **_sizes(logits, laws, edits, num_blocks),
        **_tile(block_vocab),
        **overlap_options(logits.device, _scores_kernel),
    )
    launch(
        _tokens_kernel,
        (num_rows,),
        at.rows,
        edits.asks,
        blocks.best,
        score,
        blocks.tokens,
        token_ids,
        finite.view(torch.uint8),
        edits.asks.stride(0),
        num_blocks,
        BLOCK=triton.next_power_of_2(num_blocks),
        num_warps=1,
        **overlap_options(logits.device, _tokens_kernel),
    )


def launch_best(
    logits: Tensor, at: SampledRows, edits: Edits, *, block_vocab: int = _BLOCK_VOCAB
) -> RowBlocks:
    """Edit the rows that ask, and find the best of every block."""
    (num_rows, vocab), device = logits.shape, logits.device
    num_blocks = triton.cdiv(vocab, block_vocab)
    edited = torch.empty(num_rows, vocab, dtype=torch.float32, device=device)
    said = torch.empty(num_rows, vocab, dtype=torch.int32, device=device)
    best, lowest = torch.empty(2, num_rows, num_blocks, device=device).unbind(0)
    tokens = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=device)
    members = torch.empty(num_rows, dtype=torch.int32, device=device)
    strides = (logits.stride(0), edits.asks.stride(0), vocab)
    launch(
        _copy_edited_kernel,
        (num_blocks, num_rows),
        logits,
        at.rows,
        edits.asks,
        edited,
        said,
        *strides,
        **_tile(block_vocab),
        **overlap_options(device, _copy_edited_kernel),
    )
    launch_edit_logits(edited, said, at, edits)
    launch(
        _best_kernel,
        (num_blocks, num_rows),
        logits,
        edited,
        at.rows,
        edits.asks,
        best,
        tokens,
        lowest,
        members,
        *strides,
        num_blocks,
        **_tile(block_vocab),
        **overlap_options(device, _best_kernel),
    )
    return RowBlocks(edited, best, tokens, lowest, members)


def launch_cuts(
    logits: Tensor,
    at: SampledRows,
    laws: Laws,
    edits: Edits,
    blocks: RowBlocks,
    *,
    block_vocab: int = _BLOCK_VOCAB,
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
    sizes = _sizes(logits, laws, edits, num_blocks)
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
        **_tile(block_vocab),
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
        **_tile(block_vocab),
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


def _sizes(logits: Tensor, laws: Laws, edits: Edits, num_blocks: int) -> dict[str, int]:
    return {
        "stride_logits_row": logits.stride(0),
        "stride_ints": edits.asks.stride(0),
        "stride_floats": laws.temperature.stride(0),
        "vocab": logits.shape[1],
        "num_blocks": num_blocks,
        "BLOCK": triton.next_power_of_2(num_blocks),
    }


def _tile(block_vocab: int) -> dict[str, int]:
    return {"BLOCK_VOCAB": block_vocab, "num_warps": min(max(block_vocab // 512, 1), 8)}
