"""How the splits of an attention kernel find each other: the last to finish merges them all.

Partial results lie in one row per query, split and head.  A counter per group of splits says how
many have finished; it is 0 between launches, so that nothing is reset from outside and a graph can
be replayed.  The merge runs over the splits in their order, whoever does it.

Where rows are wide, one program is too slow to merge them: `launch_merge` has one or several for
each row, in a launch of its own, and a split without keys says so by its log-sum-exp.
"""

import triton
import triton.language as tl

from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.primitives import apply_sinks, softmax_finish
from paceline.kernels._triton.runtime import block_dim, cdiv, next_power_of_2
from paceline.kernels.paged_attention.call import PagedCall
from paceline.kernels.paged_attention.splits import SplitWorkspace

_FEW_ROWS = 32  # so few leave processors idle, unless several share a row
_FEW_COLUMNS = 32  # of one of them
_FEW_SPLITS = 16  # are read with their sums, whoever has keys
_MANY_ROWS_SPLITS = 8  # of a whole row, at a time


@triton.jit
def store_partial(
    out,  # [rows, BLOCK_DIM_V] float32
    lse,  # [rows] float32, log2 units
    partial_out_ptr,  # [partial rows, v_head_dim] float32
    partial_lse_ptr,  # [partial rows] float32, log2 units
    partial_row,  # [rows] int64
    live,  # [rows] bool
    DIM_V: tl.constexpr,
    BLOCK_DIM_V: tl.constexpr,
):
    """One split's result."""
    store_partial_columns(out, partial_out_ptr, partial_row, live, 0, DIM_V, BLOCK_DIM_V)
    tl.store(partial_lse_ptr + partial_row, lse, mask=live)


@triton.jit
def store_partial_columns(
    out,  # [rows, BLOCK_COLS] float32
    partial_out_ptr,  # [partial rows, v_head_dim] float32
    partial_row,  # [rows] int64
    live,  # [rows] bool
    FIRST: tl.constexpr,  # column of `out`
    DIM_V: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Some columns of one split's result, without its log-sum-exp."""
    cols = FIRST + tl.arange(0, BLOCK_COLS)
    tl.store(
        partial_out_ptr + partial_row[:, None] * DIM_V + cols[None, :],
        out,
        mask=live[:, None] & (cols < DIM_V)[None, :],
    )


@triton.jit
def finishes_last(
    count_ptr,  # [] int32 splits that have finished
    live_splits,
):
    """Count this split as finished, behind its stores; whether all others had."""
    # Every warp's partial result is stored before one of them counts.
    tl.debug_barrier()
    is_last = tl.atomic_add(count_ptr, 1, sem="acq_rel") == live_splits - 1
    if is_last:
        tl.store(count_ptr, 0)
    return is_last


@triton.jit
def merge_splits(
    partial_out_ptr,  # [partial rows, v_head_dim] float32
    partial_lse_ptr,  # [partial rows] float32, log2 units
    first_row,  # [rows] int64 partial row of split 0
    stride_split,  # partial rows from one split to the next
    live_splits,
    live,  # [rows] bool
    DIM_V: tl.constexpr,
    BLOCK_DIM_V: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """(out, log2-sum-exp2) of all live splits: an online softmax over them."""
    running_max = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_ROWS], tl.float32)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_DIM_V], tl.float32)
    cols = tl.arange(0, BLOCK_DIM_V)
    # Splits are the middle dimension: Triton then gives the rows to warps, and each thread adds the
    # splits of its numbers.  As the first they would lie on different warps.
    for first in range(0, live_splits, BLOCK_SPLITS):
        split = first + tl.arange(0, BLOCK_SPLITS)
        row = first_row[:, None] + (split * stride_split)[None, :]
        wanted = live[:, None] & (split < live_splits)[None, :]
        lse = tl.load(partial_lse_ptr + row, mask=wanted, other=float("-inf"))
        partial = tl.load(
            partial_out_ptr + row[:, :, None] * DIM_V + cols[None, None, :],
            mask=wanted[:, :, None] & (cols < DIM_V)[None, None, :],
            other=0.0,
        )
        new_max = tl.maximum(running_max, tl.max(lse, axis=1))
        finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(lse - finite_max[:, None])
        decay = tl.exp2(running_max - finite_max)
        running_sum = running_sum * decay + tl.sum(weights, axis=1)
        acc = acc * decay[:, None] + tl.sum(partial * weights[:, :, None], axis=1)
        running_max = new_max
    return softmax_finish(running_max, running_sum, acc)


