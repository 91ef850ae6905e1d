"""Triton kernels of all_reduce and all_gather; see kernels/all_reduce.py for the definition.

A program is a channel: slices of the message in turns, with words of its own, so programs wait for
the same channel of their peers and for nothing else.  A turn pushes a slice into the box of every
peer, says so in its word there, waits until all peers have said as much here, and reads its own.
As on a CPU there are two sides: who sends turn t + 2 has seen this channel send t + 1, which came
behind reading turn t.  Slices of a channel lie in its place of the box however many channels a
message takes, and words count on from message to message, so any order of sizes passes, in graphs
too; both sides count alike, because ranks send the same messages in the same order.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.launch import launch, overlap_options, wait_for_inputs
from paceline.kernels._triton.runtime import cdiv, interpreted, next_power_of_2
from paceline.kernels.all_reduce import CHANNELS, RELEASED, SLICE_BYTES, WAIT_S

_CHANNELS, _RELEASED = tl.constexpr(CHANNELS), tl.constexpr(RELEASED)
_LEAST = 512  # numbers of a slice: 4 warps of 16 bytes
_SPREAD = 128  # channels of a message that needs no more
_POLLS = tl.constexpr(1 << 16)  # from look to look at the clock


@triton.jit
def word_ptr(
    words_ptr,  # [WORDS, RANKS] int64
    word,  # a channel, or behind these a row
    rank,  # whose turn it tells
    RANKS: tl.constexpr,
):
    """Where a rank says how many turns it has sent."""
    return words_ptr + word * RANKS + rank


@triton.jit
def part_ptr(
    parts_ptr,  # [2, RANKS, COUNT, SLICE]
    sender,
    turn,
    part,
    RANKS: tl.constexpr,
    COUNT: tl.constexpr,
    SLICE: tl.constexpr,
):
    """Where a part lies of what a sender pushes in a turn."""
    place = (((turn % 2) * RANKS + sender) * COUNT + part) * SLICE
    return tl.multiple_of(parts_ptr + place, 16)


@triton.jit
def _slice_ptr(
    peers_ptr,  # [RANKS, 3] int64
    like_ptr,  # of the message's dtype
    owner,  # whose box
    sender,
    turn,
    channel,
    RANKS: tl.constexpr,
    SLICE: tl.constexpr,  # numbers of the message's dtype
):
    """Where a slice lies in a box [2, RANKS, CHANNELS, SLICE]."""
    box_ptr = tl.load(peers_ptr + 3 * owner).to(like_ptr.dtype)
    return part_ptr(box_ptr, sender, turn, channel, RANKS, _CHANNELS, SLICE)


@triton.jit
def send(
    values,  # of the message, of any shape
    live,  # bool, likewise
    places,  # likewise, in the slice
    turn,
    channel,
    peers_ptr,
    like_ptr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SLICE: tl.constexpr,
):
    """Push a slice to all peers and say so."""
    for step in tl.static_range(1, RANKS):
        peer = (RANK + step) % RANKS
        slice_ptr = _slice_ptr(peers_ptr, like_ptr, peer, RANK, turn, channel, RANKS, SLICE)
        tl.store(slice_ptr + places, values, mask=live)
    tl.debug_barrier()  # one thread speaks for all
    for step in tl.static_range(1, RANKS):
        words_ptr = tl.load(peers_ptr + 3 * ((RANK + step) % RANKS) + 1).to(
            tl.pointer_type(tl.int64)
        )
        sent_ptr = word_ptr(words_ptr, channel, RANK, RANKS)
        tl.atomic_xchg(sent_ptr, turn + 1, sem="release", scope="sys")


@triton.jit
def give_up_behind(
    began,  # of `globaltimer`, ns: when the wait began
    WAIT_NS: tl.constexpr,
):
    """For who waits in a loop: the context is lost once that has taken longer than WAIT_NS."""
    if tl.extra.cuda.globaltimer() - began > WAIT_NS:
        tl.inline_asm_elementwise(
            "trap; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def wait(
    sent_ptr,  # [WORDS, RANKS] int64
    turn,
    channel,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    WAIT_NS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Until every peer has sent this turn, or this rank is released; the context is lost behind
    WAIT_NS."""
    for step in tl.static_range(1, RANKS):
        peer_ptr = word_ptr(sent_ptr, channel, (RANK + step) % RANKS, RANKS)
        seen = tl.atomic_add(peer_ptr, 0, sem="acquire", scope="sys")
        if INTERPRETED:
            tl.device_assert(
                (seen > turn) | (seen >= _RELEASED), "a peer has not sent: nobody else runs here"
            )
        else:
            began = tl.extra.cuda.globaltimer()
            polls = 0
            while (seen <= turn) & (seen < _RELEASED):
                seen = tl.atomic_add(peer_ptr, 0, sem="acquire", scope="sys")
                polls += 1
                if polls % _POLLS == 0:
                    give_up_behind(began, WAIT_NS)
    tl.debug_barrier()  # what one thread has seen, all have


@triton.jit
def ordered_sum(
    own,  # this rank's part, as of `send`
    live,
    places,
    turn,
    channel,
    peers_ptr,
    like_ptr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SLICE: tl.constexpr,
):
    """float32, rank 0's part first."""
    total = tl.zeros(own.shape, tl.float32)
    for sender in tl.static_range(RANKS):
        if sender == RANK:
            part = own
        else:
            slice_ptr = _slice_ptr(peers_ptr, like_ptr, RANK, sender, turn, channel, RANKS, SLICE)
            part = tl.load(slice_ptr + places, mask=live, other=0.0, volatile=True)
        if sender == 0:
            total = part.to(tl.float32)
        else:
            total += part.to(tl.float32)
    return total


