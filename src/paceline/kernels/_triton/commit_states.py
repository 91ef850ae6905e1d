"""Triton kernel of commit_states; see kernels/commit_states.py for the definition.

A program takes some columns of one head's state, for one request, and some channels of its window.
"""

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.runtime import cdiv, next_power_of_2
from paceline.kernels._triton.state_parts import slots_of, state_tile, write_window

_COLUMNS, _WARPS = 64, 4  # of a program's states; the fastest on an H200


@triton.jit
def _commit_states_kernel(
    state_ptr,  # [num_slots, heads, KEY_DIM, VALUE_DIM]
    window_ptr,  # [num_slots, channels, WINDOW]
    slots_ptr,  # [padded_reqs, 3] int32
    k_ptr,  # [tokens, heads // PER_KEY, KEY_DIM] float32
    u_ptr,  # [tokens, heads, VALUE_DIM] float32
    summed_ptr,  # [tokens, heads] float32
    inputs_ptr,  # [tokens, channels]
    path_ptr,  # [padded_reqs, LONGEST] int64
    num_kept_ptr,  # [padded_reqs] int32
    stride_slots,
    stride_path_req,
    stride_num_kept,
    heads,
    channels,
    size,  # rows of a request
    PER_KEY: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    LONGEST: tl.constexpr,
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
    num = tl.load(num_kept_ptr + req * stride_num_kept)
    path_ptr += req * stride_path_req
    first = req * size
    key_heads = heads // PER_KEY
    total = tl.zeros([], tl.float32)
    keys, values, sums = (), (), ()
    for index in tl.static_range(LONGEST):  # all rows are asked for before one is waited for
        is_kept = index < num
        token = first + tl.load(path_ptr + index)
        summed = tl.load(summed_ptr + token * heads + head, mask=is_kept, other=0.0)
        total = tl.where(index == num - 1, summed, total)
        at_key = (token * key_heads + head // PER_KEY) * KEY_DIM + dims
        at_value = (token * heads + head) * VALUE_DIM + cols
        sums += (summed,)
        keys += (tl.load(k_ptr + at_key, mask=tl.where(is_dim, num, 0) > index, other=0.0),)
        values += (tl.load(u_ptr + at_value, mask=tl.where(is_col, num, 0) > index, other=0.0),)
    part = head * tl.num_programs(0) + tile
    write_window(
        part, inputs_ptr, path_ptr, window_ptr, read, written, first, num, channels, BLOCK_C,
        channels, BLOCK_C, WINDOW, BLOCK_C,
    )  # fmt: skip
    let_next_start(OVERLAPPED)
    state = tl.exp(total) * state
    for index in tl.static_range(LONGEST):
        left = tl.where(index < num, tl.exp(total - sums[index]), 0.0)
        state += (left * keys[index])[:, None] * values[index][None, :]
    state_ptrs, _ = state_tile(state_ptr, written, head, heads, dims, cols, KEY_DIM, VALUE_DIM)
    tl.store(state_ptrs, state.to(state_ptr.dtype.element_ty), mask=is_state)


def launch_commit_states(
    state: Tensor,
    window: Tensor,
    slots: Tensor,
    k: Tensor,
    u: Tensor,
    summed: Tensor,
    inputs: Tensor,
    path: Tensor,
    num_kept: Tensor,
) -> None:
    """A program for some columns of each head of each request; arguments as
    kernels/commit_states.py checks them."""
    tokens, heads, value_dim = u.shape
    key_heads, key_dim = k.shape[1:]
    reqs, channels = slots.shape[0], inputs.shape[1]
    block_v = min(_COLUMNS, next_power_of_2(value_dim))
    tiles = cdiv(value_dim, block_v)
    launch(
        _commit_states_kernel,
        (tiles, heads, reqs),
        state,
        window,
        slots,
        k,
        u,
        summed,
        inputs,
        path,
        num_kept,
        slots.stride(0),
        path.stride(0),
        num_kept.stride(0),
        heads,
        channels,
        tokens // reqs,
        PER_KEY=heads // key_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        WINDOW=window.shape[2],
        LONGEST=path.shape[1],
        BLOCK_K=next_power_of_2(key_dim),
        BLOCK_V=block_v,
        BLOCK_C=next_power_of_2(cdiv(channels, tiles * heads)),
        num_warps=_WARPS,
        **overlap_options(state.device, _commit_states_kernel),
    )
