"""Triton kernels of skinny_linear; see kernels/skinny_linear.py for the definition.

The weight is read once, as fast as memory gives it; what counts is how many bytes are on their way.
One token: each program holds whole weight rows in registers, asked for in one go, before it waits
for x, and adds up once behind (docs/decisions/147-norms-stay-kernels.md); where all of a weight can
be on its way at once, few programs ask for it, some rows into registers and the others through a
ring; rows of some lengths all go through a ring, which is filled before the wait.  More tokens: the
product is taken transposed, [features, tokens] = W x^T, so that the weight is the tall operand of
the matrix unit, through a ring of four tiles or five.

Where tiles of features do not fill the chip the inner dimension is split; each split leaves its
part in `partial`, and the last to arrive adds all parts, in order, so that the sum is always the
same.  Worked example, 2 splits: both programs of tile 7 write their part and add 1 to counters[7];
the one that reads 1 is the last: it adds the parts, writes out and sets counters[7] to 0 again.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.launch import (
    launch,
    let_next_start,
    overlap_options,
    wait_for_inputs,
    wait_within,
)
from paceline.kernels._triton.primitives import biased_activation, dot, taken
from paceline.kernels._triton.runtime import (
    cdiv,
    floor_power_of_2,
    interpreted,
    next_power_of_2,
    require_runnable,
    shared_memory_bytes,
)
from paceline.kernels.skinny_linear import SkinnyTile
from paceline.kernels.stand_in import multiprocessors

_MOST_STAGES = 4
_SQUARE_STAGES = 5  # of 64 features and 64 tokens: a multiprocessor has one such program either way
_MOST_CHUNKS = 7  # of a row
# Of one token: numbers of a thread, twice as many where so many bytes of a weight for a processor
# are all of it; rows of a program and its warps, at most.  Near the fastest on an H200 of 1 to 8
# rows and 1 to 16 warps for each product of Llamas and Qwens of 0.6 to 30 billion parameters.
_THREAD_NUMBERS, _AT_ONCE_BYTES, _MOST_ROWS, _MOST_WARPS = 32, 96 * 1024, 4, 8
# Of one token and a weight all of which is on its way at once: programs of a processor, rows that
# each has in registers, stages of its ring, numbers of a row.  The fastest on an H200 of 2 to 8
# programs, 0 to 8 rows and 3 to 6 stages, for rows of 5,120.
_HOLDERS, _HELD, _HELD_STAGES, _HELD_COLS = 4, 3, 4, (4096, 5120)
# Of one token and a weight too large for that: rings of a processor, rows of a round, stages,
# warps, numbers of a row, rows from which on it gains.  The fastest on an H200 of 1 to 8 rings, 2
# to 8 rows, 3 to 11 stages and 4 or 8 warps, for 10,576 rows of 2,560.
_RINGS, _RING_ROWS, _RING_STAGES, _RING_WARPS = 2, 4, 6, 4
_RING_COLS, _RING_LEAST = (2048, 2560), 10_240


@triton.jit
def _one_token_kernel(
    x_ptr,  # [INNER]
    weight_ptr,  # [out_features, INNER], with ACTIVATION [2 * out_features, INNER]
    bias_ptr,  # [out_features], with ACTIVATION [2 * out_features], or None
    out_ptr,  # [out_features]
    stride_weight_row,
    out_features,
    INNER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,  # of the weight, which has a multiple
    BLOCK_COLS: tl.constexpr,
    CHUNKS: tl.constexpr,  # of BLOCK_COLS, that make a row
    OVERLAPPED: tl.constexpr,
):
    """Behind the wait a program is short: one sum over all of its rows, gates and ups by turns,
    leaves in every thread what is stored."""
    PARTS: tl.constexpr = 1 if ACTIVATION is None else 2
    FEATURES: tl.constexpr = BLOCK_ROWS // PARTS
    first = tl.program_id(0) * FEATURES
    row = tl.arange(0, BLOCK_ROWS)
    cols = tl.arange(0, BLOCK_COLS)
    weight_row = (first + row // PARTS + row % PARTS * out_features).to(tl.int64)
    row_ptrs = weight_ptr + weight_row[:, None] * stride_weight_row + cols[None, :]
    weights, xs = (), ()
    for chunk in tl.static_range(CHUNKS):
        begin = chunk * BLOCK_COLS
        inside = (cols < INNER - begin)[None, :]
        weights += (
            tl.load(row_ptrs + begin, mask=inside, other=0.0, eviction_policy="evict_first"),
        )
    let_next_start(OVERLAPPED)
    wait_for_inputs(OVERLAPPED)
    for chunk in tl.static_range(CHUNKS):
        begin = chunk * BLOCK_COLS
        xs += (tl.load(x_ptr + begin + cols, mask=cols < INNER - begin, other=0.0),)
    sums = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    for chunk in tl.static_range(CHUNKS):
        sums += weights[chunk].to(tl.float32) * xs[chunk].to(tl.float32)[None, :]
    totals = tl.sum(sums, axis=1)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    for index in tl.static_range(FEATURES):
        feature = first + index
        total = taken(totals, PARTS * index)
        up = taken(totals, PARTS * index + PARTS - 1)
        result = biased_activation(
            total, up, bias_ptr, feature, True, out_features, ACTIVATION, DTYPE
        )
        tl.store(out_ptr + feature, result)


@triton.jit
def _held_linear_kernel(
    x_ptr,  # [CHUNKS * BLOCK_COLS]
    weight_ptr,  # [out_features, CHUNKS * BLOCK_COLS]
    out_ptr,  # [out_features]
    stride_weight_row,
    out_features,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    CHUNKS: tl.constexpr,
    HELD: tl.constexpr,  # times BLOCK_ROWS rows are in registers
    STAGES: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """A program has every so many rows.  What it holds it multiplies last: its ring is filled
    before."""
    cols = tl.arange(0, BLOCK_COLS)
    rows = tl.arange(0, BLOCK_ROWS)
    step = tl.num_programs(0) * BLOCK_ROWS
    first = tl.program_id(0) * BLOCK_ROWS
    held = ()
    for index in tl.static_range(HELD):
        features = first + index * step + rows
        row_ptrs = weight_ptr + features.to(tl.int64)[:, None] * stride_weight_row + cols[None, :]
        live = (features < out_features)[:, None]
        for chunk in tl.static_range(CHUNKS):
            weight = tl.load(
                row_ptrs + chunk * BLOCK_COLS, mask=live, other=0.0, eviction_policy="evict_first"
            )
            held += (weight,)
    let_next_start(OVERLAPPED)
    wait_for_inputs(OVERLAPPED)
    xs = ()
    for chunk in tl.static_range(CHUNKS):
        xs += (tl.load(x_ptr + chunk * BLOCK_COLS + cols).to(tl.float32),)
    for begin in tl.range(first + HELD * step, out_features, step, num_stages=STAGES):
        features = begin + rows
        row_ptrs = weight_ptr + features.to(tl.int64)[:, None] * stride_weight_row + cols[None, :]
        sums = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
        for chunk in tl.static_range(CHUNKS):
            weight = tl.load(
                row_ptrs + chunk * BLOCK_COLS,
                mask=(features < out_features)[:, None],
                other=0.0,
                eviction_policy="evict_first",
            )
            sums += weight.to(tl.float32) * xs[chunk][None, :]
        out_ptrs = out_ptr + features
        tl.store(
            out_ptrs,
            tl.sum(sums, axis=1).to(out_ptr.dtype.element_ty),
            mask=features < out_features,
        )
    for index in tl.static_range(HELD):
        features = first + index * step + rows
        sums = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
        for chunk in tl.static_range(CHUNKS):
            sums += held[index * CHUNKS + chunk].to(tl.float32) * xs[chunk][None, :]
        out_ptrs = out_ptr + features
        tl.store(
            out_ptrs,
            tl.sum(sums, axis=1).to(out_ptr.dtype.element_ty),
            mask=features < out_features,
        )


@triton.jit
def _ring_linear_kernel(
    x_ptr,  # [CHUNKS * BLOCK_COLS]
    weight_ptr,  # [out_features, CHUNKS * BLOCK_COLS]
    out_ptr,  # [out_features]
    stride_weight_row,
    out_features,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    CHUNKS: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """A program has every so many rows, at least once.  It waits in its first round, when its ring
    is filled."""
    cols = tl.arange(0, BLOCK_COLS)
    rows = tl.arange(0, BLOCK_ROWS)
    first = tl.program_id(0) * BLOCK_ROWS
    let_next_start(OVERLAPPED)
    xs = ()
    for _chunk in tl.static_range(CHUNKS):
        xs += (tl.zeros([BLOCK_COLS], x_ptr.dtype.element_ty),)
    for begin in tl.range(first, out_features, tl.num_programs(0) * BLOCK_ROWS, num_stages=STAGES):
        features = begin + rows
        row_ptrs = weight_ptr + features.to(tl.int64)[:, None] * stride_weight_row + cols[None, :]
        live = features < out_features
        if begin == first:
            behind = wait_within(begin, OVERLAPPED)
            found = ()
            for chunk in tl.static_range(CHUNKS):
                found += (tl.load(x_ptr + behind + chunk * BLOCK_COLS + cols),)
            xs = found
        sums = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
        for chunk in tl.static_range(CHUNKS):
            weight = tl.load(
                row_ptrs + chunk * BLOCK_COLS,
                mask=live[:, None],
                other=0.0,
                eviction_policy="evict_first",
            )
            sums += weight.to(tl.float32) * xs[chunk].to(tl.float32)[None, :]
        result = tl.sum(sums, axis=1).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + features, result, mask=live)


@triton.jit
def meet(
    acc,  # [FEATURES, TOKENS] float32
    partial_ptr,  # [SPLITS, tiles, FEATURES, TOKENS] float32
    counters_ptr,  # [tiles] int32, all 0
    tile,  # of as many as the grid has in its first dimension
    split,
    SPLITS: tl.constexpr,
    FEATURES: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """(the sum of all splits in order, whether this program is the last to arrive, which has
    it)."""
    tiles = tl.num_programs(0)
    place = tl.arange(0, FEATURES)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
    part_size: tl.constexpr = FEATURES * TOKENS
    tl.store(partial_ptr + (split * tiles + tile) * part_size + place, acc)
    tl.debug_barrier()  # every thread's part is written before the arrival is counted
    is_last = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel") == SPLITS - 1
    if is_last:
        acc = tl.zeros([FEATURES, TOKENS], tl.float32)
        for part in tl.static_range(SPLITS):
            part_ptr = partial_ptr + (part * tiles + tile) * part_size
            acc += tl.load(part_ptr + place, cache_modifier=".cg")
        tl.store(counters_ptr + tile, 0)
    return acc, is_last


@triton.jit(do_not_specialize=["tokens"])
def _few_tokens_kernel(
    x_ptr,  # [tokens, inner]
    weight_ptr,  # [out_features, inner], with ACTIVATION [2 * out_features, inner]
    bias_ptr,  # [out_features], with ACTIVATION [2 * out_features], or None
    out_ptr,  # [tokens, out_features]
    partial_ptr,  # [SPLITS, tiles, BLOCK_FEATURES, BLOCK_TOKENS] float32, or None
    counters_ptr,  # [tiles] int32, all 0, or None
    stride_x_token,
    stride_weight_row,
    stride_out_token,
    tokens,
    out_features,
    inner_per_split,
    ACTIVATION: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
    OVERLAPPED: tl.constexpr,
    WIDEN: tl.constexpr,
):
    tile = tl.program_id(0)
    split = tl.program_id(1)
    local = tl.arange(0, BLOCK_FEATURES)
    features = tile * BLOCK_FEATURES + local
    token = tl.arange(0, BLOCK_TOKENS)
    inner = tl.arange(0, BLOCK_INNER)
    live_rows = (features < out_features)[:, None]
    live_tokens = (token < tokens)[:, None]
    row_ptrs = weight_ptr + features.to(tl.int64)[:, None] * stride_weight_row + inner[None, :]
    up_ptrs = row_ptrs + tl.cast(out_features, tl.int64) * stride_weight_row  # 1 has no .to
    x_ptrs = x_ptr + token[:, None] * stride_x_token + inner[None, :]
    acc = tl.zeros([BLOCK_FEATURES, BLOCK_TOKENS], tl.float32)
    acc_up = acc
    wait_for_inputs(OVERLAPPED)
    for start in range(split * inner_per_split, (split + 1) * inner_per_split, BLOCK_INNER):
        x = tl.load(x_ptrs + start, mask=live_tokens, other=0.0)
        rows = tl.load(row_ptrs + start, mask=live_rows, other=0.0, eviction_policy="evict_first")
        acc = dot(rows, tl.trans(x), acc, WIDEN)
        if ACTIVATION is not None:
            rows = tl.load(
                up_ptrs + start, mask=live_rows, other=0.0, eviction_policy="evict_first"
            )
            acc_up = dot(rows, tl.trans(x), acc_up, WIDEN)
    let_next_start(OVERLAPPED)

    is_last = True
    if SPLITS > 1:
        acc, is_last = meet(
            acc, partial_ptr, counters_ptr, tile, split, SPLITS, BLOCK_FEATURES, BLOCK_TOKENS
        )
    if is_last:
        live = live_rows & (token < tokens)[None, :]
        DTYPE: tl.constexpr = out_ptr.dtype.element_ty
        result = biased_activation(
            acc, acc_up, bias_ptr, features[:, None], live_rows, out_features, ACTIVATION, DTYPE
        )
        out_ptrs = out_ptr + token.to(tl.int64)[None, :] * stride_out_token + features[:, None]
        tl.store(out_ptrs, result, mask=live)


def _chunks(inner: int) -> int:
    """Into how many powers of two a row is cut: 1 where most lanes of the next one are live."""
    power = inner & -inner
    is_whole = 4 * inner > 3 * next_power_of_2(inner)
    return 1 if is_whole or inner // power > _MOST_CHUNKS else inner // power


def _is_held(out_features: int, inner: int, device: torch.device) -> bool:
    """Whether every row of such a weight can be on its way at once, and rows are of those sizes."""
    rows = cdiv(out_features, _HOLDERS * multiprocessors(device))
    above, most = _HELD_COLS
    return above < inner <= most and _chunks(inner) > 1 and rows < _HELD + _HELD_STAGES


def _is_ringed(out_features: int, inner: int, device: torch.device) -> bool:
    """Whether rings of such rows fit a processor, and enough rows pass."""
    above, most = _RING_COLS
    ring_bytes = _RINGS * (_RING_STAGES - 1) * _RING_ROWS * inner * 2
    fits = above < inner <= most and _chunks(inner) > 1 and out_features >= _RING_LEAST
    return fits and ring_bytes < shared_memory_bytes(device)


def _one_tile(weight: Tensor, parts: int) -> tuple[int, int]:
    """(rows of the weight that a program has of one token's product, its warps).

    parts: 2 of gate rows and up rows.  A thread has all rows, so that a sum leaves them there.
    """
    inner = weight.shape[1]
    chunks = _chunks(inner)
    block_cols = next_power_of_2(inner // chunks)
    numbers, width = _THREAD_NUMBERS, chunks * block_cols
    bytes_ = weight.numel() * weight.element_size()
    if bytes_ <= _AT_ONCE_BYTES * multiprocessors(weight.device):
        numbers *= 2
    rows = min(max(parts, floor_power_of_2(numbers * 128 // width)), _MOST_ROWS)
    warps = min(rows * width // (32 * numbers), block_cols // 256, _MOST_WARPS)
    return math.gcd(rows, weight.shape[0]), floor_power_of_2(warps)


def launch_skinny_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    *,
    tile: SkinnyTile,
    splits: int,
    out: Tensor,
    partial: Tensor | None,
    counters: Tensor | None,
) -> None:
    """One kernel; arguments as checked by kernels/skinny_linear.py."""
    require_runnable("x of skinny_linear", x, _few_tokens_kernel, otherwise="use kernels.linear")
    tokens, inner = x.shape
    out_features = out.shape[1]
    is_plain = bias is None and activation is None
    if tokens == 1 and is_plain and _is_held(out_features, inner, x.device):
        chunks = _chunks(inner)
        launch(
            _held_linear_kernel,
            (_HOLDERS * multiprocessors(x.device),),
            x,
            weight,
            out,
            weight.stride(0),
            out_features,
            BLOCK_ROWS=1,
            BLOCK_COLS=inner // chunks,
            CHUNKS=chunks,
            HELD=_HELD,
            STAGES=_HELD_STAGES,
            num_warps=4,
            **overlap_options(x.device, _held_linear_kernel),
        )
        return
    if tokens == 1 and is_plain and _is_ringed(out_features, inner, x.device):
        chunks = _chunks(inner)
        programs = min(_RINGS * multiprocessors(x.device), cdiv(out_features, _RING_ROWS))
        launch(
            _ring_linear_kernel,
            (programs,),
            x,
            weight,
            out,
            weight.stride(0),
            out_features,
            BLOCK_ROWS=_RING_ROWS,
            BLOCK_COLS=inner // chunks,
            CHUNKS=chunks,
            STAGES=_RING_STAGES,
            num_warps=_RING_WARPS,
            **overlap_options(x.device, _ring_linear_kernel),
        )
        return
    if tokens == 1:
        chunks = _chunks(inner)
        rows, warps = _one_tile(weight, weight.shape[0] // out_features)
        launch(
            _one_token_kernel,
            (weight.shape[0] // rows,),
            x,
            weight,
            bias,
            out,
            weight.stride(0),
            out_features,
            INNER=inner,
            ACTIVATION=activation,
            BLOCK_ROWS=rows,
            BLOCK_COLS=next_power_of_2(inner // chunks),
            CHUNKS=chunks,
            num_warps=warps,
            **overlap_options(x.device, _one_token_kernel),
        )
        return
    weight_rows = tile.features if activation is None else 2 * tile.features
    stage_bytes = (weight_rows + tile.tokens) * tile.inner * x.element_size()
    is_square = tile.tokens == weight_rows
    most_stages = _SQUARE_STAGES if is_square else _MOST_STAGES
    launch(
        _few_tokens_kernel,
        (cdiv(out_features, tile.features), splits),
        x,
        weight,
        bias,
        out,
        partial,
        counters,
        x.stride(0),
        weight.stride(0),
        out.stride(0),
        tokens,
        out_features,
        inner // splits,
        ACTIVATION=activation,
        SPLITS=splits,
        BLOCK_TOKENS=tile.tokens,
        BLOCK_FEATURES=tile.features,
        BLOCK_INNER=tile.inner,
        WIDEN=x.dtype == torch.bfloat16 and interpreted(_few_tokens_kernel),
        num_warps=4,
        num_stages=min(most_stages, shared_memory_bytes(x.device) // stage_bytes),
        **overlap_options(x.device, _few_tokens_kernel),
    )
