"""Triton kernels of moe_experts; see kernels/moe_experts.py for the definition.

Four launches: align the (token, expert) pairs by expert (two of very many), gate and up with the
activation in the epilogue, down times the routing weight, and the sum over each token's experts.
One token has kernels of its own (moe_one_token.py), which need no alignment, and so have the
products of many pairs an expert (moe_groups.py).
"""

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.core.parallel import Span
from paceline.kernels._check import is_copyable
from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.moe_align import launch_moe_align, read_block
from paceline.kernels._triton.moe_one_token import fits_one_token, launch_one_token
from paceline.kernels._triton.primitives import swiglu
from paceline.kernels._triton.runtime import cdiv, interpreted, next_power_of_2
from paceline.kernels.moe_align import Alignment
from paceline.kernels.moe_experts import ExpertWeights, SwiGLU
from paceline.kernels.moe_route import Routing
from paceline.kernels.stand_in import is_hopper

# Of `moe_groups`.
_MANY_PAIRS = 32  # of an expert
_STEP = 64  # of the inner dimensions


@dataclass(frozen=True, slots=True)
class ProductTile:
    """One grouped product's tile sizes and launch options."""

    cols: int
    inner: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """Tiles of both products; they share the rows of a block."""

    rows: int
    gate_up: ProductTile
    down: ProductTile


def expert_tiles(num_pairs: int, num_experts: int, dtype: torch.dtype) -> ExpertTiles:
    """Static tile table: few rows per expert read weights at the speed of memory, many compute."""
    if dtype == torch.float32:
        return ExpertTiles(16, ProductTile(64, 32, 4, 3), ProductTile(64, 32, 4, 3))
    rows_per_expert = num_pairs / num_experts
    if rows_per_expert <= 16:
        return ExpertTiles(16, ProductTile(64, 128, 4, 4), ProductTile(64, 128, 4, 4))
    if rows_per_expert <= 64:
        return ExpertTiles(64, ProductTile(128, 64, 4, 4), ProductTile(128, 64, 4, 4))
    return ExpertTiles(128, ProductTile(128, 64, 8, 4), ProductTile(128, 64, 8, 4))


@triton.jit
def _product(
    row_ptrs,  # [BLOCK_ROWS] pointers to the rows of a
    col_ptrs,  # [BLOCK_COLS] pointers to the rows of a weight
    live_rows,  # [BLOCK_ROWS] bool; other rows count as 0, never read
    live_cols,  # [BLOCK_COLS] bool
    INNER: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    EVEN_COLS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """a @ w^T of one tile, [BLOCK_ROWS, BLOCK_COLS] float32."""
    steps = tl.arange(0, BLOCK_INNER)
    a_ptrs = row_ptrs[:, None] + steps[None, :]
    w_ptrs = col_ptrs[None, :] + steps[:, None]
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLS), tl.float32)
    for start in range(0, INNER, BLOCK_INNER):
        if INNER % BLOCK_INNER == 0:
            a = tl.load(a_ptrs, mask=live_rows[:, None], other=0.0)
            if EVEN_COLS:
                w = tl.load(w_ptrs)
            else:
                w = tl.load(w_ptrs, mask=live_cols[None, :], other=0.0)
        else:
            inside = start + steps < INNER
            a = tl.load(a_ptrs, mask=live_rows[:, None] & inside[None, :], other=0.0)
            w = tl.load(w_ptrs, mask=live_cols[None, :] & inside[:, None], other=0.0)
        if WIDEN:
            a, w = a.to(tl.float32), w.to(tl.float32)
        total = tl.dot(a, w, total, input_precision="ieee")
        a_ptrs += BLOCK_INNER
        w_ptrs += BLOCK_INNER
    return total