@triton.jit
def _all_reduce_kernel(
    x_ptr,  # [numel]
    out_ptr,  # [numel]
    box_ptr,  # this rank's, [2, RANKS, CHANNELS, SLICE]; written by its peers
    sent_ptr,  # [WORDS, RANKS] int64
    peers_ptr,  # [RANKS, 3] int64 addresses
    numel,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SLICE: tl.constexpr,
    BLOCK: tl.constexpr,
    WAIT_NS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    channel = tl.program_id(0)
    own_ptr = word_ptr(sent_ptr, channel, RANK, RANKS)
    turn = tl.load(own_ptr)
    for first in range(channel * BLOCK, numel, tl.num_programs(0) * BLOCK):
        slots = tl.arange(0, BLOCK)
        columns = first + slots
        live = columns < numel
        own = tl.load(x_ptr + columns, mask=live, other=0.0)
        send(own, live, slots, turn, channel, peers_ptr, x_ptr, RANK, RANKS, SLICE)
        wait(sent_ptr, turn, channel, RANK, RANKS, WAIT_NS, INTERPRETED)
        total = ordered_sum(own, live, slots, turn, channel, peers_ptr, x_ptr, RANK, RANKS, SLICE)
        tl.store(out_ptr + columns, total.to(out_ptr.dtype.element_ty), mask=live)
        turn += 1
    tl.store(own_ptr, turn)


@triton.jit
def _all_gather_kernel(
    x_ptr,  # [rows, own_columns]
    out_ptr,  # [rows, columns]
    box_ptr,  # this rank's, [2, RANKS, CHANNELS, SLICE]; written by its peers
    sent_ptr,  # [WORDS, RANKS] int64
    peers_ptr,  # [RANKS, 3] int64 addresses
    rows,
    columns,
    most,  # columns of the first rank, which has most
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SLICE: tl.constexpr,
    BLOCK: tl.constexpr,
    WAIT_NS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    channel = tl.program_id(0)
    own_ptr = word_ptr(sent_ptr, channel, RANK, RANKS)
    turn = tl.load(own_ptr)
    own_columns = tl.maximum(tl.minimum(most, columns - RANK * most), 0)
    for first in range(channel * BLOCK, rows * most, tl.num_programs(0) * BLOCK):
        slots = tl.arange(0, BLOCK)
        places = first + slots
        live = places < rows * own_columns
        own = tl.load(x_ptr + places, mask=live, other=0.0)
        send(own, live, slots, turn, channel, peers_ptr, x_ptr, RANK, RANKS, SLICE)
        wait(sent_ptr, turn, channel, RANK, RANKS, WAIT_NS, INTERPRETED)
        for sender in tl.static_range(RANKS):
            theirs = tl.maximum(tl.minimum(most, columns - sender * most), 0)
            has = places < rows * theirs
            if sender == RANK:
                part = own
            else:
                slice_ptr = _slice_ptr(peers_ptr, x_ptr, RANK, sender, turn, channel, RANKS, SLICE)
                part = tl.load(slice_ptr + slots, mask=has, other=0.0, volatile=True)
            width = tl.maximum(theirs, 1)
            row, column = (places // width).to(tl.int64), places % width
            tl.store(out_ptr + row * columns + sender * most + column, part, mask=has)
        turn += 1
    tl.store(own_ptr, turn)


def launch_all_reduce(
    x: Tensor, rank: int, box: Tensor, sent: Tensor, peers: Tensor, out: Tensor
) -> None:
    """A program for each channel that the message takes."""
    grid, constants = _channels(x, rank, box.shape[1], x.numel())
    launch(
        _all_reduce_kernel,
        grid,
        x.contiguous(),
        out,
        box,
        sent,
        peers,
        x.numel(),
        **constants,
        **overlap_options(x.device, _all_reduce_kernel),
    )


def launch_all_gather(
    x: Tensor, rank: int, box: Tensor, sent: Tensor, peers: Tensor, out: Tensor
) -> None:
    """Likewise; the ranks' messages differ in size, and all go as many turns as the largest."""
    (rows, columns), ranks = out.shape, box.shape[1]
    most = cdiv(columns, ranks)
    grid, constants = _channels(x, rank, ranks, rows * most)
    launch(
        _all_gather_kernel,
        grid,
        x.contiguous(),
        out,
        box,
        sent,
        peers,
        rows,
        columns,
        most,
        **constants,
        **overlap_options(x.device, _all_gather_kernel),
    )


def channel_constants(x: Tensor, rank: int, ranks: int) -> dict[str, Any]:
    """What `send`, `wait` and `ordered_sum` are compiled for."""
    return {
        "RANK": rank,
        "RANKS": ranks,
        "SLICE": SLICE_BYTES // x.element_size(),
        "WAIT_NS": int(WAIT_S * 1e9),
        "INTERPRETED": interpreted(_all_reduce_kernel),
    }


def _channels(
    x: Tensor, rank: int, ranks: int, numel: int
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """(grid, constants) for a message of numel numbers, the same on every rank."""
    largest = SLICE_BYTES // x.element_size()
    block = min(largest, max(_LEAST, next_power_of_2(cdiv(numel, _SPREAD))))
    constants = {
        **channel_constants(x, rank, ranks),
        "BLOCK": block,
        "num_warps": 4 if block <= 4 * _LEAST else 8,
    }
    return (min(CHANNELS, cdiv(numel, block)),), constants
