"""Triton kernel of compact_kv; see kernels/compact_kv.py for the definition."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.runtime import cdiv, next_power_of_2, widest_integers

_BLOCK_COLUMNS = 256  # numbers of a slot that one program moves


@triton.jit
def _move_columns(
    pool_ptr,  # [layers, slots, width] of any integers
    from_slots,  # [BLOCK_PATH] int64
    to_slots,  # [BLOCK_PATH] int64
    moves,  # [BLOCK_PATH] bool
    chunk,
    slots,
    width,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Some columns of one layer, for the whole path of a request."""
    layer_ptr = pool_ptr + tl.program_id(1).to(tl.int64) * slots * width
    columns = chunk * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    mask = moves[:, None] & (columns < width)[None, :]
    values = tl.load(layer_ptr + from_slots[:, None] * width + columns[None, :], mask=mask)
    tl.debug_barrier()  # one row's place is another's source: all are read before one is written
    tl.store(layer_ptr + to_slots[:, None] * width + columns[None, :], values, mask=mask)


@triton.jit
def _compact_kv_kernel(
    a_ptr,  # [layers, slots, width_a] of any integers
    b_ptr,  # the same of another pool, with width_b; used when HAS_B
    loc_ptr,  # [padded_reqs, n] int64
    path_ptr,  # [padded_reqs, max_path] int64
    slots,
    width_a,
    width_b,
    n,
    max_path,
    HAS_B: tl.constexpr,
    BLOCK_PATH: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    let_next_start(OVERLAPPED)
    req = tl.program_id(0)
    steps = 1 + tl.arange(0, BLOCK_PATH)
    is_step = steps < max_path
    nodes = tl.load(path_ptr + req * max_path + steps, mask=is_step, other=0)
    moves = is_step & (nodes != steps)
    from_slots = tl.load(loc_ptr + req * n + nodes, mask=moves, other=0)
    to_slots = tl.load(loc_ptr + req * n + steps, mask=moves, other=0)
    chunk = tl.program_id(2)
    if HAS_B:
        if chunk % 2 == 0:
            _move_columns(
                a_ptr, from_slots, to_slots, moves, chunk // 2, slots, width_a, BLOCK_COLUMNS
            )
        else:
            _move_columns(
                b_ptr, from_slots, to_slots, moves, chunk // 2, slots, width_b, BLOCK_COLUMNS
            )
    else:
        _move_columns(a_ptr, from_slots, to_slots, moves, chunk, slots, width_a, BLOCK_COLUMNS)


def launch_compact_kv(pools: Sequence[Tensor], loc: Tensor, path: Tensor) -> None:
    """One program per request, layer, pool and block of columns; one launch per two pools."""
    max_path = path.shape[1]
    views = [widest_integers(pool.flatten(1, 2)) for pool in pools]
    for first in range(0, len(views), 2):
        pair = views[first : first + 2]
        a, b = pair[0], pair[-1]
        chunks = cdiv(max(a.shape[2], b.shape[2]), _BLOCK_COLUMNS) * len(pair)
        launch(
            _compact_kv_kernel,
            (loc.shape[0], a.shape[0], chunks),
            a,
            b,
            loc,
            path,
            a.shape[1],
            a.shape[2],
            b.shape[2],
            loc.shape[1],
            max_path,
            HAS_B=len(pair) == 2,
            BLOCK_PATH=next_power_of_2(max(max_path - 1, 1)),
            BLOCK_COLUMNS=_BLOCK_COLUMNS,
            num_warps=4,
            **overlap_options(loc.device, _compact_kv_kernel),
        )
