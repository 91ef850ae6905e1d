"""Launches within `compile_only`, and what a program run for its kernels alone may do meanwhile."""

from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from paceline.kernels._triton.launch import compile_only, launch
from paceline.kernels.compile_ahead import _Zeroed


class Kernel(JITFunction):  # type: ignore[type-arg]
    """Notes how it is called; stands for a kernel that a device would run."""

    def __init__(self) -> None:
        self.launched: list[Any] = []
        self.compiled: list[Any] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **options: self.launched.append((grid, args, options))

    def warmup(self, *args: Any, grid: Any, **options: Any) -> None:
        self.compiled.append((grid, args, options))

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


def tiles(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """What a kernel is given to read x in tiles of so many rows."""
    return TensorDescriptor.from_tensor(x, [rows, 8])


def test_a_launch_within_the_block_is_compiled_and_not_started() -> None:
    kernel = Kernel()
    with compile_only():
        launch(kernel, (3,), 7, BLOCK=16)
    assert (kernel.launched, kernel.compiled) == ([], [((3,), (7,), {"BLOCK": 16})])
    launch(kernel, (3,), 7, BLOCK=16)
    assert kernel.launched == [((3,), (7,), {"BLOCK": 16})]
    assert len(kernel.compiled) == 1


def test_the_block_ends_where_it_raises() -> None:
    kernel = Kernel()
    with pytest.raises(KeyError), compile_only():
        raise KeyError
    launch(kernel, (1,))
    assert kernel.launched


@pytest.mark.parametrize(
    ("first", "second", "times"),
    [
        ((torch.zeros(8), 4), (torch.ones(16), 4), 1),  # layers differ in addresses
        ((torch.zeros(8), 4), (torch.zeros(8).half(), 4), 2),
        ((torch.zeros(8), 4), (torch.zeros(8)[1:], 4), 2),  # alignment
        ((torch.zeros(8), 4), (torch.zeros(8), 5), 2),
        ((torch.zeros(8), 4), (None, 4), 2),
        ((torch.zeros(8), 4), (torch.zeros(8), 4), 1),
        ((tiles(torch.zeros(8, 8), 4),), (tiles(torch.ones(16, 8), 4),), 1),
        ((tiles(torch.zeros(8, 8), 4),), (tiles(torch.zeros(8, 8), 8),), 2),
        ((tiles(torch.zeros(8, 8), 4),), (tiles(torch.zeros(8, 8).half(), 4),), 2),
    ],
)
def test_alike_launches_are_compiled_once(first: Any, second: Any, times: int) -> None:
    kernel = Kernel()
    with compile_only():
        launch(kernel, (1,), *first, BLOCK=16)
        launch(kernel, (2,), *second, BLOCK=16)
    assert len(kernel.compiled) == times
    with compile_only():  # of another block nothing is known
        launch(kernel, (1,), *first, BLOCK=16)
        launch(kernel, (1,), *first, BLOCK=32)
    assert len(kernel.compiled) == times + 2


def test_what_no_kernel_wrote_is_zero() -> None:
    with _Zeroed():
        made = [
            torch.empty(64, dtype=torch.int64),
            torch.empty_like(torch.ones(64)),
            torch.ones(64).new_empty(64),
            torch.empty_strided((8, 8), (8, 1)),
        ]
        kept = torch.ones(3) + 1
    assert not any(tensor.any() for tensor in made)
    assert kept.tolist() == [2.0] * 3
