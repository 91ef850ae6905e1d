"""Triton kernel that solves the triangular systems of chunks, all of them at once: X with

    (I + strict(beta_i (k_i . k_j) D_ij)) X = diag(beta)

see kernels/extend_states.py.  A program is one warp, which takes one head of one chunk in blocks of
16 rows, the least that a product takes: nothing leaves its registers.  Blocks on the diagonal are
inverted by themselves, those below row by row of blocks,

    X_ij = -X_ii (A_ij X_jj + A_i,j+1 X_j+1,j + ... + A_i,i-1 X_i-1,j)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.runtime import block_dim, interpreted
from paceline.kernels._triton.state_parts import product

_SIDE = tl.constexpr(16)  # of a block
_STEP = 64  # numbers of keys that a program holds at a time


@triton.jit
def _halves(
    a,  # float32
):
    """(the first 8 bits of its significands, the next 8), bfloat16."""
    high = (a.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16), (a - high).to(tl.bfloat16)


@triton.jit
def _times(
    a,  # [16, 16] float32
    b,  # [16, 16] float32
    HALVES: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """a @ b; HALVES: to 16 bits, in three products of bfloat16; else as nearly as `product`."""
    nothing = tl.zeros([_SIDE, _SIDE], tl.float32)
    if HALVES:
        high_a, low_a = _halves(a)
        high_b, low_b = _halves(b)
        found = product(high_a, low_b, nothing, WIDEN)
        found = product(low_a, high_b, found, WIDEN)
        return product(high_a, high_b, found, WIDEN)
    return product(a, b, nothing, False)


@triton.jit
def _inverse(
    sides,  # [16, 16] float32, strictly lower triangular
    HALVES: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """[16, 16] (I + sides)^-1: blocks of 4 by their powers, of which the fourth is nothing; then
    twice neighbours joined, (I + A + C)^-1 = B - B C B where B = (I + A)^-1 and C lies below A's
    two blocks."""
    row, col = tl.arange(0, _SIDE)[:, None], tl.arange(0, _SIDE)[None, :]
    near = tl.where(row // 4 == col // 4, sides, 0.0)
    one = tl.where(row == col, 1.0, 0.0)
    found = _times(one - near, one + _times(near, near, HALVES, WIDEN), HALVES, WIDEN)
    for step in tl.static_range(2):
        width = 4 << step
        is_below = (row // (2 * width) == col // (2 * width)) & (row // width != col // width)
        below = tl.where(is_below, sides, 0.0)
        found -= _times(_times(found, below, HALVES, WIDEN), found, HALVES, WIDEN)
    return found


@triton.jit(do_not_specialize=["reqs"])
def _solve_chunks_kernel(
    k_ptr,  # [tokens, key_heads, KEY_DIM]
    decay_ptr,  # [tokens, heads] float32
    rate_ptr,  # [tokens, heads] float32
    starts_ptr,  # [padded_reqs + 1] int32
    owners_ptr,  # [chunks] int64
    rows_ptr,  # [chunks, SIZE] int64
    solved_ptr,  # [chunks, heads, SIZE, SIZE]; blocks above the diagonal are not written
    stride_decay_token,
    stride_rate_token,
    reqs,
    heads,
    PER_KEY: tl.constexpr,
    KEY_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    STEP: tl.constexpr,
    WIDEN: tl.constexpr,
    HALVES: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    let_next_start(OVERLAPPED)
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    owner = tl.load(owners_ptr + chunk)
    if owner < reqs:
        end = tl.load(starts_ptr + owner + 1)
        first = tl.load(rows_ptr + chunk * SIZE)
        row, col = tl.arange(0, _SIDE)[:, None], tl.arange(0, _SIDE)[None, :]
        totals, rates, before = (), (), 0.0
        for block in tl.static_range(SIZE // _SIDE):
            token = first + block * _SIDE + tl.arange(0, _SIDE)
            is_row = token < end
            decay = tl.load(decay_ptr + token * stride_decay_token + head, mask=is_row, other=0.0)
            rate = tl.load(rate_ptr + token * stride_rate_token + head, mask=is_row, other=0.0)
            totals += (before + tl.cumsum(decay, axis=0),)
            rates += (rate,)
            before += tl.sum(decay, axis=0)
        # k_i . k_j of blocks on and below the diagonal, row by row
        products = ()
        for _ in tl.static_range(SIZE // _SIDE * (SIZE // _SIDE + 1) // 2):
            products += (tl.zeros([_SIDE, _SIDE], tl.float32),)
        for from_dim in range(0, KEY_DIM, STEP):
            dims = from_dim + tl.arange(0, STEP)
            keys, added = (), ()
            for block in tl.static_range(SIZE // _SIDE):
                token = first + block * _SIDE + tl.arange(0, _SIDE)
                at = (token * (heads // PER_KEY) + head // PER_KEY)[:, None] * KEY_DIM + dims
                is_key = (token < end)[:, None] & (dims < KEY_DIM)[None, :]
                keys += (tl.load(k_ptr + at, mask=is_key, other=0.0),)
                for other in tl.static_range(block + 1):
                    known = products[block * (block + 1) // 2 + other]
                    added += (product(keys[block], tl.trans(keys[other]), known, WIDEN),)
            products = added
        solved_ptr += (chunk * heads + head) * SIZE * SIZE
        solved = ()  # likewise
        for block in tl.static_range(SIZE // _SIDE):
            apart = totals[block][:, None] - totals[block][None, :]
            apart = tl.exp(tl.where(row > col, apart, float("-inf")))
            own = _inverse(
                rates[block][:, None] * products[block * (block + 3) // 2] * apart, HALVES, WIDEN
            )
            sides = ()
            for other in tl.static_range(block):
                apart = tl.exp(totals[block][:, None] - totals[other][None, :])
                sides += (
                    rates[block][:, None] * products[block * (block + 1) // 2 + other] * apart,
                )
            for other in tl.static_range(block):
                known = _times(sides[other], solved[other * (other + 3) // 2], HALVES, WIDEN)
                for between in tl.static_range(other + 1, block):
                    above = solved[between * (between + 1) // 2 + other]
                    known += _times(sides[between], above, HALVES, WIDEN)
                solved += (-_times(own, known, HALVES, WIDEN),)
            solved += (own,)
            for other in tl.static_range(block + 1):
                found = solved[block * (block + 1) // 2 + other] * rates[other][None, :]
                ptrs = solved_ptr + (block * _SIDE + row) * SIZE + other * _SIDE + col
                tl.store(ptrs, found.to(solved_ptr.dtype.element_ty))


def launch_solve_chunks(
    k: Tensor,
    decay: Tensor,
    rate: Tensor,
    starts: Tensor,
    owners: Tensor,
    rows: Tensor,
    solved: Tensor,
) -> None:
    """A program for each head of each chunk; arguments as kernels/state_chunks.py checks them."""
    key_heads, key_dim = k.shape[1:]
    heads = decay.shape[1]
    launch(
        _solve_chunks_kernel,
        (rows.shape[0], heads),
        k,
        decay,
        rate,
        starts,
        owners,
        rows,
        solved,
        decay.stride(0),
        rate.stride(0),
        starts.shape[0] - 1,
        heads,
        PER_KEY=heads // key_heads,
        KEY_DIM=key_dim,
        SIZE=rows.shape[1],
        STEP=min(_STEP, block_dim(key_dim)),
        WIDEN=k.dtype == torch.bfloat16 and interpreted(_solve_chunks_kernel),
        HALVES=k.element_size() == 2,
        num_warps=1,
        # See state_chunks.
        num_stages=2,
        **overlap_options(k.device, _solve_chunks_kernel),
    )
