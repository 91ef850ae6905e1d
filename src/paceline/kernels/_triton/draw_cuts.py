"""Triton kernels of draw, second part: the cuts of top-k and top-p.

Behind `masses` and `members` (draw_members.py) the cut of each row is found by bisection over the
keys of its members.  Keys are the bits of -scaled, which is not negative: they are ordered as the
numbers are.  What decides is a sum of whole numbers, whose order cannot matter.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.draw_blocks import (
    FILTER,
    NO_TOKEN,
    RowBlocks,
    block_tile,
    row_sizes,
)
from paceline.kernels._triton.draw_members import row_masses_kernel, row_members_kernel, weigh
from paceline.kernels._triton.launch import (
    launch,
    let_next_start,
    overlap_options,
    wait_for_inputs,
)
from paceline.kernels._triton.runtime import interpreted
from paceline.kernels.draw import BUCKETS, TOKENS_OF_BLOCK, Laws
from paceline.kernels.edit_logits import Edits, SampledRows

_BLOCK_MEMBERS = 8192  # that a program of cuts holds in registers
_FEW = 8  # a row with an eighth of that has tiles of an eighth


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
        row_masses_kernel,
        (num_blocks, num_rows),
        *given,
        masses,
        arrived,
        brackets,
        BUCKETS=BUCKETS,
        **sizes,
        **block,
        **block_tile(block_vocab),
        **overlap_options(device, row_masses_kernel),
    )
    launch(
        row_members_kernel,
        (num_blocks, num_rows),
        *given,
        brackets,
        members,
        keys,
        sums,
        BUCKETS=BUCKETS,
        LIBDEVICE=not interpreted(row_members_kernel),
        **sizes,
        **block_tile(block_vocab),
        **overlap_options(device, row_members_kernel),
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
