"""Triton kernels of draw, last part; see kernels/draw.py for the definition.

draw_blocks   all rows: edits, and the best of each block
draw_cuts     rows that filter: what passes top-k and top-p
scores        rows that draw: the best score of each block
tokens        all rows: the best block
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.core.sampling_params import Asks
from paceline.kernels._triton.draw_blocks import (
    FILTER,
    NO_TOKEN,
    TOKENS_OF_BLOCK,
    block_tile,
    launch_best,
    logits_of,
    over_blocks,
    row_sizes,
)
from paceline.kernels._triton.draw_cuts import launch_cuts, weigh
from paceline.kernels._triton.gumbel import gumbel_at
from paceline.kernels._triton.launch import (
    launch,
    let_next_start,
    overlap_options,
    wait_for_inputs,
)
from paceline.kernels._triton.runtime import interpreted
from paceline.kernels.draw import Laws
from paceline.kernels.edit_logits import Edits, SampledRows

DRAW = tl.constexpr(int(Asks.DRAW))


@triton.jit
def _scores_kernel(
    logits_ptr,  # [num_rows, vocab]
    edited_ptr,  # [num_rows, vocab] float32
    rows_ptr,  # [num_rows] int64
    positions_ptr,  # [num_rows] int64
    asks_ptr,  # [table rows] int64
    temperature_ptr,  # [table rows] float32
    min_p_ptr,  # [table rows] float32
    seed_ptr,  # [table rows] int64
    cuts_ptr,  # [num_rows] int32
    best_ptr,  # [num_rows, blocks] float32
    score_ptr,  # [num_rows, blocks] float32
    tokens_ptr,  # [num_rows, blocks] int32, of rows that draw
    stride_logits_row,
    stride_ints,
    stride_floats,
    vocab,
    num_blocks,
    BLOCK: tl.constexpr,
    BLOCK_VOCAB: tl.constexpr,
    LIBDEVICE: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    let_next_start(OVERLAPPED)
    block = tl.program_id(0)
    n = tl.program_id(1).to(tl.int64)
    row = tl.load(rows_ptr + n)
    ints, floats = row * stride_ints, row * stride_floats
    asks = tl.load(asks_ptr + ints)
    if asks & DRAW != 0:
        best = tl.max(over_blocks(best_ptr, n, num_blocks, float("-inf"), BLOCK), axis=0)
        tokens = block * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB)
        logits = logits_of(logits_ptr, edited_ptr, n, asks, stride_logits_row, vocab, tokens)
        scaled = tl.div_rn(logits - best, tl.load(temperature_ptr + floats))
        keep = tokens < vocab
        if asks & FILTER != 0:
            keys = (0.0 - scaled).to(tl.int32, bitcast=True)
            odds, _ = weigh(scaled, LIBDEVICE)
            keep = keep & (keys <= tl.load(cuts_ptr + n)) & (odds >= tl.load(min_p_ptr + floats))
        score = tl.full((), float("-inf"), tl.float32)
        token = tl.full((), NO_TOKEN, tl.int32)
        if tl.sum(keep.to(tl.int32), axis=0) > 0:
            seed, position = tl.load(seed_ptr + ints), tl.load(positions_ptr + n)
            scores = scaled + gumbel_at(seed, position, tokens.to(tl.int64))
            scores = tl.where(keep, scores, float("-inf"))
            score = tl.max(scores, axis=0)
            token = tl.min(tl.where((scores == score) & keep, tokens, NO_TOKEN), axis=0)
        tl.store(score_ptr + n * num_blocks + block, score)
        tl.store(tokens_ptr + n * num_blocks + block, token)


@triton.jit
def _tokens_kernel(
    rows_ptr,  # [num_rows] int64
    asks_ptr,  # [table rows] int64
    best_ptr,  # [num_rows, blocks] float32
    score_ptr,  # [num_rows, blocks] float32, of rows that draw
    tokens_ptr,  # [num_rows, blocks] int32
    token_ids_ptr,  # [num_rows] int64
    finite_ptr,  # [num_rows] uint8
    stride_ints,
    num_blocks,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    let_next_start(OVERLAPPED)
    n = tl.program_id(0).to(tl.int64)
    best = over_blocks(best_ptr, n, num_blocks, float("-inf"), BLOCK)
    finite = tl.max(best, axis=0) < float("inf")
    if tl.load(asks_ptr + tl.load(rows_ptr + n) * stride_ints) & DRAW != 0:
        best = over_blocks(score_ptr, n, num_blocks, float("-inf"), BLOCK)
    blocks = tl.arange(0, BLOCK)
    at = n * num_blocks + blocks
    tokens = tl.load(tokens_ptr + at, mask=blocks < num_blocks, other=NO_TOKEN)
    token = tl.min(tl.where(best == tl.max(best, axis=0), tokens, NO_TOKEN), axis=0)
    tl.store(token_ids_ptr + n, tl.where(finite, token, 0).to(tl.int64))
    tl.store(finite_ptr + n, finite.to(tl.uint8))


def launch_draw(
    logits: Tensor,
    at: SampledRows,
    laws: Laws,
    edits: Edits,
    token_ids: Tensor,
    finite: Tensor,
    *,
    block_vocab: int = TOKENS_OF_BLOCK,
) -> None:
    """Eight kernels; six of them leave rows alone that do not ask for what they do."""
    num_rows = logits.shape[0]
    if num_rows == 0:
        return
    blocks = launch_best(logits, at, edits, block_vocab=block_vocab)
    cuts = launch_cuts(logits, at, laws, edits, blocks, block_vocab=block_vocab)
    score, num_blocks = torch.empty_like(blocks.best), blocks.best.shape[1]
    launch(
        _scores_kernel,
        (num_blocks, num_rows),
        logits,
        blocks.edited,
        at.rows,
        at.positions,
        edits.asks,
        laws.temperature,
        laws.min_p,
        laws.seed,
        cuts,
        blocks.best,
        score,
        blocks.tokens,
        LIBDEVICE=not interpreted(_scores_kernel),
        **row_sizes(logits, laws, edits, num_blocks),
        **block_tile(block_vocab),
        **overlap_options(logits.device, _scores_kernel),
    )
    launch(
        _tokens_kernel,
        (num_rows,),
        at.rows,
        edits.asks,
        blocks.best,
        score,
        blocks.tokens,
        token_ids,
        finite.view(torch.uint8),
        edits.asks.stride(0),
        num_blocks,
        BLOCK=triton.next_power_of_2(num_blocks),
        num_warps=1,
        **overlap_options(logits.device, _tokens_kernel),
    )