def splits_per_load(rows: int, block_dim_v: int, *, num_warps: int) -> int:
    """How many splits a merge reads at a time: 128 numbers for each thread."""
    return max(1, 4096 * num_warps // (rows * block_dim_v))


@triton.jit(do_not_specialize=["splits"])
def _merge_kernel(
    partial_out_ptr,  # [tokens * splits, heads, v_head_dim] float32
    partial_lse_ptr,  # [tokens * splits, heads] float32, log2 units; −inf: nothing to merge
    sinks_ptr,  # [heads] float32 or None
    out_ptr,  # [tokens, heads, v_head_dim]
    lse_ptr,  # [tokens, heads] float32
    stride_out_token,
    stride_out_head,
    heads,
    splits,
    DIM_V: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    AT_ONCE: tl.constexpr,  # BLOCK_SPLITS are all
    OVERLAPPED: tl.constexpr,
):
    """Some columns of one row: an online softmax over its splits."""
    let_next_start(OVERLAPPED)
    wait_for_inputs(OVERLAPPED)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    cols = tl.program_id(2) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    is_col = cols < DIM_V
    running_max = tl.full([1], float("-inf"), tl.float32)
    running_sum = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, BLOCK_COLUMNS], tl.float32)
    for first in range(0, splits, BLOCK_SPLITS):
        split = first + tl.arange(0, BLOCK_SPLITS)
        row = (token * splits + split) * heads + head
        lse = tl.load(partial_lse_ptr + row, mask=split < splits, other=float("-inf"))
        has_keys = (lse > float("-inf"))[:, None]
        # Few splits are read at once with their sums, whoever has keys.
        wanted = ((split < splits)[:, None] if AT_ONCE else has_keys) & is_col[None, :]
        partial = tl.load(
            partial_out_ptr + row[:, None] * DIM_V + cols[None, :], mask=wanted, other=0.0
        )
        partial = tl.where(has_keys, partial, 0.0)
        new_max = tl.maximum(running_max, tl.max(lse, axis=0))
        finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(lse - finite_max)
        decay = tl.exp2(running_max - finite_max)
        running_sum = running_sum * decay + tl.sum(weights, axis=0)
        acc = acc * decay[:, None] + tl.sum(partial * weights[:, None], axis=0)[None, :]
        running_max = new_max
    out, total = softmax_finish(running_max, running_sum, acc)
    one = tl.arange(0, 1)
    if sinks_ptr is not None:
        out = apply_sinks(out, total, sinks_ptr, head + one, one == 0)
    tl.store(
        out_ptr + token * stride_out_token + head * stride_out_head + cols[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=is_col[None, :],
    )
    is_first = one == tl.program_id(2)
    tl.store(lse_ptr + token * heads + head + one, total * 0.6931471805599453, mask=is_first)


def launch_merge(call: PagedCall, workspace: SplitWorkspace, *, splits: int) -> None:
    """Merge what the splits of every row left in the workspace into the outputs of `call`."""
    tokens, heads, v_head_dim = call.out.shape
    columns = _FEW_COLUMNS if tokens * heads <= _FEW_ROWS else block_dim(v_head_dim)
    at_once = next_power_of_2(splits)
    if columns > _FEW_COLUMNS:
        at_once = min(at_once, _MANY_ROWS_SPLITS)
    launch(
        _merge_kernel,
        (tokens, heads, cdiv(v_head_dim, columns)),
        workspace.partial_out,
        workspace.partial_lse,
        call.weighing.sinks,
        call.out,
        call.lse,
        *call.out.stride()[:2],
        heads,
        splits,
        DIM_V=v_head_dim,
        BLOCK_COLUMNS=columns,
        BLOCK_SPLITS=at_once,
        AT_ONCE=splits <= min(at_once, _FEW_SPLITS),
        num_warps=4,
        **overlap_options(call.q.device, _merge_kernel),
    )
