"""Triton kernel of state_step; see kernels/state_step.py for the definition.

A program takes some columns of one head's state, for one request, and convolves what it needs: the
head's query and key, and the values of its columns.  All but the row itself is asked for before it
waits: the state, the window, weights.

The window of a query or a key is read by all programs of its key head, and so written by the last
of them to arrive; that of values is read by one program alone.
"""

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.decay_rates import step_of
from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.runtime import cdiv, next_power_of_2
from paceline.kernels._triton.state_parts import slots_of, state_tile
from paceline.kernels.state_step import step_tile


@triton.jit
def _behind(
    window_ptr,  # [num_slots, channels, WINDOW]
    weight_ptr,  # [channels, WINDOW + 1]
    bias_ptr,  # [channels] or None
    cols,  # [dims] channels
    live,  # [dims] bool
    read,
    channels,
    WINDOW: tl.constexpr,
):
    """(what the window adds to a convolution [dims] float32, its columns, the row's own tap)."""
    row = (read * channels + cols) * WINDOW
    columns = ()
    for tap in tl.static_range(WINDOW):
        is_there = tl.where(live, read, 0) != 0
        columns += (tl.load(window_ptr + row + tap, mask=is_there, other=0.0),)
    own = tl.load(weight_ptr + cols * (WINDOW + 1) + WINDOW, mask=live, other=0.0).to(tl.float32)
    total = tl.zeros_like(own)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + cols, mask=live, other=0.0).to(tl.float32)
    for tap in tl.static_range(WINDOW):
        weight = tl.load(weight_ptr + cols * (WINDOW + 1) + tap, mask=live, other=0.0)
        total += columns[tap].to(tl.float32) * weight.to(tl.float32)
    return total, columns, own


@triton.jit
def _mixed(
    total,  # [dims] float32  of the window
    own,  # [dims] float32  the row's tap
    row,  # [dims] the row
):
    """SiLU of the convolution [dims] float32, rounded as the row is."""
    total += own * row.to(tl.float32)
    return (total / (1.0 + tl.exp(-total))).to(row.dtype).to(tl.float32)


@triton.jit
def _move_window(
    window_ptr,  # [num_slots, channels, WINDOW]
    columns,  # WINDOW x [dims], as `_behind` read them
    row,  # [dims]
    cols,  # [dims] channels
    live,  # [dims] bool
    written,
    channels,
    WINDOW: tl.constexpr,
):
    """The window behind the row: its oldest column is gone."""
    ptrs = window_ptr + (written * channels + cols) * WINDOW
    for tap in tl.static_range(WINDOW - 1):
        tl.store(ptrs + tap, columns[tap + 1], mask=live)
    tl.store(ptrs + WINDOW - 1, row.to(window_ptr.dtype.element_ty), mask=live)


