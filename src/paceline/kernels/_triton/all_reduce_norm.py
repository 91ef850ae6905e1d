"""Triton kernels of all_reduce_add_rms_norm; see kernels/all_reduce_norm.py for the definition.

A program has whole rows: it pushes its part to the peers, adds theirs and normalises.  What does
not depend on them is loaded while they send.

A long message goes through the channels of `_triton.all_reduce`, in whose words and places it
counts on: a slice has as many rows as a program may hold.

A short one is not announced, which saves a round over the link: a word may follow a slice only when
that has arrived.  Its parts lie in places of their own, where every number is ABSENT until it has
come; who has read one makes it so again.  Two sides are enough here too: a peer that sends turn
t + 2 of a row has got turn t + 1 of it, which came from a later kernel than the one that emptied
the place of turn t.
"""

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.all_reduce import (
    channel_constants,
    give_up_behind,
    ordered_sum,
    part_ptr,
    send,
    wait,
    word_ptr,
)
from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.rms_norm import weighed
from paceline.kernels._triton.runtime import cdiv, next_power_of_2
from paceline.kernels.all_reduce import ABSENT, CHANNELS, POLLED, RELEASED

_ABSENT, _RELEASED = tl.constexpr(ABSENT), tl.constexpr(RELEASED)
_CHANNELS, _POLLED = tl.constexpr(CHANNELS), tl.constexpr(POLLED)
_LOOKS = tl.constexpr(1 << 10)  # at a row, from look to look at the clock
_PER_WARP = 512  # numbers of a row
_TURN_BYTES = 8192  # of a slice of several rows


@triton.jit
def _place_ptr(
    peers_ptr,  # [RANKS, 3] int64
    owner,
    sender,
    turn,
    row,
    RANKS: tl.constexpr,
    SLICE: tl.constexpr,
    WORD: tl.constexpr,  # the integer of a number's size
):
    """Where a part of a row lies in rows [2, RANKS, POLLED, SLICE]."""
    rows_ptr = tl.load(peers_ptr + 3 * owner + 2).to(tl.pointer_type(WORD))
    return part_ptr(rows_ptr, sender, turn, row, RANKS, _POLLED, SLICE)


