"""Triton kernel of chain_rows; see kernels/chain_rows.py for the definition."""

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.runtime import cdiv
from paceline.kernels.chain_rows import ChainRows, StepRows

_BLOCK = 128  # tokens of a program


@triton.jit
def _chain_rows_kernel(
    history_ptr,  # [table rows, max_tokens] int32
    kv_committed_ptr,  # [table rows] int32
    row_ids_ptr,  # [padded_reqs] int64
    req_ids_ptr,  # [padded_tokens] int64
    positions_ptr,  # [padded_tokens] int64
    path_ptr,  # [padded_reqs, max_path] int64, used when HAS_PATH
    next_ids_ptr,  # [padded_tokens] int64
    tap_rows_ptr,  # [padded_tokens] int64, used when HAS_PATH
    stride_kv_committed,
    max_tokens,
    num_tokens,
    rows,  # of a request, used when HAS_PATH
    max_path,
    HAS_PATH: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    let_next_start(OVERLAPPED)
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = tokens < num_tokens
    req_ids = tl.load(req_ids_ptr + tokens, mask=mask, other=0)
    row_ids = tl.load(row_ids_ptr + req_ids, mask=mask, other=0)
    behind = tl.load(positions_ptr + tokens, mask=mask, other=0) + 1
    newest = tl.load(kv_committed_ptr + row_ids * stride_kv_committed, mask=mask, other=0)
    places = row_ids * max_tokens + tl.minimum(behind, newest.to(tl.int64))
    ids = tl.load(history_ptr + places, mask=mask, other=0)
    tl.store(next_ids_ptr + tokens, ids.to(tl.int64), mask=mask)
    if HAS_PATH:
        own = tokens % rows
        path_ptrs = path_ptr + tokens // rows * max_path + own
        node = tl.load(path_ptrs, mask=mask & (own < max_path), other=0)
        node = tl.where(own < max_path, node, own)
        tl.store(tap_rows_ptr + tokens, tokens - own + node, mask=mask)


def launch_chain_rows(
    history: Tensor, kv_committed: Tensor, rows: StepRows, out: ChainRows, *, path: Tensor | None
) -> None:
    """One program per block of tokens."""
    num_tokens = rows.positions.shape[0]
    stand_in = rows.row_ids  # of a step without a path: never read
    reqs, max_path = (1, 1) if path is None else path.shape
    launch(
        _chain_rows_kernel,
        (cdiv(num_tokens, _BLOCK),),
        history,
        kv_committed,
        *rows,
        stand_in if path is None else path,
        out.next_ids,
        stand_in if out.tap_rows is None else out.tap_rows,
        kv_committed.stride(0),
        history.shape[1],
        num_tokens,
        num_tokens // reqs,
        max_path,
        HAS_PATH=path is not None,
        BLOCK=_BLOCK,
        num_warps=4,
        **overlap_options(history.device, _chain_rows_kernel),
    )
