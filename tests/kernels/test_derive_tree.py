"""derive_tree: ancestors and depths, walked by hand, and the kernel against the definition."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from paceline.core.errors import KernelArgumentError
from paceline.kernels._triton.derive_tree import launch_derive_tree
from paceline.kernels.derive_tree import derive_tree, derive_tree_reference

PREFIX = (7, 0, 30)
TREES = {
    "one row": [(-1,), (-1,), (-1,)],
    "a chain, a star, roots alone": [(-1, 0, 1, 2), (-1, 0, 0, 0), (-1, -1, -1, -1)],
    "branches": [(-1, 0, 0, 1, 1, 4), (-1, -1, 1, 2, 0, 4), (-1, 0, 1, 2, 3, 0)],
    "deep": [tuple(range(-1, 16)), (-1, *range(16)), (-1, 0, *range(15))],
}


def walked(parents: tuple[int, ...]) -> tuple[list[list[bool]], list[int]]:
    """(mask, depth of each row)."""
    mask, depths = [], []
    for row in range(len(parents)):
        path = [row]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        mask.append([column in path for column in range(len(parents))])
        depths.append(len(path) - 1)
    return mask, depths


def make(trees: list[tuple[int, ...]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = len(trees[0])
    parents = torch.tensor(trees, dtype=torch.int32).view(-1)
    positions = torch.full((len(trees) * rows,), -5)
    mask = torch.ones(len(trees) * rows, rows, dtype=torch.bool)
    return parents, torch.tensor(PREFIX, dtype=torch.int32), positions, mask


def fill_view(parents: Tensor, prefix: Tensor, positions: Tensor, *, tree_mask: Tensor) -> None:
    """As of a step whose view has these tensors."""
    view = SimpleNamespace(prefix_lens=prefix, positions=positions, tree_mask=tree_mask)
    derive_tree(parents, view)  # type: ignore[arg-type]


@pytest.mark.parametrize("fill", [fill_view, derive_tree_reference, launch_derive_tree])
@pytest.mark.parametrize("name", TREES)
def test_a_row_sees_itself_and_its_ancestors_and_stands_at_its_depth(
    name: str, fill: Callable[..., None]
) -> None:
    trees = TREES[name]
    parents, prefix, positions, mask = make(trees)
    fill(parents, prefix, positions, tree_mask=mask)
    wanted = [walked(tree) for tree in trees]
    assert mask.tolist() == [row for found, _ in wanted for row in found]
    depths = [depth for _, found in wanted for depth in found]
    prefixes = [before for before in PREFIX for _ in trees[0]]
    assert positions.tolist() == [a + b for a, b in zip(prefixes, depths, strict=True)]


def test_the_kernel_writes_nothing_behind_its_mask() -> None:
    parents, prefix, positions, mask = make([(-1, 0, 0)] * len(PREFIX))
    room = torch.ones(mask.numel() + 5, dtype=torch.bool)
    launch_derive_tree(parents, prefix, positions, tree_mask=room[:-5].view_as(mask))
    assert room[-5:].all()


@pytest.mark.parametrize("broken", [0, 2, 3])
def test_tensors_of_another_shape_are_refused_by_name(broken: int) -> None:
    tensors = list(make(TREES["branches"]))
    tensors[broken] = tensors[broken][:-1]
    name = ("parents", "prefix_lens", "positions", "tree_mask")[broken]
    with pytest.raises(KernelArgumentError, match=rf"{name} must be contiguous .*; every request"):
        fill_view(*tensors[:3], tree_mask=tensors[3])
