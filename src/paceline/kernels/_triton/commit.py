"""Triton kernel of commit; see kernels/commit.py for the definition."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.core.padding import PAD_ROW
from paceline.core.step import FinishCode
from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels.commit import CommittedRows, EndRules, StepTokens


@triton.jit
def _commit_kernel(
    kv_committed_ptr,  # [rows] int32
    finish_ptr,  # [rows] int32
    history_ptr,  # [rows, max_tokens] int32
    stop_ids_ptr,  # [rows, max_stop_ids] int64
    max_len_ptr,  # [rows] int64
    facts_ptr,  # [padded_reqs, 3] int32
    row_ids_ptr,  # [padded_reqs] int64
    kv_lens_ptr,  # [padded_reqs] int32
    token_ids_ptr,  # [padded_reqs] int64
    finite_ptr,  # [padded_reqs] uint8
    results_ptr,  # [padded_reqs, 3] int32
    stride_kv_committed,
    stride_finish,
    stride_history_row,
    stride_stop_ids_row,
    stride_max_len,
    stride_facts,
    MAX_STOP_IDS: tl.constexpr,
    BLOCK_STOP_IDS: tl.constexpr,
    PAD_ROW: tl.constexpr,
    RUNNING: tl.constexpr,
    STOP_TOKEN: tl.constexpr,
    LENGTH: tl.constexpr,
    NON_FINITE: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    let_next_start(OVERLAPPED)
    req = tl.program_id(0)
    row = tl.load(row_ids_ptr + req)
    kv_len = tl.load(kv_lens_ptr + req)
    token = tl.load(token_ids_ptr + req)
    is_finite = tl.load(finite_ptr + req) != 0
    is_live = row != PAD_ROW
    wants_token = is_live & (tl.load(facts_ptr + req * stride_facts + 2) != 0)
    emits = wants_token & is_finite

    columns = tl.arange(0, BLOCK_STOP_IDS)
    stop_ptrs = stop_ids_ptr + row * stride_stop_ids_row + columns
    stop_ids = tl.load(stop_ptrs, mask=columns < MAX_STOP_IDS, other=-1)
    is_stop = tl.max((stop_ids == token).to(tl.int32), axis=0) != 0
    at_limit = kv_len + 1 >= tl.load(max_len_ptr + row * stride_max_len)
    code = tl.where(is_stop, STOP_TOKEN, tl.where(at_limit, LENGTH, RUNNING))
    code = tl.where(emits, code, tl.where(wants_token, NON_FINITE, RUNNING))

    tl.store(kv_committed_ptr + row * stride_kv_committed, kv_len, mask=is_live)
    tl.store(finish_ptr + row * stride_finish, code, mask=is_live)
    emitted_token = tl.where(emits, token, 0).to(tl.int32)
    tl.store(history_ptr + row * stride_history_row + kv_len, emitted_token, mask=emits)
    tl.store(results_ptr + req * 3, emits.to(tl.int32))
    tl.store(results_ptr + req * 3 + 1, emitted_token)
    tl.store(results_ptr + req * 3 + 2, code)


def launch_commit(rows: CommittedRows, ends: EndRules, step: StepTokens, results: Tensor) -> None:
    """One program per request."""
    max_stop_ids = ends.stop_ids.shape[1]
    launch(
        _commit_kernel,
        (step.row_ids.shape[0],),
        *rows,
        *ends,
        *step._replace(finite=step.finite.view(torch.uint8)),
        results,
        *(column.stride(0) for column in (*rows, *ends, step.facts)),
        MAX_STOP_IDS=max_stop_ids,
        BLOCK_STOP_IDS=triton.next_power_of_2(max_stop_ids),
        PAD_ROW=PAD_ROW,
        RUNNING=int(FinishCode.RUNNING),
        STOP_TOKEN=int(FinishCode.STOP_TOKEN),
        LENGTH=int(FinishCode.LENGTH),
        NON_FINITE=int(FinishCode.NON_FINITE),
        num_warps=1,
        **overlap_options(results.device, _commit_kernel),
    )