@triton.jit
def _take(
    place_ptrs,  # [1, BLOCK]
    live,  # [1, BLOCK] bool
    peer_ptr,  # RELEASED where this rank waits for nobody
    WAIT_NS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """[1, BLOCK] bits of a part, once all have come; their place is empty then.  The context is
    lost behind WAIT_NS."""
    bits = tl.load(place_ptrs, mask=live, other=0, volatile=True)
    absent = tl.max((bits == _ABSENT).to(tl.int32), axis=None)
    if INTERPRETED:
        tl.device_assert(
            (absent == 0) | (tl.load(peer_ptr) >= _RELEASED),
            "a peer has not sent: nobody else runs here",
        )
    else:
        began = tl.extra.cuda.globaltimer()
        looks = 0
        while absent != 0:
            bits = tl.load(place_ptrs, mask=live, other=0, volatile=True)
            absent = tl.max((bits == _ABSENT).to(tl.int32), axis=None)
            looks += 1
            if looks % _LOOKS == 0:
                if tl.load(peer_ptr, volatile=True) >= _RELEASED:
                    absent = 0
                give_up_behind(began, WAIT_NS)
    tl.store(place_ptrs, tl.full(bits.shape, _ABSENT, bits.dtype), mask=live)
    return bits


@triton.jit
def _add_and_normalise(
    total,  # [ROWS, BLOCK] float32
    residual,  # [ROWS, BLOCK]
    weight,  # [1, BLOCK] float32
    live,  # [ROWS, BLOCK] bool
    residual_ptrs,  # [ROWS, BLOCK]
    out_ptrs,  # [ROWS, BLOCK]
    eps,
    DTYPE: tl.constexpr,
    DIM: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    WIDE: tl.constexpr,
):
    added = (total.to(DTYPE).to(tl.float32) + residual.to(tl.float32)).to(DTYPE)
    tl.store(residual_ptrs, added, mask=live)
    row = added.to(tl.float32)
    mean_square = tl.sum(row * row, axis=1) / DIM
    normed = row * (1.0 / tl.sqrt(mean_square + eps))[:, None]
    result = weighed(normed, weight, DTYPE, UNIT_OFFSET, WIDE)
    tl.store(out_ptrs, result.to(DTYPE), mask=live)


@triton.jit(do_not_specialize=["rows"])
def _all_reduce_norm_kernel(
    x_ptr,  # [rows, DIM]
    residual_ptr,  # [rows, DIM]
    weight_ptr,  # [DIM]
    out_ptr,  # [rows, DIM]
    box_ptr,  # this rank's, [2, RANKS, CHANNELS, SLICE]; written by its peers
    sent_ptr,  # [WORDS, RANKS] int64
    peers_ptr,  # [RANKS, 3] int64 addresses
    stride_residual,
    rows,
    eps,
    ROWS: tl.constexpr,  # of a slice
    DIM: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    WIDE: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SLICE: tl.constexpr,
    BLOCK: tl.constexpr,
    WAIT_NS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    channel = tl.program_id(0)
    columns = tl.arange(0, BLOCK)[None, :]
    slots = tl.arange(0, ROWS)[:, None] * BLOCK + columns
    weight = tl.load(weight_ptr + columns, mask=columns < DIM, other=0.0).to(tl.float32)
    wait_for_inputs(OVERLAPPED)
    own_ptr = word_ptr(sent_ptr, channel, RANK, RANKS)
    turn = tl.load(own_ptr)
    for first in range(channel * ROWS, rows, tl.num_programs(0) * ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        live = (row < rows) & (columns < DIM)
        own = tl.load(x_ptr + row * DIM + columns, mask=live, other=0.0)
        send(own, live, slots, turn, channel, peers_ptr, x_ptr, RANK, RANKS, SLICE)
        residual_ptrs = residual_ptr + row * stride_residual + columns
        residual = tl.load(residual_ptrs, mask=live, other=0.0)
        wait(sent_ptr, turn, channel, RANK, RANKS, WAIT_NS, INTERPRETED)
        total = ordered_sum(own, live, slots, turn, channel, peers_ptr, x_ptr, RANK, RANKS, SLICE)
        out_ptrs = out_ptr + row * DIM + columns
        _add_and_normalise(
            total,
            residual,
            weight,
            live,
            residual_ptrs,
            out_ptrs,
            eps,
            DTYPE,
            DIM,
            UNIT_OFFSET,
            WIDE,
        )
        turn += 1
    tl.store(own_ptr, turn)


@triton.jit
def _all_reduce_norm_polled_kernel(
    x_ptr,  # [rows, DIM]
    residual_ptr,  # [rows, DIM]
    weight_ptr,  # [DIM]
    out_ptr,  # [rows, DIM]
    rows_ptr,  # this rank's, [2, RANKS, POLLED, SLICE]; written by its peers
    sent_ptr,  # [WORDS, RANKS] int64
    peers_ptr,  # [RANKS, 3] int64 addresses
    stride_residual,
    eps,
    DIM: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    WIDE: tl.constexpr,
    WORD: tl.constexpr,  # the integer of a number's size
    OTHER_NAN: tl.constexpr,  # bits
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SLICE: tl.constexpr,
    BLOCK: tl.constexpr,
    WAIT_NS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)[None, :]
    live = columns < DIM
    weight = tl.load(weight_ptr + columns, mask=live, other=0.0).to(tl.float32)
    wait_for_inputs(OVERLAPPED)
    own_ptr = word_ptr(sent_ptr, _CHANNELS + row, RANK, RANKS)
    turn = tl.load(own_ptr)
    bits = tl.load(x_ptr + row * DIM + columns, mask=live, other=0.0).to(WORD, bitcast=True)
    bits = tl.where(bits == _ABSENT, OTHER_NAN, bits).to(WORD)
    for step in tl.static_range(1, RANKS):
        peer = (RANK + step) % RANKS
        place_ptr = _place_ptr(peers_ptr, peer, RANK, turn, row, RANKS, SLICE, WORD)
        tl.store(place_ptr + columns, bits, mask=live)
    residual_ptrs = residual_ptr + row * stride_residual + columns
    residual = tl.load(residual_ptrs, mask=live, other=0.0)
    total = tl.zeros((1, BLOCK), tl.float32)
    for sender in tl.static_range(RANKS):
        part = bits
        if sender != RANK:
            place_ptr = _place_ptr(peers_ptr, RANK, sender, turn, row, RANKS, SLICE, WORD)
            peer_ptr = word_ptr(sent_ptr, _CHANNELS + row, sender, RANKS)
            part = _take(place_ptr + columns, live, peer_ptr, WAIT_NS, INTERPRETED)
        number = part.to(DTYPE, bitcast=True).to(tl.float32)
        if sender == 0:
            total = number
        else:
            total += number
    let_next_start(OVERLAPPED)  # not before: here nobody waits for a peer any more
    out_ptrs = out_ptr + row * DIM + columns
    _add_and_normalise(
        total,
        residual,
        weight,
        live,
        residual_ptrs,
        out_ptrs,
        eps,
        DTYPE,
        DIM,
        UNIT_OFFSET,
        WIDE,
    )
    tl.store(own_ptr, turn + 1)


def launch_all_reduce_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    unit_offset: bool,
    wide: bool,
    rank: int,
    box: Tensor,
    sent: Tensor,
    rows: Tensor,
    peers: Tensor,
    out: Tensor,
) -> None:
    """A program for each row, or for each channel that the message takes; arguments as checked by
    kernels/all_reduce_norm.py."""
    num_rows, dim = x.shape
    if num_rows == 0:
        return
    block = next_power_of_2(dim)
    where = x.contiguous(), residual, weight, out
    constants = {
        "DIM": dim,
        "UNIT_OFFSET": unit_offset,
        "WIDE": wide,
        "BLOCK": block,
        "num_warps": min(max(block // _PER_WARP, 1), 16),
        **channel_constants(x, rank, box.shape[1]),
    }
    stride = residual.stride(0)
    if num_rows <= POLLED:
        bits = 8 * x.element_size()
        launch(
            _all_reduce_norm_polled_kernel,
            (num_rows,),
            *where,
            rows,
            sent,
            peers,
            stride,
            eps,
            WORD=tl.core.get_int_dtype(bits, signed=True),
            OTHER_NAN=(1 << (bits - 1)) - 1,
            **constants,
            **overlap_options(x.device, _all_reduce_norm_polled_kernel),
        )
        return
    size = max(1, _TURN_BYTES // (block * x.element_size()))
    launch(
        _all_reduce_norm_kernel,
        (min(cdiv(num_rows, size), CHANNELS),),
        *where,
        box,
        sent,
        peers,
        stride,
        num_rows,
        eps,
        ROWS=size,
        **constants,
        **overlap_options(x.device, _all_reduce_norm_kernel),
    )
