"""derive_tree: the ancestors mask and the positions of a step whose rows form trees.

Every request brings as many rows; parents[row] is the row of the same request it hangs on, or -1.

Worked example: one request, prefix 7.

    parents    [-1, 0, 0, 1]             two children of the root, one of the first child
    tree_mask  1 . . .
               1 1 . .
               1 . 1 .
               1 1 . 1                   itself and its ancestors
    positions  [7, 8, 8, 9]              prefix + depth
"""

import torch
from torch import Tensor

from paceline.kernels._check import reject
from paceline.kernels.custom_op import define_op
from paceline.kernels.stand_in import device_type
from paceline.kernels.step_view import StepView


def derive_tree_reference(
    parents: Tensor, prefix_lens: Tensor, positions: Tensor, *, tree_mask: Tensor
) -> None:
    """The definition, and the CPU's path; mutation as `derive_tree`.

    parents: [reqs * rows] int32; prefix_lens: [reqs] int32; positions: [reqs * rows] int64;
    tree_mask: [reqs * rows, rows] bool.
    """
    reqs, rows = prefix_lens.shape[0], tree_mask.shape[1]
    columns = torch.arange(rows, dtype=torch.int32, device=parents.device)
    reach = (parents.view(reqs, rows, 1) == columns) | (columns == columns.unsqueeze(1))
    for _ in range((rows - 1).bit_length()):  # each product doubles the generations reached
        weights = reach.float()
        reach = torch.bmm(weights, weights) > 0
    tree_mask.view(reqs, rows, rows).copy_(reach)
    depths = reach.sum(2) - 1
    torch.add(depths, prefix_lens.unsqueeze(1), out=positions.view(reqs, rows))


def _derive_tree_cuda(
    parents: Tensor, prefix_lens: Tensor, positions: Tensor, tree_mask: Tensor
) -> None:
    from paceline.kernels._triton.derive_tree import launch_derive_tree

    launch_derive_tree(parents, prefix_lens, positions, tree_mask=tree_mask)


_DERIVE_TREE = define_op(
    "derive_tree(Tensor parents, Tensor prefix_lens, Tensor(a!) positions, Tensor(b!) tree_mask) "
    "-> ()",
    cpu=None,
    cuda=_derive_tree_cuda,
)


def derive_tree(parents: Tensor, view: StepView) -> None:
    """Fill `positions` and `tree_mask` of a tree step in place, from its prefix_lens.

    parents: [padded_tokens] int32, each -1 or an earlier row of the same request; trusted: it lives
    on the device.  view: of a step with a tree mask; its sizes are checked.  Graph-safe: shapes
    alone decide the grid.  Raises KernelArgumentError.
    """
    prefix_lens, positions, tree_mask = view.prefix_lens, view.positions, view.tree_mask
    assert tree_mask is not None, "a step of trees has a mask"
    reqs, rows = prefix_lens.shape[0], tree_mask.shape[1]
    wanted = (
        ("parents", parents, torch.int32, (reqs * rows,)),
        ("positions", positions, torch.int64, (reqs * rows,)),
        ("tree_mask", tree_mask, torch.bool, (reqs * rows, rows)),
    )
    for name, tensor, dtype, shape in wanted:
        if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
            reject(
                name,
                expected=f"contiguous {dtype} {list(shape)}",
                got=tensor,
                remedy="every request of a tree step brings as many rows; take the step's buffers",
            )
    if device_type(parents.device) == "cpu":
        derive_tree_reference(parents, prefix_lens, positions, tree_mask=tree_mask)
        return
    _DERIVE_TREE(parents, prefix_lens, positions, tree_mask)
