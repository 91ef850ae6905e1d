"""Triton kernels of state_chunks; see kernels/extend_states.py for what rows come to.

With the delta rule each chunk's triangular system is solved first, all of them at once: X with
(I + strict(beta_i (k_i . k_j) D_ij)) X = diag(beta), see `_inverse`.  Then a program walks along
the chunks of one request, with some columns of one head's state in registers:

    U = X (V - exp(G) K S);   out = exp(G) Q S + ((q_i . k_j) D_ij) U
    S = exp(G_last) S + K^T (exp(G_last - G) U)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.runtime import block_dim, cdiv, interpreted, next_power_of_2
from paceline.kernels._triton.solve_chunks import launch_solve_chunks
from paceline.kernels._triton.state_parts import product, slots_of, write_window

_COLUMNS = 64  # of a program's states, the fastest of 32, 64 and 128 on an H200
_WIDE_COLUMNS = 32  # where keys are wide or float32: GPUs of 99 KiB of shared memory
_WARPS = 4


@triton.jit
def _state_chunks_kernel(
    q_ptr,  # [tokens, key_heads, KEY_DIM]
    k_ptr,  # [tokens, key_heads, KEY_DIM]
    v_ptr,  # [tokens, heads, VALUE_DIM]
    decay_ptr,  # [tokens, heads] float32
    rate_ptr,  # [tokens, heads] float32
    skip_ptr,  # [heads] or None
    solved_ptr,  # [chunks, heads, SIZE, SIZE], or None without the delta rule
    starts_ptr,  # [padded_reqs + 1] int32
    places_ptr,  # [tokens] int64
    state_ptr,  # [num_slots, heads, KEY_DIM, VALUE_DIM]
    slots_ptr,  # [padded_reqs, 3] int32
    inputs_ptr,  # [tokens, parts, PART]
    window_ptr,  # [num_slots, channels, WINDOW]
    out_ptr,  # [tokens, heads, VALUE_DIM]
    stride_decay_token,
    stride_rate_token,
    stride_slots,
    stride_inputs_token,
    stride_inputs_part,
    heads,
    channels,
    PER_KEY: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PART: tl.constexpr,
    WINDOW: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_C: tl.constexpr,
    WIDEN: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    let_next_start(OVERLAPPED)
    tile, head, req = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    read, written = slots_of(slots_ptr, req, stride_slots)
    dims = tl.arange(0, BLOCK_K)
    cols = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    is_dim, is_col = dims < KEY_DIM, cols < VALUE_DIM
    in_slot = (head * KEY_DIM + dims)[:, None] * VALUE_DIM + cols[None, :]
    of_slot = heads * KEY_DIM * VALUE_DIM
    is_state = is_dim[:, None] & is_col[None, :]
    state = tl.load(
        state_ptr + read * of_slot + in_slot, mask=tl.where(is_state, read, 0) != 0, other=0.0
    ).to(tl.float32)
    key_heads = heads // PER_KEY
    key_head = head // PER_KEY
    begin = tl.load(starts_ptr + req).to(tl.int64)
    end = tl.load(starts_ptr + req + 1)
    chunk = tl.load(places_ptr + begin, mask=begin < end, other=0) // SIZE
    row = tl.arange(0, SIZE)
    sees = row[:, None] >= row[None, :]
    if skip_ptr is not None:
        skip = tl.load(skip_ptr + head).to(tl.float32)
    for first in range(begin, end, SIZE):
        token = first + row
        is_row = token < end
        at_key = (token * key_heads + key_head)[:, None] * KEY_DIM + dims[None, :]
        is_key = is_row[:, None] & is_dim[None, :]
        k = tl.load(k_ptr + at_key, mask=is_key, other=0.0)
        q = tl.load(q_ptr + at_key, mask=is_key, other=0.0)
        at_value = (token * heads + head)[:, None] * VALUE_DIM + cols[None, :]
        is_value = is_row[:, None] & is_col[None, :]
        v = tl.load(v_ptr + at_value, mask=is_value, other=0.0)
        decay = tl.load(decay_ptr + token * stride_decay_token + head, mask=is_row, other=0.0)
        total = tl.cumsum(decay, axis=0)
        last = tl.sum(decay, axis=0)
        kept = tl.exp(total)[:, None]
        apart = tl.exp(tl.where(sees, total[:, None] - total[None, :], float("-inf")))
        held = state.to(k.dtype)
        nothing = tl.zeros([SIZE, BLOCK_V], tl.float32)
        if solved_ptr is not None:
            at_solved = ((chunk * heads + head) * SIZE + row)[:, None] * SIZE + row[None, :]
            solved = tl.load(solved_ptr + at_solved, mask=sees, other=0.0)
            wrong = v.to(tl.float32) - kept * product(k, held, nothing, WIDEN)
            u = product(solved, wrong.to(k.dtype), nothing, WIDEN)
        else:
            rate = tl.load(rate_ptr + token * stride_rate_token + head, mask=is_row, other=0.0)
            u = rate[:, None] * v.to(tl.float32)
        scores = product(q, tl.trans(k), tl.zeros([SIZE, SIZE], tl.float32), WIDEN) * apart
        out = kept * product(q, held, nothing, WIDEN)
        out = product(scores.to(k.dtype), u.to(k.dtype), out, WIDEN)
        if skip_ptr is not None:
            out += skip * v.to(tl.float32)
        tl.store(out_ptr + at_value, out.to(out_ptr.dtype.element_ty), mask=is_value)
        left = tl.exp(last - total)[:, None] * u
        state = product(tl.trans(k), left.to(k.dtype), tl.exp(last) * state, WIDEN)
        chunk += 1
    state = state.to(state_ptr.dtype.element_ty)
    tl.store(state_ptr + written * of_slot + in_slot, state, mask=is_state)
    part = head * tl.num_programs(0) + tile
    write_window(
        part, inputs_ptr, None, window_ptr, read, written, begin, end - begin,
        stride_inputs_token, stride_inputs_part, channels, PART, WINDOW, BLOCK_C,
    )  # fmt: skip


def launch_state_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    rate: Tensor,
    skip: Tensor | None,
    starts: Tensor,
    owners: Tensor,
    rows: Tensor,
    places: Tensor,
    state: Tensor,
    slots: Tensor,
    inputs: Tensor,
    window: Tensor,
    solved: Tensor | None,
    out: Tensor,
) -> None:
    """A program for each chunk and head that solves it, where there is something to solve; then one
    for some columns of each head of each request; arguments as kernels/state_chunks.py checks
    them."""
    heads, value_dim = v.shape[1:]
    key_heads, key_dim = k.shape[1:]
    reqs, size, channels = slots.shape[0], rows.shape[1], window.shape[1]
    is_wide = key_dim * k.element_size() > 256
    block_v = min(_WIDE_COLUMNS if is_wide else _COLUMNS, block_dim(value_dim))
    tiles = cdiv(value_dim, block_v)
    sizes = {
        "PER_KEY": heads // key_heads,
        "KEY_DIM": key_dim,
        "SIZE": size,
        "WIDEN": k.dtype == torch.bfloat16 and interpreted(_state_chunks_kernel),
        # With 1 Triton 3.6 keeps a product of 64 rows where others are read from, on Hopper.
        "num_stages": 2,
    }
    if solved is not None:
        launch_solve_chunks(k, decay, rate, starts, owners, rows, solved)
    launch(
        _state_chunks_kernel,
        (tiles, heads, reqs),
        q,
        k,
        v,
        decay,
        rate,
        skip,
        solved,
        starts,
        places,
        state,
        slots,
        inputs,
        window,
        out,
        decay.stride(0),
        rate.stride(0),
        slots.stride(0),
        inputs.stride(0),
        inputs.stride(1),
        heads,
        channels,
        **sizes,
        VALUE_DIM=value_dim,
        PART=inputs.shape[2],
        WINDOW=window.shape[2],
        BLOCK_K=block_dim(key_dim),
        BLOCK_V=block_v,
        BLOCK_C=next_power_of_2(cdiv(channels, tiles * heads)),
        num_warps=_WARPS,
        **overlap_options(q.device, _state_chunks_kernel),
    )
