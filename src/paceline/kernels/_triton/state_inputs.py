"""Triton kernel of state_inputs; see kernels/state_inputs.py for the definition.

A program takes one head, of queries, keys or values, of some tokens.
"""

import triton
import triton.language as tl
from torch import Tensor

from paceline.core.model.cache_groups import READ
from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.runtime import cdiv, next_power_of_2

_FEW_TOKENS, _BLOCK_TOKENS = 128, 16  # up to so many a program takes one token; behind it so many
_READ = tl.constexpr(READ)


@triton.jit
def _found(
    place,  # [tokens] int64
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
        inputs_ptr + place[:, None] * stride_inputs_token + cols[None, :],
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
def _state_inputs_kernel(
    inputs_ptr,  # [tokens, channels]
    weight_ptr,  # [channels, WINDOW + 1]
    bias_ptr,  # [channels] or None
    window_ptr,  # [num_slots, channels, WINDOW]
    slots_ptr,  # [padded_reqs, 3] int32
    places_ptr,  # [tokens, WINDOW] int64
    q_ptr,  # [tokens, key_heads, KEY_DIM]
    k_ptr,  # [tokens, key_heads, KEY_DIM]
    v_ptr,  # [tokens, key_heads * PER_KEY, VALUE_DIM]
    kept_ptr,  # [tokens, channels] or None
    stride_inputs_token,
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
    PER_KEY: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    let_next_start(OVERLAPPED)
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1)
    dims = tl.arange(0, BLOCK_DIM)
    value_head = head - 2 * key_heads
    is_value = value_head >= 0
    is_key = head >= key_heads
    key_head = tl.where(is_key, head - key_heads, head)
    if is_value:
        first = first_v + (value_head // PER_KEY) * step_value + value_head % PER_KEY * VALUE_DIM
        dim = VALUE_DIM
    else:
        first = tl.where(is_key, first_k, first_q) + key_head * step_key
        dim = KEY_DIM
    cols = first + dims
    is_col = dims < dim
    live = (token < tokens)[:, None] & is_col[None, :]
    own = tl.load(
        inputs_ptr + token[:, None] * stride_inputs_token + cols[None, :], mask=live, other=0.0
    )
    if kept_ptr is not None:
        tl.store(kept_ptr + token[:, None] * channels + cols[None, :], own, mask=live)
    tap_ptrs = weight_ptr + cols * (WINDOW + 1)
    total = own.to(tl.float32) * tl.load(tap_ptrs + WINDOW, mask=is_col, other=0.0).to(tl.float32)
    for tap in tl.static_range(WINDOW):
        place = tl.load(places_ptr + token * WINDOW + tap, mask=token < tokens, other=0)
        found = _found(
            place, cols, live, inputs_ptr, window_ptr, slots_ptr, stride_inputs_token,
            stride_slots, tokens, channels, WINDOW,
        )  # fmt: skip
        total += found * tl.load(tap_ptrs + tap, mask=is_col, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + cols, mask=is_col, other=0.0).to(tl.float32)[None, :]
    mixed = (total * tl.sigmoid(total)).to(own.dtype)
    if is_value:
        heads = key_heads * PER_KEY
        value_ptrs = v_ptr + (token * heads + value_head)[:, None] * VALUE_DIM + dims[None, :]
        tl.store(value_ptrs, mixed.to(v_ptr.dtype.element_ty), mask=live)
    else:
        wide = mixed.to(tl.float32)
        if EPS is not None:
            squares = tl.sum(tl.where(live, wide * wide, 0.0), axis=1)
            wide = wide * (1.0 / tl.sqrt(squares + EPS))[:, None]
        at = (token * key_heads + key_head)[:, None] * KEY_DIM + dims[None, :]
        if is_key:
            tl.store(k_ptr + at, wide.to(k_ptr.dtype.element_ty), mask=live)
        else:
            tl.store(q_ptr + at, (wide * scale).to(q_ptr.dtype.element_ty), mask=live)


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
    """A program for each head of some tokens; arguments as kernels/state_inputs.py checks them."""
    tokens, key_heads, key_dim = q.shape
    value_heads, value_dim = v.shape[1:]
    block = 1 if tokens <= _FEW_TOKENS else _BLOCK_TOKENS
    launch(
        _state_inputs_kernel,
        (cdiv(tokens, block), 2 * key_heads + value_heads),
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
        slots.stride(0),
        tokens,
        inputs.shape[1],
        key_heads,
        *channels,
        scale,
        EPS=eps,
        PER_KEY=value_heads // key_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        WINDOW=places.shape[1],
        BLOCK_T=block,
        BLOCK_DIM=next_power_of_2(max(key_dim, value_dim)),
        num_warps=1 if block == 1 else 4,
        **overlap_options(inputs.device, _state_inputs_kernel),
    )
