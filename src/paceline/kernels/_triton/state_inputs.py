"""Triton kernel of state_inputs; see kernels/state_inputs.py for the definition.

A program takes one block of channels, a head's queries or keys or some of the values that lie side
by side, of some tokens.  Where all of these follow on one another, each of its threads walks along
a run of them, and loads a row once for all rows whose tap it is.
"""

import triton
import triton.language as tl
from torch import Tensor

from paceline.core.model.cache_groups import READ
from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.runtime import cdiv, next_power_of_2

_FEW_TOKENS = 128  # up to so many a program takes one token
_RUNS, _STEPS = 4, 8  # of a program behind it, and tokens of a run
_WARPS = 2
_READ = tl.constexpr(READ)


@triton.jit
def _found(
    place,  # [tokens] int64
    dims,  # [dims] of inputs
    cols,  # [dims] channels
    live,  # [tokens, dims] bool
    inputs_ptr,
    window_ptr,
    slots_ptr,
    stride_inputs_token,
    stride_slots,
    tokens,
    channels,
    WINDOW: tl.constexpr,
):
    """[tokens, dims] what stands at places: rows of the step, or columns of windows."""
    is_row = place < tokens
    rows = tl.load(
        inputs_ptr + place[:, None] * stride_inputs_token + dims[None, :],
        mask=live & is_row[:, None],
        other=0.0,
    )
    behind = place - tokens
    slot_ptrs = slots_ptr + (behind // WINDOW) * stride_slots + _READ
    slot = tl.load(slot_ptrs, mask=~is_row, other=0).to(tl.int64)
    windows = tl.load(
        window_ptr
        + (slot[:, None] * channels + cols[None, :]) * WINDOW
        + (behind % WINDOW)[:, None],
        mask=live & (slot != 0)[:, None],
        other=0.0,
    )
    return tl.where(is_row[:, None], rows, windows.to(rows.dtype)).to(tl.float32)


@triton.jit
def _write_head(
    total,  # [tokens, dims] float32, the convolution's
    own,  # [tokens, dims] what it was made of
    token,  # [tokens] int64
    dims,  # [dims] of the head, or of the values side by side
    cols,  # [dims] channels
    live,  # [tokens, dims] bool
    is_key,
    is_value,
    head,
    q_ptr,
    k_ptr,
    v_ptr,
    kept_ptr,
    channels,
    key_heads,
    scale,
    EPS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUES: tl.constexpr,
):
    """SiLU, the norm of queries and keys, and where each goes."""
    if kept_ptr is not None:
        tl.store(kept_ptr + token[:, None] * channels + cols[None, :], own, mask=live)
    mixed = (total / (1.0 + tl.exp(-total))).to(own.dtype)
    if is_value:
        at = (token * key_heads + head)[:, None] * VALUES + dims[None, :]
        tl.store(v_ptr + at, mixed.to(v_ptr.dtype.element_ty), mask=live)
    else:
        wide = mixed.to(tl.float32)
        if EPS is not None:
            squares = tl.sum(tl.where(live, wide * wide, 0.0), axis=1)
            wide = wide * (1.0 / tl.sqrt(squares + EPS))[:, None]
        at = (token * key_heads + head)[:, None] * KEY_DIM + dims[None, :]
        if is_key:
            tl.store(k_ptr + at, wide.to(k_ptr.dtype.element_ty), mask=live)
        else:
            tl.store(q_ptr + at, (wide * scale).to(q_ptr.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["tokens"])
def _state_inputs_kernel(
    inputs_ptr,  # [tokens, parts, PART]
    weight_ptr,  # [channels, WINDOW + 1]
    bias_ptr,  # [channels] or None
    window_ptr,  # [num_slots, channels, WINDOW]
    slots_ptr,  # [padded_reqs, 3] int32
    places_ptr,  # [tokens, WINDOW] int64
    q_ptr,  # [tokens, key_heads, KEY_DIM]
    k_ptr,  # [tokens, key_heads, KEY_DIM]
    v_ptr,  # [tokens, key_heads, VALUES]
    kept_ptr,  # [tokens, channels] or None
    stride_inputs_token,
    stride_inputs_part,
    stride_slots,
    tokens,
    channels,
    key_heads,
    first_q,
    first_k,
    first_v,
    step_key,
    step_value,
    scale,
    EPS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUES: tl.constexpr,  # of a key head, side by side
    PART: tl.constexpr,
    WINDOW: tl.constexpr,
    RUNS: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    part = tl.program_id(1)
    dims = tl.arange(0, BLOCK_DIM)
    is_value = part >= 2 * key_heads
    is_key = part >= key_heads
    if is_value:
        blocks = (VALUES + BLOCK_DIM - 1) // BLOCK_DIM
        head = (part - 2 * key_heads) // blocks
        dims += (part - 2 * key_heads) % blocks * BLOCK_DIM
        first = first_v + head * step_value
        is_col = dims < VALUES
    else:
        head = tl.where(is_key, part - key_heads, part)
        first = tl.where(is_key, first_k, first_q) + head * step_key
        is_col = dims < KEY_DIM
    cols = first + dims
    inputs_ptr += first // PART * stride_inputs_part + first % PART  # no head lies in two parts
    taps = ()
    for tap in tl.static_range(WINDOW + 1):
        taken = tl.load(weight_ptr + cols * (WINDOW + 1) + tap, mask=is_col, other=0.0)
        taps += (taken.to(tl.float32)[None, :],)
    bias = tl.zeros([1, BLOCK_DIM], tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + cols, mask=is_col, other=0.0).to(tl.float32)[None, :]
    wait_for_inputs(OVERLAPPED)
    let_next_start(OVERLAPPED)
    begin = tl.program_id(0).to(tl.int64) * (RUNS * STEPS)
    whole = begin + tl.arange(0, RUNS * STEPS)
    furthest = tl.load(places_ptr + whole * WINDOW, mask=whole < tokens, other=0)
    # Ancestors come before their descendants: where the furthest stands as many rows before as
    # there are, they are all the rows between.
    away = tl.where(whole < tokens, tl.abs(whole - furthest - WINDOW), 0)
    is_chain = tl.max(away, axis=0) == 0
    if (STEPS > 1) & is_chain:
        run = begin + tl.arange(0, RUNS) * STEPS
        row_ptrs = inputs_ptr + run[:, None] * stride_inputs_token + dims[None, :]
        rows = ()
        for index in tl.static_range(STEPS + WINDOW):
            step = index - WINDOW
            live = (run + step < tokens)[:, None] & is_col[None, :]
            rows += (tl.load(row_ptrs + step * stride_inputs_token, mask=live, other=0.0),)
        for step in tl.static_range(STEPS):
            live = (run + step < tokens)[:, None] & is_col[None, :]
            total = bias
            for tap in tl.static_range(WINDOW + 1):
                total += rows[step + tap].to(tl.float32) * taps[tap]
            _write_head(
                total, rows[step + WINDOW], run + step, dims, cols, live, is_key, is_value, head,
                q_ptr, k_ptr, v_ptr, kept_ptr, channels, key_heads, scale, EPS, KEY_DIM, VALUES,
            )  # fmt: skip
    else:
        for step in range(STEPS):
            token = begin + step * RUNS + tl.arange(0, RUNS)
            is_token = token < tokens
            live = is_token[:, None] & is_col[None, :]
            own_ptrs = inputs_ptr + token[:, None] * stride_inputs_token + dims[None, :]
            own = tl.load(own_ptrs, mask=live, other=0.0)
            total = bias + own.to(tl.float32) * taps[WINDOW]
            for tap in tl.static_range(WINDOW):
                place = tl.load(places_ptr + token * WINDOW + tap, mask=is_token, other=0)
                total += taps[tap] * _found(
                    place, dims, cols, live, inputs_ptr, window_ptr, slots_ptr, stride_inputs_token,
                    stride_slots, tokens, channels, WINDOW,
                )  # fmt: skip
            _write_head(
                total, own, token, dims, cols, live, is_key, is_value, head, q_ptr, k_ptr, v_ptr,
                kept_ptr, channels, key_heads, scale, EPS, KEY_DIM, VALUES,
            )  # fmt: skip


def launch_state_inputs(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Tensor,
    slots: Tensor,
    places: Tensor,
    channels: list[int],
    eps: float | None,
    scale: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kept: Tensor | None,
) -> None:
    """A program for each block of channels of some tokens; arguments as kernels/state_inputs.py
    checks them."""
    tokens, key_heads, key_dim = q.shape
    values = v.shape[1] // key_heads * v.shape[2]
    is_few = tokens <= _FEW_TOKENS
    runs, steps = (1, 1) if is_few else (_RUNS, _STEPS)
    block_dim = next_power_of_2(key_dim)
    parts = key_heads * (2 + cdiv(values, block_dim))
    launch(
        _state_inputs_kernel,
        (cdiv(tokens, runs * steps), parts),
        inputs,
        weight,
        bias,
        window,
        slots,
        places,
        q,
        k,
        v,
        kept,
        inputs.stride(0),
        inputs.stride(1),
        slots.stride(0),
        tokens,
        weight.shape[0],
        key_heads,
        *channels,
        scale,
        EPS=eps,
        KEY_DIM=key_dim,
        VALUES=values,
        PART=inputs.shape[2],
        WINDOW=places.shape[1],
        RUNS=runs,
        STEPS=steps,
        BLOCK_DIM=block_dim,
        num_warps=1 if is_few else _WARPS,
        **overlap_options(inputs.device, _state_inputs_kernel),
    )