@triton.jit
def _state_step_kernel(
    inputs_ptr,  # [reqs, parts, PART]
    weight_ptr,  # [channels, WINDOW + 1]
    bias_ptr,  # [channels] or None
    window_ptr,  # [num_slots, channels, WINDOW]
    slots_ptr,  # [reqs, 3] int32
    decay_ptr,  # [reqs, heads] float32, or without rates [reqs, parts, RATES] of decay_rates
    rate_ptr,  # [reqs, heads] float32  of Rates, or None
    rate_bias_ptr,  # [heads] float32, without rates
    log_ptr,  # [heads] float32, without rates
    skip_ptr,  # [heads] or None
    z_ptr,  # [reqs, heads, VALUE_DIM] or None
    norm_weight_ptr,  # [heads, VALUE_DIM], with z
    squares_ptr,  # [reqs, heads, tiles] float32, with z
    state_ptr,  # [num_slots, heads, KEY_DIM, VALUE_DIM]
    arrived_ptr,  # [reqs, key_heads] int32, all 0
    out_ptr,  # [reqs, heads, VALUE_DIM]
    stride_inputs_req,
    stride_inputs_part,
    stride_slots,
    stride_decay_req,
    stride_rate_req,  # without rates that of a part of decay
    stride_z_req,
    least,
    most,
    heads,
    channels,
    first_q,
    first_k,
    first_v,
    step_key,
    step_value,
    scale,
    DELTA: tl.constexpr,
    EPS: tl.constexpr,
    PER_KEY: tl.constexpr,
    PER_PART: tl.constexpr,  # heads of a part of what rates are made of
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PART: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
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
    key_head = head // PER_KEY
    at_q = first_q + key_head * step_key + dims
    at_k = first_k + key_head * step_key + dims
    at_v = first_v + key_head * step_value + head % PER_KEY * VALUE_DIM + cols
    total_q, window_q, own_q = _behind(
        window_ptr, weight_ptr, bias_ptr, at_q, is_dim, read, channels, WINDOW
    )
    total_k, window_k, own_k = _behind(
        window_ptr, weight_ptr, bias_ptr, at_k, is_dim, read, channels, WINDOW
    )
    total_v, window_v, own_v = _behind(
        window_ptr, weight_ptr, bias_ptr, at_v, is_col, read, channels, WINDOW
    )
    if rate_ptr is None:
        rate_bias = tl.load(rate_bias_ptr + head)
        speed = tl.exp(tl.load(log_ptr + head))
    of_value = head * VALUE_DIM + cols
    # Behind a gate stands a product, which may ask for its weights meanwhile.
    if z_ptr is not None:
        norm_weight = tl.load(norm_weight_ptr + of_value, mask=is_col, other=0.0).to(tl.float32)
        let_next_start(OVERLAPPED)
    wait_for_inputs(OVERLAPPED)
    if z_ptr is None:
        let_next_start(OVERLAPPED)
    inputs_ptr += req * stride_inputs_req
    row_q = tl.load(
        inputs_ptr + at_q // PART * stride_inputs_part + at_q % PART, mask=is_dim, other=0.0
    )
    row_k = tl.load(
        inputs_ptr + at_k // PART * stride_inputs_part + at_k % PART, mask=is_dim, other=0.0
    )
    row_v = tl.load(
        inputs_ptr + at_v // PART * stride_inputs_part + at_v % PART, mask=is_col, other=0.0
    )
    if z_ptr is not None:
        z = tl.load(z_ptr + req * stride_z_req + of_value, mask=is_col, other=0.0).to(tl.float32)
    decay_ptr += req * stride_decay_req
    if rate_ptr is not None:
        decay = tl.load(decay_ptr + head)
        rate = tl.load(rate_ptr + req * stride_rate_req + head)
    else:
        decay_ptr += head // PER_PART * stride_rate_req + head % PER_PART
        a = tl.load(decay_ptr + (PER_PART if DELTA else 0)).to(tl.float32)
        if DELTA:
            b = tl.load(decay_ptr).to(tl.float32)
    if rate_ptr is None:
        rate = step_of(a + rate_bias, least, most)
        decay = -speed * rate
        if DELTA:
            rate = 1.0 / (1.0 + tl.exp(-b))
    q = _mixed(total_q, own_q, row_q)
    k = _mixed(total_k, own_k, row_k)
    v = _mixed(total_v, own_v, row_v)
    if EPS is not None:
        q *= 1.0 / tl.sqrt(tl.sum(tl.where(is_dim, q * q, 0.0), axis=0) + EPS)
        k *= 1.0 / tl.sqrt(tl.sum(tl.where(is_dim, k * k, 0.0), axis=0) + EPS)
    q *= scale
    kept = tl.exp(decay)
    u = rate * v
    if DELTA:
        u -= rate * kept * tl.sum(k[:, None] * state, axis=0)
    out = kept * tl.sum(q[:, None] * state, axis=0) + tl.sum(q * k, axis=0) * u
    behind = kept * state + k[:, None] * u[None, :]
    if skip_ptr is not None:
        out += tl.load(skip_ptr + head).to(tl.float32) * v
    if z_ptr is not None:
        out *= z / (1.0 + tl.exp(-z))
        squares = tl.sum(tl.where(is_col, out * out, 0.0), axis=0)
        tl.store(squares_ptr + (req * heads + head) * tl.num_programs(0) + tile, squares)
        out *= norm_weight
    out_ptrs = out_ptr + req * heads * VALUE_DIM + of_value
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=is_col)
    # What is stored above is made of every column of the window that this program read.  Warps may
    # read the same columns: behind the barrier none is still to, and from here on they are written.
    tl.debug_barrier()
    _move_window(window_ptr, window_v, row_v, at_v, is_col, written, channels, WINDOW)
    # Relaxed: an order would wait for states that others write, and none is needed.
    arrived_ptr += req * (heads // PER_KEY) + key_head
    num_arrived = tl.atomic_add(arrived_ptr, 1, sem="relaxed")
    state_ptrs, _ = state_tile(state_ptr, written, head, heads, dims, cols, KEY_DIM, VALUE_DIM)
    tl.store(state_ptrs, behind.to(state_ptr.dtype.element_ty), mask=is_state)
    if num_arrived == PER_KEY * tl.num_programs(0) - 1:
        _move_window(window_ptr, window_q, row_q, at_q, is_dim, written, channels, WINDOW)
        _move_window(window_ptr, window_k, row_k, at_k, is_dim, written, channels, WINDOW)
        tl.store(arrived_ptr, 0)


def launch_state_step(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Tensor,
    slots: Tensor,
    channels: list[int],
    eps: float | None,
    scale: float,
    decay: Tensor,
    rate: Tensor | None,
    rate_bias: Tensor | None,
    log: Tensor | None,
    least: float,
    most: float,
    skip: Tensor | None,
    z: Tensor | None,
    norm_weight: Tensor | None,
    is_delta: bool,
    state: Tensor,
    arrived: Tensor,
    out: Tensor,
    squares: Tensor | None,
) -> None:
    """A program for some columns of each head of each request; arguments as kernels/state_step.py
    checks them."""
    reqs, heads, value_dim = out.shape
    key_dim, key_heads = state.shape[2], arrived.shape[1]
    tile = step_tile(reqs * heads, value_dim)
    block_v = min(tile.columns, next_power_of_2(value_dim))
    launch(
        _state_step_kernel,
        (cdiv(value_dim, block_v), heads, reqs),
        inputs,
        weight,
        bias,
        window,
        slots,
        decay,
        rate,
        rate_bias,
        log,
        skip,
        z,
        norm_weight,
        squares,
        state,
        arrived,
        out,
        inputs.stride(0),
        inputs.stride(1),
        slots.stride(0),
        decay.stride(0),
        decay.stride(1) if rate is None else rate.stride(0),
        0 if z is None else z.stride(0),
        least,
        most,
        heads,
        weight.shape[0],
        *channels,
        scale,
        DELTA=is_delta,
        EPS=eps,
        PER_KEY=heads // key_heads,
        PER_PART=heads // decay.shape[1] if rate is None else 1,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        PART=inputs.shape[2],
        WINDOW=window.shape[2],
        BLOCK_K=next_power_of_2(key_dim),
        BLOCK_V=block_v,
        num_warps=tile.warps,
        **overlap_options(state.device, _state_step_kernel),
    )
