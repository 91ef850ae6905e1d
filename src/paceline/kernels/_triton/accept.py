"""Triton kernel of accept_and_commit; see kernels/accept.py for the definition."""

import torch
import triton
import triton.language as tl

from paceline.core.padding import PAD_ROW
from paceline.core.step import FinishCode
from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels.accept import FORCED_BITS, FORCED_SPREAD, Accepted, Drafts
from paceline.kernels.commit import CommittedRows, EndRules

_CODES = len(FinishCode)  # a row of the tree is packed as next row * _CODES + code
_ONE_WARP = 32  # rows of a tree whose square one warp holds in registers


@triton.jit
def _forced_drafts(
    prefix,
    row,  # int64
    forced_length,
    BITS: tl.constexpr,
    SPREAD: tl.constexpr,
):
    """Drafts to accept, such that forced_length / 2**BITS tokens are emitted on average."""
    phase = (row * SPREAD) & ((1 << BITS) - 1)
    ends_before = (((prefix.to(tl.int64) + 1) << BITS) - phase - 1) // forced_length
    reach = ends_before * forced_length + phase
    return (((reach + forced_length) >> BITS) - (reach >> BITS) - 1).to(tl.int32)


@triton.jit
def _above(
    parents_ptr,  # [n] int32, of one request; used when HAS_PARENTS
    nodes,
    HAS_PARENTS: tl.constexpr,
):
    """Parents; the root and what hangs nowhere stay."""
    above = nodes - 1
    if HAS_PARENTS:
        above = tl.load(parents_ptr + tl.maximum(nodes, 0))
    return tl.where(nodes > 0, above, nodes)


