"""Triton kernel of derive_tree; see kernels/derive_tree.py for the definition."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.runtime import next_power_of_2


@triton.jit
def ancestors(
    parents_ptr,  # [rows] int32, of one request: an earlier row, or -1, as of row 0
    nodes,  # [nodes] int32 rows of the request; -1: none
    columns,  # [BLOCK] int32
    rows,
):
    """Walk every node up to the prefix.

    Returns is_seen [nodes, BLOCK]: the column is the node or was passed; depths [nodes] int32.
    """
    is_seen = nodes[:, None] == columns[None, :]
    depths = tl.zeros_like(nodes)
    generation = 1
    while (generation < rows) & (tl.max(nodes, axis=0) > 0):
        nodes = tl.load(parents_ptr + nodes, mask=nodes >= 0, other=-1)
        is_seen = is_seen | (nodes[:, None] == columns[None, :])
        depths += tl.where(nodes >= 0, 1, 0)
        generation += 1
    return is_seen, depths


@triton.jit
def _derive_tree_kernel(
    parents_ptr,  # [reqs * rows] int32
    prefix_lens_ptr,  # [reqs] int32
    positions_ptr,  # [reqs * rows] int64
    tree_mask_ptr,  # [reqs * rows, rows] uint8
    rows,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """One node: the walk of a whole request would be as long, in fewer programs."""
    wait_for_inputs(OVERLAPPED)
    let_next_start(OVERLAPPED)
    req = tl.program_id(0) // rows
    columns = tl.arange(0, BLOCK)
    nodes = tl.arange(0, 1) + tl.program_id(0) % rows
    is_seen, depths = ancestors(parents_ptr + req * rows, nodes, columns, rows)
    tokens = (req * rows + nodes).to(tl.int64)
    mask_ptrs = tree_mask_ptr + tokens[:, None] * rows + columns[None, :]
    tl.store(mask_ptrs, is_seen.to(tl.uint8), mask=columns[None, :] < rows)
    tl.store(positions_ptr + tokens, (tl.load(prefix_lens_ptr + req) + depths).to(tl.int64))


def launch_derive_tree(
    parents: Tensor, prefix_lens: Tensor, positions: Tensor, *, tree_mask: Tensor
) -> None:
    """One program per node."""
    rows = tree_mask.shape[1]
    launch(
        _derive_tree_kernel,
        (parents.shape[0],),
        parents,
        prefix_lens,
        positions,
        tree_mask.view(torch.uint8),
        rows,
        BLOCK=next_power_of_2(rows),
        num_warps=1,
        **overlap_options(parents.device, _derive_tree_kernel),
    )
