"""Triton kernels of draw, last part; see kernels/draw.py for the definition.

draw_blocks   all rows: edits, and the best of each block
draw_members  rows that filter: what may be where top-k and top-p cut
draw_cuts     these rows: the cut
scores        rows that draw: the best score of each block, nearly
tokens        all rows: the best token; of rows that draw, of the blocks that may hold it
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.core.request.sampling_params import Asks
from paceline.kernels._triton.draw_blocks import (
    FILTER,
    NO_TOKEN,
    block_tile,
    inverse_of,
    launch_best,
    logits_of,
    over_blocks,
    row_sizes,
)
from paceline.kernels._triton.draw_cuts import launch_cuts
from paceline.kernels._triton.draw_members import weigh
from paceline.kernels._triton.gumbel import NEAR, gumbel_at, near_gumbel_at
from paceline.kernels._triton.launch import (
    launch,
    let_next_start,
    overlap_options,
    wait_for_inputs,
)
from paceline.kernels._triton.runtime import interpreted
from paceline.kernels.draw import TOKENS_OF_BLOCK, Laws
from paceline.kernels.edit_logits import Edits, SampledRows

DRAW = tl.constexpr(int(Asks.DRAW))


@triton.jit
def _of_block(
    block,
    logits_ptr,  # [num_rows, vocab]
    edited_ptr,  # [num_rows, vocab] float32
    temperature_ptr,  # [table rows] float32
    min_p_ptr,  # [table rows] float32
    cuts_ptr,  # [num_rows] int32
    n,
    asks,
    floats,  # offset of the row in columns of floats
    best,  # float32, of the row
    stride_logits_row,
    vocab,
    BLOCK_VOCAB: tl.constexpr,
    LIBDEVICE: tl.constexpr,
):
    """(tokens int32, scaled float32, whether they are kept), each [BLOCK_VOCAB]."""
    tokens = block * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB)
    logits = logits_of(logits_ptr, edited_ptr, n, asks, stride_logits_row, vocab, tokens)
    scaled = (logits - best) * inverse_of(tl.load(temperature_ptr + floats))
    keep = tokens < vocab
    if asks & FILTER != 0:
        keys = (0.0 - scaled).to(tl.int32, bitcast=True)
        keep = keep & (keys <= tl.load(cuts_ptr + n))
        min_p = tl.load(min_p_ptr + floats)
        if min_p > 0.0:
            odds, _ = weigh(scaled, LIBDEVICE)
            keep = keep & (odds >= min_p)
    return tokens, scaled, keep


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
    score_ptr,  # [num_rows, blocks] float32, less than NEAR off
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
        tokens, scaled, keep = _of_block(
            block, logits_ptr, edited_ptr, temperature_ptr, min_p_ptr, cuts_ptr, n, asks, floats,
            best, stride_logits_row, vocab, BLOCK_VOCAB, LIBDEVICE,
        )  # fmt: skip
        score = tl.full((), float("-inf"), tl.float32)
        if tl.sum(keep.to(tl.int32), axis=0) > 0:
            seed, position = tl.load(seed_ptr + ints), tl.load(positions_ptr + n)
            noise = near_gumbel_at(seed, position, tokens.to(tl.int64), LIBDEVICE)
            score = tl.max(tl.where(keep, scaled + noise, float("-inf")), axis=0)
        tl.store(score_ptr + n * num_blocks + block, score)


@triton.jit
def _tokens_kernel(
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
    score_ptr,  # [num_rows, blocks] float32, of rows that draw, less than NEAR off
    tokens_ptr,  # [num_rows, blocks] int32
    token_ids_ptr,  # [num_rows] int64
    finite_ptr,  # [num_rows] uint8
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
    n = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + n)
    ints, floats = row * stride_ints, row * stride_floats
    asks = tl.load(asks_ptr + ints)
    bests = over_blocks(best_ptr, n, num_blocks, float("-inf"), BLOCK)
    best = tl.max(bests, axis=0)
    finite = best < float("inf")
    blocks = tl.arange(0, BLOCK)
    found = tl.full((), 0, tl.int32)
    if asks & DRAW != 0:
        seed, position = tl.load(seed_ptr + ints), tl.load(positions_ptr + n)
        near = over_blocks(score_ptr, n, num_blocks, float("-inf"), BLOCK)
        may_hold = near >= tl.max(near, axis=0) - 2 * NEAR
        highest = tl.full((), float("-inf"), tl.float32)
        block = tl.min(tl.where(may_hold, blocks, BLOCK), axis=0)
        while block < num_blocks:
            tokens, scaled, keep = _of_block(
                block, logits_ptr, edited_ptr, temperature_ptr, min_p_ptr, cuts_ptr, n, asks,
                floats, best, stride_logits_row, vocab, BLOCK_VOCAB, LIBDEVICE,
            )  # fmt: skip
            scores = scaled + gumbel_at(seed, position, tokens.to(tl.int64))
            scores = tl.where(keep, scores, float("-inf"))
            score = tl.max(scores, axis=0)
            token = tl.min(tl.where((scores == score) & keep, tokens, NO_TOKEN), axis=0)
            found = tl.where(score > highest, token, found)
            highest = tl.maximum(score, highest)
            block = tl.min(tl.where(may_hold & (blocks > block), blocks, BLOCK), axis=0)
    else:
        at = n * num_blocks + blocks
        tokens = tl.load(tokens_ptr + at, mask=blocks < num_blocks, other=NO_TOKEN)
        found = tl.min(tl.where(bests == best, tokens, NO_TOKEN), axis=0)
    tl.store(token_ids_ptr + n, tl.where(finite, found, 0).to(tl.int64))
    tl.store(finite_ptr + n, finite.to(tl.uint8))


def launch_draw(
    logits: Tensor,
    at: SampledRows,
    laws: Laws,
    edits: Edits,
    token_ids: Tensor,
    finite: Tensor,
    *,
    mask_ids: Tensor | None = None,
    block_vocab: int = TOKENS_OF_BLOCK,
) -> None:
    """Eight kernels; six of them leave rows alone that do not ask for what they do."""
    num_rows = logits.shape[0]
    if num_rows == 0:
        return
    blocks = launch_best(logits, at, laws, edits, mask_ids=mask_ids, block_vocab=block_vocab)
    cuts = launch_cuts(logits, at, laws, edits, blocks, block_vocab=block_vocab)
    score, num_blocks = torch.empty_like(blocks.best), blocks.best.shape[1]
    given = (
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
    )
    sizes = {**row_sizes(logits, laws, edits, num_blocks), **block_tile(block_vocab)}
    launch(
        _scores_kernel,
        (num_blocks, num_rows),
        *given,
        LIBDEVICE=not interpreted(_scores_kernel),
        **sizes,
        **overlap_options(logits.device, _scores_kernel),
    )
    launch(
        _tokens_kernel,
        (num_rows,),
        *given,
        blocks.tokens,
        token_ids,
        finite.view(torch.uint8),
        LIBDEVICE=not interpreted(_tokens_kernel),
        **sizes,
        **overlap_options(logits.device, _tokens_kernel),
    )
