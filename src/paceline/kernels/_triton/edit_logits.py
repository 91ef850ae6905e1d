"""Triton kernel of edit_logits; see kernels/edit_logits.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.core.request.sampling_params import Asks
from paceline.kernels._triton.launch import (
    launch,
    let_next_start,
    overlap_options,
    wait_for_inputs,
)
from paceline.kernels._triton.runtime import next_power_of_2
from paceline.kernels.edit_logits import Edits, SampledRows

BIAS = tl.constexpr(int(Asks.BIAS))
PENALISE = tl.constexpr(int(Asks.PENALISE))
MIN_TOKENS = tl.constexpr(int(Asks.MIN_TOKENS))
EDITS = tl.constexpr(int(Asks.BIAS | Asks.PENALISE | Asks.MIN_TOKENS))
_BLOCK_HISTORY = 1024
_NUM_WARPS = 4


@triton.jit
def _edit_ids(
    logits_ptr,  # [vocab] float32 of one row
    counts_ptr,  # [vocab] int32: how often the output has a token, -1: edited
    ids,  # int64
    is_token,  # like ids
    repetition,
    presence,
    frequency,
):
    """Edit every id that no thread has edited."""
    count = tl.atomic_xchg(counts_ptr + ids, tl.full(ids.shape, -1, tl.int32), mask=is_token)
    mine = is_token & (count >= 0)
    value = tl.load(logits_ptr + ids, mask=mine, other=0.0)
    repeated = tl.where(value < 0.0, value * repetition, tl.div_rn(value, repetition))
    said = count.to(tl.float32)
    value = repeated - tl.where(count > 0, presence, 0.0) - frequency * said
    tl.store(logits_ptr + ids, value, mask=mine)


@triton.jit
def _edit_rows_kernel(
    logits_ptr,  # [num_rows, vocab] float32
    counts_ptr,  # [num_rows, vocab] int32 zeros, where rows penalise
    rows_ptr,  # [num_rows] int64
    positions_ptr,  # [num_rows] int64
    token_ids_ptr,  # [table rows, max_tokens] int32
    drafts_ptr,  # [num_rows, WIDTH] int64, read where WIDTH
    asks_ptr,  # [table rows] int64, and so on: columns of two tables
    bias_ids_ptr,
    bias_values_ptr,
    bias_count_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    prompt_len_ptr,
    min_len_ptr,
    stop_ids_ptr,
    num_stop_ids_ptr,
    stride_logits_row,
    stride_counts_row,
    stride_token_ids_row,
    stride_ints,
    stride_floats,
    max_tokens,
    vocab,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_BIAS: tl.constexpr,
    BLOCK_STOPS: tl.constexpr,
    BLOCK_HISTORY: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    let_next_start(OVERLAPPED)
    n = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + n)
    ints, floats = row * stride_ints, row * stride_floats
    asks = tl.load(asks_ptr + ints)
    logits_row_ptr = logits_ptr + n * stride_logits_row
    if asks & BIAS != 0:
        columns = tl.arange(0, BLOCK_BIAS)
        used = columns < tl.load(bias_count_ptr + ints)
        ids = tl.load(bias_ids_ptr + ints + columns, mask=used, other=-1)
        used = (ids >= 0) & (ids < vocab)
        bias = tl.load(bias_values_ptr + floats + columns, mask=used, other=0.0)
        value = tl.load(logits_row_ptr + ids, mask=used, other=0.0)
        tl.store(logits_row_ptr + ids, value + bias, mask=used)
        tl.debug_barrier()  # the next edits read what others wrote
    if asks & PENALISE != 0:
        counts_row_ptr = counts_ptr + n * stride_counts_row
        history_ptr = token_ids_ptr + row * stride_token_ids_row
        prompt_len = tl.load(prompt_len_ptr + ints)
        repetition = tl.load(repetition_ptr + floats)
        presence = tl.load(presence_ptr + floats)
        frequency = tl.load(frequency_ptr + floats)
        num_old = tl.load(positions_ptr + n)
        if WIDTH > 0:
            columns = tl.arange(0, BLOCK_WIDTH)
            drafts = tl.load(drafts_ptr + n * WIDTH + columns, mask=columns < WIDTH, other=-1)
            num_old -= tl.sum((drafts != -1).to(tl.int64), axis=0)
            is_draft = (drafts >= 0) & (drafts < vocab)
            tl.atomic_add(counts_row_ptr + drafts, 1, mask=is_draft)
        num_old = tl.minimum(num_old, max_tokens).to(tl.int32)
        for start in range(0, num_old, BLOCK_HISTORY):
            index = start + tl.arange(0, BLOCK_HISTORY)
            ids = tl.load(history_ptr + index, mask=index < num_old, other=-1).to(tl.int64)
            is_output = (ids >= 0) & (ids < vocab) & (index >= prompt_len)
            tl.atomic_add(counts_row_ptr + ids, 1, mask=is_output)
        tl.debug_barrier()  # all is counted
        for start in range(0, num_old, BLOCK_HISTORY):
            index = start + tl.arange(0, BLOCK_HISTORY)
            ids = tl.load(history_ptr + index, mask=index < num_old, other=-1).to(tl.int64)
            is_token = (ids >= 0) & (ids < vocab)
            _edit_ids(
                logits_row_ptr, counts_row_ptr, ids, is_token, repetition, presence, frequency
            )
        if WIDTH > 0:
            _edit_ids(
                logits_row_ptr, counts_row_ptr, drafts, is_draft, repetition, presence, frequency
            )
        tl.debug_barrier()
    if asks & MIN_TOKENS != 0:
        columns = tl.arange(0, BLOCK_STOPS)
        is_early = tl.load(positions_ptr + n) < tl.load(min_len_ptr + ints)
        num_stop_ids = tl.where(is_early, tl.load(num_stop_ids_ptr + ints), 0)
        ids = tl.load(stop_ids_ptr + ints + columns, mask=columns < num_stop_ids, other=-1)
        used = (ids >= 0) & (ids < vocab)
        tl.store(logits_row_ptr + ids, float("-inf") + tl.zeros_like(ids).to(tl.float32), mask=used)


def launch_edit_logits(logits: Tensor, counts: Tensor, at: SampledRows, edits: Edits) -> None:
    """One program per row; those that ask for nothing leave at once.

    counts: [num_rows, vocab] int32, zeros in rows that penalise; holds anything afterwards.
    """
    num_rows, vocab = logits.shape
    if num_rows == 0:
        return
    width = 0 if at.drafts is None else at.drafts.shape[1]
    drafts = at.rows if at.drafts is None else at.drafts.contiguous()
    launch(
        _edit_rows_kernel,
        (num_rows,),
        logits,
        counts,
        at.rows,
        at.positions,
        at.token_ids,
        drafts,
        *edits,
        logits.stride(0),
        counts.stride(0),
        at.token_ids.stride(0),
        edits.asks.stride(0),
        edits.repetition.stride(0),
        at.token_ids.shape[1],
        vocab,
        WIDTH=width,
        BLOCK_WIDTH=next_power_of_2(max(width, 1)),
        BLOCK_BIAS=next_power_of_2(edits.bias_ids.shape[1]),
        BLOCK_STOPS=next_power_of_2(edits.stop_ids.shape[1]),
        BLOCK_HISTORY=_BLOCK_HISTORY,
        num_warps=_NUM_WARPS,
        **overlap_options(logits.device, _edit_rows_kernel),
    )


def zero_counts(logits: Tensor) -> Tensor:
    """Counts for `launch_edit_logits`, of every row."""
    return torch.zeros(logits.shape, dtype=torch.int32, device=logits.device)