@triton.jit
def _gate_up_kernel(
    x_ptr,  # [tokens, HIDDEN]
    weight_ptr,  # [num_experts, 2 * INTER, HIDDEN] gate and up rows interleaved
    bias_ptr,  # [num_experts, 2 * INTER] or unused
    order_ptr,  # [num_pairs] int32
    blocks_ptr,  # [max_blocks, 3] int32 expert, begin, end
    out_ptr,  # [num_pairs, INTER] in the order of `order`
    stride_x_token,
    alpha,
    up_offset,
    LIMIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EXPERTS_PER_TOKEN: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
    WIDEN: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    expert, begin, end = read_block(blocks_ptr, tl.program_id(1))
    if begin >= end:
        return
    rows = begin + tl.arange(0, BLOCK_ROWS)
    live = rows < end
    cols = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    pairs = tl.load(order_ptr + rows, mask=live, other=0)
    token = (pairs // EXPERTS_PER_TOKEN).to(tl.int64)
    product = _product(
        x_ptr + token * stride_x_token,
        weight_ptr + expert * (2 * INTER * HIDDEN) + cols * HIDDEN,
        live,
        cols < 2 * INTER,
        HIDDEN,
        BLOCK_INNER,
        BLOCK_ROWS,
        BLOCK_COLS,
        2 * INTER % BLOCK_COLS == 0,
        WIDEN,
    )
    let_next_start(OVERLAPPED)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert * (2 * INTER) + cols, mask=cols < 2 * INTER, other=0.0)
        product += bias.to(tl.float32)[None, :]
    gate, up = tl.split(tl.reshape(product, (BLOCK_ROWS, BLOCK_COLS // 2, 2)))
    gated = swiglu(gate, up, alpha, up_offset, LIMIT)
    inter = tl.program_id(0) * (BLOCK_COLS // 2) + tl.arange(0, BLOCK_COLS // 2)
    tl.store(
        out_ptr + rows.to(tl.int64)[:, None] * INTER + inter[None, :],
        gated.to(out_ptr.dtype.element_ty),
        mask=live[:, None] & (inter < INTER)[None, :],
    )


@triton.jit
def _down_kernel(
    gated_ptr,  # [num_pairs, INTER] in the order of `order`
    weight_ptr,  # [num_experts, HIDDEN, INTER]
    bias_ptr,  # [num_experts, HIDDEN] or unused
    routing_weights_ptr,  # [num_pairs] float32
    order_ptr,  # [num_pairs] int32
    blocks_ptr,  # [max_blocks, 3] int32 expert, begin, end
    out_ptr,  # [num_pairs, HIDDEN] pair by pair
    HAS_BIAS: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
    WIDEN: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    expert, begin, end = read_block(blocks_ptr, tl.program_id(1))
    if begin >= end:
        return
    rows = begin + tl.arange(0, BLOCK_ROWS)
    live = rows < end
    cols = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    product = _product(
        gated_ptr + rows.to(tl.int64) * INTER,
        weight_ptr + expert * (HIDDEN * INTER) + cols * INTER,
        live,
        cols < HIDDEN,
        INTER,
        BLOCK_INNER,
        BLOCK_ROWS,
        BLOCK_COLS,
        HIDDEN % BLOCK_COLS == 0,
        WIDEN,
    )
    let_next_start(OVERLAPPED)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert * HIDDEN + cols, mask=cols < HIDDEN, other=0.0)
        product += bias.to(tl.float32)[None, :]
    pairs = tl.load(order_ptr + rows, mask=live, other=0).to(tl.int64)
    share = tl.load(routing_weights_ptr + pairs, mask=live, other=0.0)
    tl.store(
        out_ptr + pairs[:, None] * HIDDEN + cols[None, :],
        (product * share[:, None]).to(out_ptr.dtype.element_ty),
        mask=live[:, None] & (cols < HIDDEN)[None, :],
    )


@triton.jit(do_not_specialize=["first_expert", "end_expert"])
def _sum_kernel(
    parts_ptr,  # [tokens, EXPERTS_PER_TOKEN, HIDDEN]
    expert_ids_ptr,  # [tokens, EXPERTS_PER_TOKEN] int32, or None: all have written their part
    plus_ptr,  # [tokens, HIDDEN] or None
    out_ptr,  # [tokens, HIDDEN]
    first_expert,  # of those that have
    end_expert,
    EXPERTS_PER_TOKEN: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < HIDDEN
    row_ptr = parts_ptr + token * (EXPERTS_PER_TOKEN * HIDDEN)
    if plus_ptr is not None:
        plus = tl.load(plus_ptr + token * HIDDEN + cols, mask=mask, other=0.0)
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(EXPERTS_PER_TOKEN):
        is_read = mask
        if expert_ids_ptr is not None:
            expert = tl.load(expert_ids_ptr + token * EXPERTS_PER_TOKEN + slot)
            is_held = (expert >= first_expert) & (expert < end_expert)
            is_read = cols < tl.where(is_held, HIDDEN, 0)
        part = tl.load(row_ptr + slot * HIDDEN + cols, mask=is_read, other=0.0)
        total += part.to(tl.float32)
    let_next_start(OVERLAPPED)
    total = total.to(out_ptr.dtype.element_ty)
    if plus_ptr is not None:
        total = (total.to(tl.float32) + plus.to(tl.float32)).to(total.dtype)
    tl.store(out_ptr + token * HIDDEN + cols, total, mask=mask)


def launch_moe_experts(
    x: Tensor,
    routing: Routing,
    weights: ExpertWeights,
    *,
    gate: SwiGLU,
    experts: Span,
    plus: Tensor | None,
    out: Tensor,
    tiles: ExpertTiles | None = None,
) -> None:
    """Arguments as checked by kernels/moe_experts.py; `tiles` overrides the tile table."""
    if x.shape[0] == 0:
        return
    is_whole = experts.size == experts.total
    if tiles is None and is_whole and fits_one_token(x, weights):
        launch_one_token(x, routing, weights, gate=gate, plus=plus, out=out)
        return
    num_pairs = routing.expert_ids.numel()
    if tiles is None and fits_groups(x, weights, num_pairs / experts.total):
        from paceline.kernels._triton.moe_groups import BLOCK_ROWS, launch_group_products

        rows, products = BLOCK_ROWS, launch_group_products
    else:
        tiles = tiles or expert_tiles(num_pairs, experts.total, x.dtype)
        rows, products = tiles.rows, partial(_launch_products, tiles=tiles)
    aligned = launch_moe_align(routing.expert_ids, experts, rows)
    gated = torch.empty(num_pairs, weights.down.shape[2], dtype=x.dtype, device=x.device)
    parts = torch.empty(num_pairs, x.shape[1], dtype=x.dtype, device=x.device)
    products(x, routing.weights, weights, aligned, gate=gate, gated=gated, parts=parts)
    launch_sum(parts, routing.expert_ids, experts, plus, out)


def fits_groups(x: Tensor, weights: ExpertWeights, pairs_per_expert: float) -> bool:
    """Whether the products of `moe_groups` take these, and are the faster way; shapes, strides and
    dtypes only."""
    _, hidden, inter = weights.down.shape
    return (
        is_hopper(x.device)
        and pairs_per_expert > _MANY_PAIRS
        and hidden % _STEP == inter % _STEP == x.stride(0) % _STEP == 0
        and all(is_copyable(each) for each in (x, weights.gate_up, weights.down))
    )


def launch_sum(
    parts: Tensor, expert_ids: Tensor, experts: Span, plus: Tensor | None, out: Tensor
) -> None:
    """out [tokens, hidden]: what each token's experts returned, those of `experts`, summed, plus
    `plus`.  parts: [tokens * experts_per_token, hidden]; expert_ids: of the routing."""
    tokens, hidden = out.shape
    block = min(1024, next_power_of_2(hidden))
    launch(
        _sum_kernel,
        (tokens, cdiv(hidden, block)),
        parts,
        None if experts.size == experts.total else expert_ids,
        plus,
        out,
        experts.first,
        experts.end,
        EXPERTS_PER_TOKEN=expert_ids.shape[1],
        HIDDEN=hidden,
        BLOCK=block,
        num_warps=4,
        **overlap_options(out.device, _sum_kernel),
    )


def _launch_products(
    x: Tensor,
    routing_weights: Tensor,
    weights: ExpertWeights,
    aligned: Alignment,
    *,
    gate: SwiGLU,
    gated: Tensor,
    parts: Tensor,
    tiles: ExpertTiles,
) -> None:
    """gated [num_pairs, inter] and of it parts [num_pairs, hidden]."""
    _launch_gate_up(x, weights, aligned, gate=gate, tiles=tiles, out=gated)
    _launch_down(gated, routing_weights, weights, aligned=aligned, tiles=tiles, out=parts)


def _launch_gate_up(
    x: Tensor,
    weights: ExpertWeights,
    aligned: Alignment,
    *,
    gate: SwiGLU,
    tiles: ExpertTiles,
    out: Tensor,
) -> None:
    num_pairs, inter = out.shape
    tile = tiles.gate_up
    launch(
        _gate_up_kernel,
        (cdiv(2 * inter, tile.cols), aligned.blocks.shape[0]),
        x,
        weights.gate_up,
        weights.gate_up_bias,
        *aligned,
        out,
        x.stride(0),
        gate.alpha,
        gate.up_offset,
        LIMIT=gate.limit,
        HAS_BIAS=weights.gate_up_bias is not None,
        EXPERTS_PER_TOKEN=num_pairs // x.shape[0],
        HIDDEN=x.shape[1],
        INTER=inter,
        BLOCK_ROWS=tiles.rows,
        BLOCK_COLS=tile.cols,
        BLOCK_INNER=tile.inner,
        WIDEN=x.dtype == torch.bfloat16 and interpreted(_gate_up_kernel),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **overlap_options(x.device, _gate_up_kernel),
    )


def _launch_down(
    gated: Tensor,
    routing_weights: Tensor,
    weights: ExpertWeights,
    *,
    aligned: Alignment,
    tiles: ExpertTiles,
    out: Tensor,
) -> None:
    tile = tiles.down
    launch(
        _down_kernel,
        (cdiv(out.shape[1], tile.cols), aligned.blocks.shape[0]),
        gated,
        weights.down,
        weights.down_bias,
        routing_weights,
        *aligned,
        out,
        HAS_BIAS=weights.down_bias is not None,
        HIDDEN=out.shape[1],
        INTER=gated.shape[1],
        BLOCK_ROWS=tiles.rows,
        BLOCK_COLS=tile.cols,
        BLOCK_INNER=tile.inner,
        WIDEN=gated.dtype == torch.bfloat16 and interpreted(_down_kernel),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **overlap_options(gated.device, _down_kernel),
    )