@triton.jit
def _forced_rows(
    parents_ptr,  # [n] int32, of one request; used when HAS_PARENTS
    columns,  # [BLOCK] int32
    is_row,  # [BLOCK] bool
    wanted,
    MAX_PATH: tl.constexpr,
    HAS_PARENTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """[BLOCK] bool: the way to the first of the rows that are `wanted` deep, or deepest."""
    nodes = tl.where(is_row, columns, -1)
    depths = tl.zeros([BLOCK], dtype=tl.int32)
    for _ in range(MAX_PATH - 1):
        depths += tl.where(nodes > 0, 1, 0)
        nodes = _above(parents_ptr, nodes, HAS_PARENTS)
    depths = tl.where(nodes == 0, depths, -1)  # not below the root, or too deep
    depth = tl.minimum(wanted, tl.max(depths, axis=0))
    leaf = tl.min(tl.where(depths == depth, columns, BLOCK), axis=0)
    is_on_way = columns == leaf
    for _ in range(MAX_PATH - 1):
        leaf = _above(parents_ptr, leaf, HAS_PARENTS)
        is_on_way = is_on_way | (columns == leaf)
    return is_on_way


@triton.jit
def _accept_kernel(
    kv_committed_ptr,  # [rows] int32
    finish_ptr,  # [rows] int32
    history_ptr,  # [rows, max_tokens] int32
    stop_ids_ptr,  # [rows, max_stop_ids] int64
    max_len_ptr,  # [rows] int64
    row_ids_ptr,  # [padded_reqs] int64
    prefix_lens_ptr,  # [padded_reqs] int32
    tokens_ptr,  # [padded_reqs, n] int64
    parents_ptr,  # [padded_reqs, n] int32, used when HAS_PARENTS
    sampled_ptr,  # [padded_reqs, n] int64
    finite_ptr,  # [padded_reqs, n] uint8
    max_drafts_ptr,  # [rows] int64
    path_ptr,  # [padded_reqs, MAX_PATH] int64
    last_ptr,  # [padded_reqs] int64
    results_ptr,  # [padded_reqs, 2 + MAX_PATH] int32
    stride_kv_committed,
    stride_finish,
    stride_history_row,
    stride_stop_ids_row,
    stride_max_len,
    stride_max_drafts,
    n,
    forced_length,  # used when IS_FORCED
    HAS_PARENTS: tl.constexpr,
    IS_FORCED: tl.constexpr,
    FORCED_BITS: tl.constexpr,
    FORCED_SPREAD: tl.constexpr,
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
    """One request: where each row of its tree goes on to and what ends there, then the walk."""
    wait_for_inputs(OVERLAPPED)
    let_next_start(OVERLAPPED)
    req = tl.program_id(0)
    row = tl.load(row_ids_ptr + req)
    prefix = tl.load(prefix_lens_ptr + req)
    max_len = tl.load(max_len_ptr + row * stride_max_len)
    most = tl.load(max_drafts_ptr + row * stride_max_drafts)
    columns = tl.arange(0, BLOCK)
    is_row = columns < n
    first = req * n
    tokens = tl.load(tokens_ptr + first + columns, mask=is_row, other=0)
    said = tl.load(sampled_ptr + first + columns, mask=is_row, other=0)
    is_finite = tl.load(finite_ptr + first + columns, mask=is_row, other=1) != 0
    parents = tl.where(is_row, columns - 1, -1)
    if HAS_PARENTS:
        parents = tl.load(parents_ptr + first + columns, mask=is_row, other=-1)

    fits = parents[None, :] == columns[:, None]  # [parent, child]
    if IS_FORCED:
        drafts = _forced_drafts(prefix, row, forced_length, FORCED_BITS, FORCED_SPREAD)
        wanted = tl.minimum(drafts, most).to(tl.int32)
        tree_ptr = parents_ptr + first
        is_on_way = _forced_rows(tree_ptr, columns, is_row, wanted, MAX_PATH, HAS_PARENTS, BLOCK)
        fits = fits & is_on_way[None, :]
        drafted = tl.sum(tl.where(fits, tokens[None, :], 0), axis=1)
        said = tl.where(tl.max(fits.to(tl.int32), axis=1) != 0, drafted, said)
    else:
        fits = fits & (tokens[None, :] == said[:, None])
    next_rows = tl.min(tl.where(fits, columns[None, :], BLOCK), axis=1)  # BLOCK: there is none

    stops = tl.arange(0, BLOCK_STOP_IDS)
    stop_ptrs = stop_ids_ptr + row * stride_stop_ids_row + stops
    stop_ids = tl.load(stop_ptrs, mask=stops < MAX_STOP_IDS, other=-1)
    is_stop = tl.max((said[:, None] == stop_ids[None, :]).to(tl.int32), axis=1) != 0
    codes = tl.where(is_finite, tl.where(is_stop, STOP_TOKEN, RUNNING), NON_FINITE)
    packed = next_rows * CODES + codes

    node = 0
    goes_on = row != PAD_ROW
    finish = RUNNING
    num_emitted = 0
    for step in tl.static_range(MAX_PATH):
        here = tl.sum(tl.where(columns == node, packed, 0), axis=0)
        token = tl.sum(tl.where(columns == node, said, 0), axis=0).to(tl.int32)
        code = here % CODES
        at_limit = prefix + 2 + step >= max_len
        code = tl.where((code == RUNNING) & at_limit, LENGTH, code)
        emits = goes_on & (code != NON_FINITE)
        own_or_node = tl.where(emits, node, step)
        tl.store(path_ptr + req * MAX_PATH + step, own_or_node.to(tl.int64))
        tl.store(results_ptr + req * (2 + MAX_PATH) + 2 + step, tl.where(emits, token, 0))
        history_row_ptr = history_ptr + row * stride_history_row
        tl.store(history_row_ptr + prefix + 1 + step, token, mask=emits)
        finish = tl.where(goes_on, code, finish)
        num_emitted += emits.to(tl.int32)
        node = here // CODES
        goes_on = goes_on & (code == RUNNING) & (node < BLOCK) & (step < most)

    is_live = row != PAD_ROW
    tl.store(kv_committed_ptr + row * stride_kv_committed, prefix + num_emitted, mask=is_live)
    tl.store(finish_ptr + row * stride_finish, finish, mask=is_live)
    tl.store(last_ptr + req, (first + tl.maximum(num_emitted - 1, 0)).to(tl.int64))
    tl.store(results_ptr + req * (2 + MAX_PATH), num_emitted)
    tl.store(results_ptr + req * (2 + MAX_PATH) + 1, finish)


def launch_accept(
    rows: CommittedRows,
    ends: EndRules,
    drafts: Drafts,
    out: Accepted,
    *,
    forced: float | None,
) -> None:
    """One program per request."""
    (reqs, n), max_stop_ids = drafts.tokens.shape, ends.stop_ids.shape[1]
    block = triton.next_power_of_2(n)
    launch(
        _accept_kernel,
        (reqs,),
        *rows,
        *ends,
        *drafts._replace(
            parents=drafts.prefix_lens if drafts.parents is None else drafts.parents,
            finite=drafts.finite.view(torch.uint8),
        ),
        *out,
        *(column.stride(0) for column in (*rows, *ends, drafts.max_drafts)),
        n,
        0 if forced is None else round(forced * 2**FORCED_BITS),
        HAS_PARENTS=drafts.parents is not None,
        IS_FORCED=forced is not None,
        FORCED_BITS=FORCED_BITS,
        FORCED_SPREAD=FORCED_SPREAD,
        MAX_PATH=out.path.shape[1],
        BLOCK=block,
        MAX_STOP_IDS=max_stop_ids,
        BLOCK_STOP_IDS=triton.next_power_of_2(max_stop_ids),
        PAD_ROW=PAD_ROW,
        RUNNING=int(FinishCode.RUNNING),
        STOP_TOKEN=int(FinishCode.STOP_TOKEN),
        LENGTH=int(FinishCode.LENGTH),
        NON_FINITE=int(FinishCode.NON_FINITE),
        CODES=_CODES,
        num_warps=1 if block <= _ONE_WARP else 4,
        **overlap_options(out.results.device, _accept_kernel),
    )
