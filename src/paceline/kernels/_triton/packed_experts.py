"""Triton kernels of packed_experts; see kernels/packed_experts.py for the definition.

As those of moe_experts: align the (token, expert) pairs by expert, gate and up with the activation
behind, down times the routing weight, and the sum over each token's experts.  Products are taken
transposed, [rows of a weight, pairs], as the matrix unit reads packed words (packed_products.py).
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.core.parallel import Span
from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.moe_align import launch_moe_align, read_block
from paceline.kernels._triton.moe_experts import launch_sum
from paceline.kernels._triton.packed_products import add_chunk, chunk_scales
from paceline.kernels._triton.primitives import swiglu
from paceline.kernels._triton.runtime import cdiv, interpreted, require_runnable
from paceline.kernels.moe_experts import SwiGLU
from paceline.kernels.moe_route import Routing
from paceline.kernels.packed_weight import CHUNK, PackedWeight, words_of

_CHUNK = tl.constexpr(CHUNK)


class Words(NamedTuple):
    """One projection of every expert."""

    packed: PackedWeight  # [experts * rows, columns]
    kind: str
    group: int  # columns that share a scale


class Tile(NamedTuple):
    """What one program computes."""

    pairs: int
    rows: int  # of a weight
    warps: int
    stages: int


def packed_tile(num_pairs: int, num_experts: int) -> Tile:
    """By pairs of an expert: few read weights at the speed of memory, many compute."""
    per_expert = num_pairs / num_experts
    if per_expert <= 16:
        return Tile(16, 64, 4, 4)
    if per_expert <= 64:
        return Tile(64, 64, 4, 4)
    return Tile(128, 128, 8, 3)


@triton.jit
def _product(
    a_ptrs,  # [PAIRS] of rows of a
    live_pairs,  # [PAIRS]
    words_ptr,  # [experts * rows, num_words] int32
    scale_ptr,  # [experts * rows, groups]
    zero_ptr,  # [experts * rows, groups] uint8, or None
    rows,  # [ROWS] int64, of all experts'
    live_rows,  # [ROWS]
    num_words,
    groups,
    COLUMNS: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,  # columns; 0: all
    WORDS: tl.constexpr,  # of a chunk
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    MASKED: tl.constexpr,  # the last chunk is partial
    DTYPE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """W a^T of one tile: [ROWS, PAIRS] float32."""
    PARTS: tl.constexpr = 1 if GROUP == 0 else _CHUNK // GROUP  # of a chunk
    PART: tl.constexpr = _CHUNK // PARTS
    column = tl.arange(0, PART)
    row_ptrs = words_ptr + rows[:, None] * num_words + tl.arange(0, WORDS)[None, :]
    acc = tl.zeros([ROWS, PAIRS], tl.float32)
    places = rows * groups
    for chunk in range(num_words // WORDS):
        xs = ()
        for part in tl.static_range(PARTS):
            ahead = chunk * _CHUNK + part * PART + column
            mask = live_pairs[:, None]
            if MASKED:
                mask = mask & (ahead < COLUMNS)[None, :]
            x = tl.load(a_ptrs[:, None] + ahead[None, :], mask=mask, other=0.0)
            xs = xs + (x,)  # noqa: RUF005  Triton knows no stars
        scales = chunk_scales(scale_ptr, places, live_rows, groups, chunk, GROUP)
        acc = add_chunk(
            acc, row_ptrs, xs, scales, zero_ptr, places, live_rows, groups, chunk, ROWS, KIND,
            GROUP, WORDS, DTYPE, INTERPRETED,
        )  # fmt: skip
    return acc


@triton.jit
def _packed_gate_up_kernel(
    x_ptr,  # [tokens, HIDDEN]
    words_ptr,  # [experts * 2 * INTER, num_words] int32  gate and up rows interleaved
    scale_ptr,  # [experts * 2 * INTER, groups]
    zero_ptr,  # [experts * 2 * INTER, groups] uint8, or None
    order_ptr,  # [pairs] int32
    blocks_ptr,  # [max_blocks, 3] int32 expert, begin, end
    out_ptr,  # [pairs, INTER] in the order of `order`
    stride_x_token,
    num_words,
    groups,
    alpha,
    up_offset,
    LIMIT: tl.constexpr,
    EXPERTS_PER_TOKEN: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    WORDS: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    MASKED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    expert, begin, end = read_block(blocks_ptr, tl.program_id(1))
    if begin >= end:
        return
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    place = begin + tl.arange(0, PAIRS)
    live = place < end
    pair = tl.load(order_ptr + place, mask=live, other=0)
    token = (pair // EXPERTS_PER_TOKEN).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    product = _product(
        x_ptr + token * stride_x_token, live, words_ptr, scale_ptr, zero_ptr,
        expert * (2 * INTER) + row, row < 2 * INTER, num_words, groups, HIDDEN, KIND, GROUP, WORDS,
        PAIRS, ROWS, MASKED, DTYPE, INTERPRETED,
    )  # fmt: skip
    let_next_start(OVERLAPPED)
    by_part = tl.reshape(product, (ROWS // 2, 2, PAIRS))
    gate, up = tl.split(tl.permute(by_part, (0, 2, 1)))
    gated = swiglu(gate, up, alpha, up_offset, LIMIT)
    inter = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
    out_ptrs = out_ptr + place.to(tl.int64)[None, :] * INTER + inter[:, None]
    tl.store(out_ptrs, gated.to(DTYPE), mask=(inter < INTER)[:, None] & live[None, :])


@triton.jit
def _packed_down_kernel(
    gated_ptr,  # [pairs, INTER] in the order of `order`
    words_ptr,  # [experts * HIDDEN, num_words] int32
    scale_ptr,  # [experts * HIDDEN, groups]
    zero_ptr,  # [experts * HIDDEN, groups] uint8, or None
    routing_weights_ptr,  # [pairs] float32
    order_ptr,  # [pairs] int32
    blocks_ptr,  # [max_blocks, 3] int32 expert, begin, end
    out_ptr,  # [pairs, HIDDEN] pair by pair
    num_words,
    groups,
    HIDDEN: tl.constexpr,
    INTER: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    WORDS: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    MASKED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    expert, begin, end = read_block(blocks_ptr, tl.program_id(1))
    if begin >= end:
        return
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    place = begin + tl.arange(0, PAIRS)
    live = place < end
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    product = _product(
        gated_ptr + place.to(tl.int64) * INTER, live, words_ptr, scale_ptr, zero_ptr,
        expert * HIDDEN + row, row < HIDDEN, num_words, groups, INTER, KIND, GROUP, WORDS, PAIRS,
        ROWS, MASKED, DTYPE, INTERPRETED,
    )  # fmt: skip
    let_next_start(OVERLAPPED)
    pair = tl.load(order_ptr + place, mask=live, other=0).to(tl.int64)
    share = tl.load(routing_weights_ptr + pair, mask=live, other=0.0)
    out_ptrs = out_ptr + pair[None, :] * HIDDEN + row[:, None]
    tl.store(
        out_ptrs,
        (product * share[None, :]).to(DTYPE),
        mask=(row < HIDDEN)[:, None] & live[None, :],
    )


def launch_packed_experts(
    x: Tensor,
    routing: Routing,
    gate_up: Words,
    down: Words,
    *,
    inter: int,
    gate: SwiGLU,
    experts: Span,
    plus: Tensor | None,
    out: Tensor,
) -> None:
    """Arguments as checked by kernels/packed_experts.py."""
    require_runnable("x of packed_experts", x, _packed_down_kernel, otherwise="use moe_experts")
    if x.shape[0] == 0:
        return
    hidden, slots = x.shape[1], routing.expert_ids.shape[1]
    num_pairs = routing.expert_ids.numel()
    tile = packed_tile(num_pairs, experts.total)
    aligned = launch_moe_align(routing.expert_ids, experts, tile.pairs)
    gated = torch.empty(num_pairs, inter, dtype=x.dtype, device=x.device)
    parts = torch.empty(num_pairs, hidden, dtype=x.dtype, device=x.device)
    sizes = {"HIDDEN": hidden, "INTER": inter}
    launch(
        _packed_gate_up_kernel,
        (cdiv(2 * inter, tile.rows), aligned.blocks.shape[0]),
        x,
        *gate_up.packed,
        *aligned,
        gated,
        x.stride(0),
        *_widths(gate_up),
        gate.alpha,
        gate.up_offset,
        LIMIT=gate.limit,
        EXPERTS_PER_TOKEN=slots,
        **sizes,
        **_options(gate_up, hidden, tile),
        **overlap_options(x.device, _packed_gate_up_kernel),
    )
    launch(
        _packed_down_kernel,
        (cdiv(hidden, tile.rows), aligned.blocks.shape[0]),
        gated,
        *down.packed,
        routing.weights,
        *aligned,
        parts,
        *_widths(down),
        **sizes,
        **_options(down, inter, tile),
        **overlap_options(x.device, _packed_down_kernel),
    )
    launch_sum(parts, routing.expert_ids, experts, plus, out)


def _widths(words: Words) -> tuple[int, int]:
    """Words and groups of a row."""
    return words.packed.words.shape[1], words.packed.scale.shape[1]


def _options(words: Words, columns: int, tile: Tile) -> dict[str, Any]:
    """Launch arguments of either product.  columns: of its weight."""
    return {
        "KIND": words.kind,
        "GROUP": 0 if words.group >= columns else words.group,
        "WORDS": words_of(words.kind),
        "PAIRS": tile.pairs,
        "ROWS": tile.rows,
        "MASKED": columns % CHUNK != 0,
        "INTERPRETED": interpreted(_packed_down_kernel),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
