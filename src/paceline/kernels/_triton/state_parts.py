"""Jitted helpers of the kernels that read and write slots of states: which slot, where in it, its
window, the solution of a chunk."""

import triton
import triton.language as tl

from paceline.core.model.cache_groups import READ, WRITE

_READ, _WRITE = tl.constexpr(READ), tl.constexpr(WRITE)


@triton.jit
def slots_of(
    slots_ptr,  # [padded_reqs, 3] int32
    req,
    stride_slots,
):
    """(the slot that a request reads, 0 where it starts from zeros, and the one that it writes)."""
    row_ptr = slots_ptr + req * stride_slots
    return tl.load(row_ptr + _READ).to(tl.int64), tl.load(row_ptr + _WRITE).to(tl.int64)


@triton.jit
def state_tile(
    state_ptr,  # [num_slots, heads, KEY_DIM, VALUE_DIM]
    slot,
    head,
    heads,
    dims,  # [rows] of a head's state
    cols,  # [columns] of it
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """(pointers [rows, columns] into a slot, whether each is of the state)."""
    in_slot = (head * KEY_DIM + dims).to(tl.int64)[:, None] * VALUE_DIM + cols[None, :]
    is_state = (dims < KEY_DIM)[:, None] & (cols < VALUE_DIM)[None, :]
    return state_ptr + slot * (heads * KEY_DIM * VALUE_DIM) + in_slot, is_state


@triton.jit
def write_window(
    part,  # which of the request's blocks of channels
    inputs_ptr,  # [tokens, parts, PART]
    path_ptr,  # [num] int64 rows of the request that last, or None: its first ones
    window_ptr,  # [num_slots, channels, WINDOW]
    read,
    written,
    first,  # row of the step
    num,  # of rows that last
    stride_inputs_token,
    stride_inputs_part,
    channels,
    PART: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The inputs of a request's last WINDOW tokens, oldest first, of some channels.

    The two slots may be one: all is read before anything is written.
    """
    channel = (part * BLOCK + tl.arange(0, BLOCK))[:, None]
    column = tl.arange(0, triton.next_power_of_2(WINDOW))[None, :]
    live = (channel < channels) & (column < WINDOW)
    offset = num - WINDOW + column
    is_new = offset >= 0
    row = offset
    if path_ptr is not None:
        row = tl.load(path_ptr + offset, mask=is_new & (column < WINDOW), other=0)
    in_row = channel // PART * stride_inputs_part + channel % PART
    input_ptrs = inputs_ptr + (first + row) * stride_inputs_token + in_row
    new = tl.load(input_ptrs, mask=live & is_new, other=0.0)
    is_old = tl.where(live & (offset < 0), read, 0) != 0
    read_ptrs = window_ptr + (read * channels + channel) * WINDOW + num + column
    old = tl.load(read_ptrs, mask=is_old, other=0.0)
    tl.debug_barrier()
    written_ptrs = window_ptr + (written * channels + channel) * WINDOW + column
    tl.store(written_ptrs, tl.where(is_new, new.to(old.dtype), old), mask=live)


@triton.jit
def product(
    a,  # [rows, inner]
    b,  # [inner, cols]
    acc,  # [rows, cols] float32
    WIDEN: tl.constexpr,
):
    """acc + a @ b; float32 as nearly as three products of tf32 make it.  WIDEN: the interpreter
    would multiply bfloat16 as bit patterns.

    No operand is the transpose of a product: Triton 3.4 to 3.7 computes that wrongly on Hopper.
    """
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="tf32x3")


@triton.jit
def solve(
    value,  # [ROWS, cols] float32
    sides,  # [ROWS, ROWS] float32, strictly lower triangular
    size,
    ROWS: tl.constexpr,
):
    """X [ROWS, cols] with (I + sides) X = value: each row from those before it."""
    row = tl.arange(0, ROWS)
    for index in range(1, size):
        side = tl.sum(tl.where((row == index)[:, None], sides, 0.0), axis=0)
        known = tl.sum(side[:, None] * value, axis=0)
        value = tl.where((row == index)[:, None], value - known[None, :], value)
    return value
