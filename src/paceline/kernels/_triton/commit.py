"""Triton kernel of commit; see kernels/commit.py for the definition."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.core.padding import PAD_ROW
from paceline.core.step import FinishCode
from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.runtime import next_power_of_2
from paceline.kernels.commit import Accepted, CommittedRows, Drafts, EndRules, SampledTokens

_CODES = len(FinishCode)  # a row of the tree is packed as next row * _CODES + code
_ONE_WARP = 32  # rows of a tree whose square one warp holds in registers


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
    token_ids_ptr,  # [padded_reqs, n] int64
    finite_ptr,  # [padded_reqs, n] uint8
    results_ptr,  # [padded_reqs, 2 + MAX_PATH] int32
    tokens_ptr,  # [padded_reqs, n] int64, this and the next four used when HAS_DRAFTS
    parents_ptr,  # [padded_reqs, n] int32, used when HAS_PARENTS
    max_drafts_ptr,  # [rows] int64
    path_ptr,  # [padded_reqs, MAX_PATH] int64
    last_ptr,  # [padded_reqs] int64
    stride_kv_committed,
    stride_finish,
    stride_history_row,
    stride_stop_ids_row,
    stride_max_len,
    stride_facts,
    stride_max_drafts,  # used when HAS_DRAFTS
    n,
    HAS_DRAFTS: tl.constexpr,
    HAS_PARENTS: tl.constexpr,
    MAX_PATH: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX_STOP_IDS: tl.constexpr,
    BLOCK_STOP_IDS: tl.constexpr,
    PAD_ROW: tl.constexpr,
    RUNNING: tl.constexpr,
    STOP_TOKEN: tl.constexpr,
    LENGTH: tl.constexpr,
    NON_FINITE: tl.constexpr,
    CODES: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """One request: where each of its rows goes on to and what ends there, then the walk."""
    wait_for_inputs(OVERLAPPED)
    let_next_start(OVERLAPPED)
    req = tl.program_id(0)
    row = tl.load(row_ids_ptr + req)
    kv_len = tl.load(kv_lens_ptr + req)
    is_live = row != PAD_ROW
    wants_token = is_live & (tl.load(facts_ptr + req * stride_facts + 2) != 0)
    max_len = tl.load(max_len_ptr + row * stride_max_len)
    columns = tl.arange(0, BLOCK)
    is_row = columns < n
    ptrs = req * n + columns
    said = tl.load(token_ids_ptr + ptrs, mask=is_row, other=0)
    is_finite = tl.load(finite_ptr + ptrs, mask=is_row, other=1) != 0

    stops = tl.arange(0, BLOCK_STOP_IDS)
    stop_ptrs = stop_ids_ptr + row * stride_stop_ids_row + stops
    stop_ids = tl.load(stop_ptrs, mask=stops < MAX_STOP_IDS, other=-1)
    is_stop = tl.max((said[:, None] == stop_ids[None, :]).to(tl.int32), axis=1) != 0
    packed = tl.where(is_finite, tl.where(is_stop, STOP_TOKEN, RUNNING), NON_FINITE)
    if HAS_DRAFTS:
        most = tl.load(max_drafts_ptr + row * stride_max_drafts)
        tokens = tl.load(tokens_ptr + ptrs, mask=is_row, other=0)
        parents = tl.where(is_row, columns - 1, -1)
        if HAS_PARENTS:
            parents = tl.load(parents_ptr + ptrs, mask=is_row, other=-1)
        is_child = parents[None, :] == columns[:, None]  # [parent, child]
        fits = is_child & (tokens[None, :] == said[:, None])
        next_rows = tl.min(tl.where(fits, columns[None, :], BLOCK), axis=1)  # BLOCK: there is none
        packed += next_rows * CODES

    first = kv_len - n
    node = 0
    goes_on = wants_token
    finish = RUNNING
    num_emitted = 0
    for step in tl.static_range(MAX_PATH):
        here = tl.sum(tl.where(columns == node, packed, 0), axis=0)
        token = tl.sum(tl.where(columns == node, said, 0), axis=0).to(tl.int32)
        code = here % CODES
        at_limit = first + 2 + step >= max_len
        code = tl.where((code == RUNNING) & at_limit, LENGTH, code)
        emits = goes_on & (code != NON_FINITE)
        tl.store(results_ptr + req * (2 + MAX_PATH) + 2 + step, tl.where(emits, token, 0))
        history_row_ptr = history_ptr + row * stride_history_row
        tl.store(history_row_ptr + first + 1 + step, token, mask=emits)
        finish = tl.where(goes_on, code, finish)
        num_emitted += emits.to(tl.int32)
        if HAS_DRAFTS:
            own_or_node = tl.where(emits, node, step)
            tl.store(path_ptr + req * MAX_PATH + step, own_or_node.to(tl.int64))
            node = here // CODES
            goes_on = goes_on & (code == RUNNING) & (node < BLOCK) & (step < most)

    committed = tl.where(wants_token, first + num_emitted, kv_len)
    tl.store(kv_committed_ptr + row * stride_kv_committed, committed, mask=is_live)
    tl.store(finish_ptr + row * stride_finish, finish, mask=is_live)
    tl.store(results_ptr + req * (2 + MAX_PATH), num_emitted)
    tl.store(results_ptr + req * (2 + MAX_PATH) + 1, finish)
    if HAS_DRAFTS:
        tl.store(last_ptr + req, (req * n + tl.maximum(num_emitted - 1, 0)).to(tl.int64))


def launch_commit(
    rows: CommittedRows,
    ends: EndRules,
    sampled: SampledTokens,
    results: Tensor,
    drafts: Drafts | None = None,
    accepted: Accepted | None = None,
) -> None:
    """One program per request."""
    (reqs, n), max_stop_ids = sampled.token_ids.shape, ends.stop_ids.shape[1]
    block, unused = next_power_of_2(n), sampled.kv_lens
    parents = None if drafts is None else drafts.parents
    launch(
        _commit_kernel,
        (reqs,),
        *rows,
        *ends,
        *sampled._replace(finite=sampled.finite.view(torch.uint8)),
        results,
        unused if drafts is None else drafts.tokens,
        unused if parents is None else parents,
        unused if drafts is None else drafts.max_drafts,
        *((unused, unused) if accepted is None else accepted),
        *(column.stride(0) for column in (*rows, *ends, sampled.facts)),
        0 if drafts is None else drafts.max_drafts.stride(0),
        n,
        HAS_DRAFTS=drafts is not None,
        HAS_PARENTS=parents is not None,
        MAX_PATH=results.shape[1] - 2,
        BLOCK=block,
        MAX_STOP_IDS=max_stop_ids,
        BLOCK_STOP_IDS=next_power_of_2(max_stop_ids),
        PAD_ROW=PAD_ROW,
        RUNNING=int(FinishCode.RUNNING),
        STOP_TOKEN=int(FinishCode.STOP_TOKEN),
        LENGTH=int(FinishCode.LENGTH),
        NON_FINITE=int(FinishCode.NON_FINITE),
        CODES=_CODES,
        num_warps=1 if block <= _ONE_WARP else 4,
        **overlap_options(results.device, _commit_kernel),
    )
