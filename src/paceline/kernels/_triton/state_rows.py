"""Triton kernel of state_rows; see kernels/extend_states.py for what rows come to.

A program takes some columns of one head's state, for one request: it is loaded once, into
registers, while everything else is small.  One row needs no product of matrices; several rows are
one chunk, whose triangular system is solved row by row: there are as many columns at a time.
"""

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.runtime import cdiv, next_power_of_2
from paceline.kernels._triton.state_parts import product, slots_of, solve, state_tile, write_window

# (columns of a program's states, warps) of one row each, which are many requests' (few have
# `state_step`), and of rounds.  The fastest on an H200 of 8 to 128 columns and 1 to 16 warps.
_ONE, _ROUND = (64, 4), (32, 4)
_MANY_ROWS = 32  # whose tiles need twice the warps


@triton.jit
def _state_rows_kernel(
    q_ptr,  # [tokens, key_heads, KEY_DIM] float32
    k_ptr,  # [tokens, key_heads, KEY_DIM] float32
    v_ptr,  # [tokens, heads, VALUE_DIM]
    decay_ptr,  # [tokens, heads] float32
    rate_ptr,  # [tokens, heads] float32  beta, or without the delta rule what v is multiplied by
    skip_ptr,  # [heads] or None
    sees_ptr,  # [padded_reqs or 1, size, size] bool
    state_ptr,  # [num_slots, heads, KEY_DIM, VALUE_DIM]
    slots_ptr,  # [padded_reqs, 3] int32
    inputs_ptr,  # [tokens, parts, PART]
    window_ptr,  # [num_slots, channels, WINDOW]
    u_ptr,  # [tokens, heads, VALUE_DIM] float32 or None
    summed_ptr,  # [tokens, heads] float32 or None
    out_ptr,  # [tokens, heads, VALUE_DIM]
    stride_decay_token,
    stride_rate_token,
    stride_sees_req,
    stride_slots,
    stride_inputs_token,
    stride_inputs_part,
    heads,
    channels,
    size,
    DELTA: tl.constexpr,
    PER_KEY: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PART: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    tile, head, req = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    read, written = slots_of(slots_ptr, req, stride_slots)
    dims = tl.arange(0, BLOCK_K)
    cols = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    is_dim, is_col = dims < KEY_DIM, cols < VALUE_DIM
    state_ptrs, is_state = state_tile(state_ptr, read, head, heads, dims, cols, KEY_DIM, VALUE_DIM)
    is_read = tl.where(is_state, read, 0) != 0
    state = tl.load(state_ptrs, mask=is_read, other=0.0).to(tl.float32)
    wait_for_inputs(OVERLAPPED)
    key_heads = heads // PER_KEY
    key_head = head // PER_KEY
    first = req * size
    if ROWS == 1:
        at_key = (first * key_heads + key_head) * KEY_DIM + dims
        k = tl.load(k_ptr + at_key, mask=is_dim, other=0.0)
        q = tl.load(q_ptr + at_key, mask=is_dim, other=0.0)
        at_value = (first * heads + head) * VALUE_DIM + cols
        v = tl.load(v_ptr + at_value, mask=is_col, other=0.0).to(tl.float32)
        decay = tl.load(decay_ptr + first * stride_decay_token + head)
        rate = tl.load(rate_ptr + first * stride_rate_token + head)
        let_next_start(OVERLAPPED)
        if u_ptr is None:  # while the state is on its way
            part = head * tl.num_programs(0) + tile
            write_window(
                part, inputs_ptr, None, window_ptr, read, written, first, size, stride_inputs_token,
                stride_inputs_part, channels, PART, WINDOW, BLOCK_C,
            )  # fmt: skip
        kept = tl.exp(decay)
        if DELTA:
            u = rate * (v - kept * tl.sum(k[:, None] * state, axis=0))
        else:
            u = rate * v
        behind = kept * state + k[:, None] * u[None, :]
        out = tl.sum(q[:, None] * behind, axis=0)
        if skip_ptr is not None:
            out += tl.load(skip_ptr + head).to(tl.float32) * v
        tl.store(out_ptr + at_value, out.to(out_ptr.dtype.element_ty), mask=is_col)
        if u_ptr is not None:
            tl.store(u_ptr + at_value, u, mask=is_col)
            tl.store(summed_ptr + first * heads + head, decay, mask=tile == 0)
    else:
        row = tl.arange(0, ROWS)
        is_row = row < size
        token = first + row
        at_key = ((token * key_heads + key_head) * KEY_DIM)[:, None] + dims[None, :]
        is_key = is_row[:, None] & is_dim[None, :]
        k = tl.load(k_ptr + at_key, mask=is_key, other=0.0)
        q = tl.load(q_ptr + at_key, mask=is_key, other=0.0)
        at_value = ((token * heads + head) * VALUE_DIM)[:, None] + cols[None, :]
        is_value = is_row[:, None] & is_col[None, :]
        v = tl.load(v_ptr + at_value, mask=is_value, other=0.0).to(tl.float32)
        decay = tl.load(decay_ptr + token * stride_decay_token + head, mask=is_row, other=0.0)
        rate = tl.load(rate_ptr + token * stride_rate_token + head, mask=is_row, other=0.0)
        sees = tl.load(
            sees_ptr + req * stride_sees_req + row[:, None] * size + row[None, :],
            mask=is_row[:, None] & is_row[None, :],
            other=0,
        ).to(tl.int1)
        let_next_start(OVERLAPPED)
        if u_ptr is None:  # while the state is on its way
            part = head * tl.num_programs(0) + tile
            write_window(
                part, inputs_ptr, None, window_ptr, read, written, first, size, stride_inputs_token,
                stride_inputs_part, channels, PART, WINDOW, BLOCK_C,
            )  # fmt: skip
        total = tl.sum(tl.where(sees, decay[None, :], 0.0), axis=1)
        apart = tl.exp(tl.where(sees, total[:, None] - total[None, :], float("-inf")))
        kept = tl.exp(total)
        nothing = tl.zeros([ROWS, BLOCK_V], tl.float32)
        square = tl.zeros([ROWS, ROWS], tl.float32)
        u = rate[:, None] * v
        if DELTA:
            u -= (rate * kept)[:, None] * product(k, state, nothing, False)
            sides = rate[:, None] * product(k, tl.trans(k), square, False) * apart
            sides = tl.where(row[:, None] > row[None, :], sides, 0.0)
            u = solve(u, sides, size, ROWS)
        scores = product(q, tl.trans(k), square, False) * apart
        out = kept[:, None] * product(q, state, nothing, False)
        out = product(scores, u, out, False)
        if skip_ptr is not None:
            out += tl.load(skip_ptr + head).to(tl.float32) * v
        tl.store(out_ptr + at_value, out.to(out_ptr.dtype.element_ty), mask=is_value)
        if u_ptr is not None:
            tl.store(u_ptr + at_value, u, mask=is_value)
            tl.store(summed_ptr + token * heads + head, total, mask=tl.where(is_row, tile, 1) == 0)
        else:
            last = tl.sum(tl.where(row == size - 1, total, 0.0), axis=0)
            left = tl.where(is_row, tl.exp(last - total), 0.0)[:, None]
            behind = product(tl.trans(k), left * u, tl.exp(last) * state, False)
    if u_ptr is None:
        state_ptrs, _ = state_tile(state_ptr, written, head, heads, dims, cols, KEY_DIM, VALUE_DIM)
        tl.store(state_ptrs, behind.to(state_ptr.dtype.element_ty), mask=is_state)


def launch_state_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    rate: Tensor,
    skip: Tensor | None,
    is_delta: bool,
    sees: Tensor,
    state: Tensor,
    slots: Tensor,
    inputs: Tensor,
    window: Tensor,
    u: Tensor | None,
    summed: Tensor | None,
    out: Tensor,
) -> None:
    """A program for some columns of each head of each request; arguments as kernels/state_rows.py
    checks them."""
    heads, value_dim = v.shape[1:]
    key_heads, key_dim = k.shape[1:]
    reqs, size, channels = slots.shape[0], sees.shape[1], window.shape[1]
    rows = 1 if size == 1 else max(16, next_power_of_2(size))
    block_k = next_power_of_2(key_dim) if rows == 1 else max(16, next_power_of_2(key_dim))
    columns, warps = _ONE if rows == 1 else _ROUND
    block_v = min(columns, next_power_of_2(value_dim))
    block_v = block_v if rows == 1 else max(16, block_v)
    tiles = cdiv(value_dim, block_v)
    launch(
        _state_rows_kernel,
        (tiles, heads, reqs),
        q,
        k,
        v,
        decay,
        rate,
        skip,
        sees,
        state,
        slots,
        inputs,
        window,
        u,
        summed,
        out,
        decay.stride(0),
        rate.stride(0),
        0 if sees.shape[0] == 1 else sees.stride(0),
        slots.stride(0),
        inputs.stride(0),
        inputs.stride(1),
        heads,
        channels,
        size,
        DELTA=is_delta,
        PER_KEY=heads // key_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        PART=inputs.shape[2],
        WINDOW=window.shape[2],
        ROWS=rows,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        BLOCK_C=next_power_of_2(cdiv(channels, tiles * heads)),
        num_warps=8 if rows >= _MANY_ROWS else warps,
        **overlap_options(q.device, _state_rows_kernel),
    )
