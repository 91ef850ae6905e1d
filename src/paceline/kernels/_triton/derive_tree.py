"""Triton kernel of derive_tree; see kernels/derive_tree.py for the definition."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs


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
    """One node: walk up to the prefix and note who was passed."""
    wait_for_inputs(OVERLAPPED)
    let_next_start(OVERLAPPED)
    token = tl.program_id(0)
    req = token // rows
    columns = tl.arange(0, BLOCK)
    node = token % rows
    is_seen = columns == node
    depth = 0
    for _ in range(rows - 1):
        above = tl.load(parents_ptr + req * rows + tl.maximum(node, 0))
        node = tl.where(node < 0, -1, above)
        is_seen = is_seen | (columns == node)
        depth += tl.where(node < 0, 0, 1)
    mask_ptrs = tree_mask_ptr + token.to(tl.int64) * rows + columns
    tl.store(mask_ptrs, is_seen.to(tl.uint8), mask=columns < rows)
    position = tl.load(prefix_lens_ptr + req) + depth
    tl.store(positions_ptr + token, position.to(tl.int64))


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
        BLOCK=triton.next_power_of_2(rows),
        num_warps=1,
        **overlap_options(parents.device, _derive_tree_kernel),
    )
