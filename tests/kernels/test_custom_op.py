"""define_op: what a recorder sees of our operators, and what a replay calls in their place."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from operators import Operators
from torch import Tensor

from paceline.kernels.custom_op import Run, bind_of, define_op, host_array
from paceline.runner.recording.arena import Arena
from paceline.runner.recording.recorded import RecordedGraph

ELSEWHERE = torch.library.Library("paceline_elsewhere", "FRAGMENT")  # define_op knows nothing of it
CALLS: list[float] = []  # the scale of each call of a kernel


def scale_into(x: Tensor, scale: float, out: Tensor) -> None:
    CALLS.append(scale)
    torch.mul(x, scale, out=out)


@pytest.fixture(autouse=True)
def fresh_calls() -> Iterator[None]:
    CALLS.clear()
    yield
    CALLS.clear()


@pytest.fixture(scope="module")
def foreign() -> Any:
    ELSEWHERE.define("scale(Tensor x, float scale, Tensor(a!) out) -> ()")
    ELSEWHERE.impl("scale", scale_into, "CPU")
    return torch.ops.paceline_elsewhere.scale.default


@pytest.fixture(scope="module")
def ours() -> Any:
    return define_op("scale_of_a_test(Tensor x, float scale, Tensor(a!) out) -> ()", cpu=scale_into)


def replay_of(operator: Any) -> tuple[list[str], list[float], Tensor]:
    """What one replay dispatched and called, after x has changed from 1 to 4; and the output."""
    x, out = torch.ones(3), torch.zeros(3)
    graph = RecordedGraph(poison=True)
    graph.capture(lambda: operator(x, 2.0, out))
    assert (CALLS, out.tolist()) == ([2.0], [2.0] * 3)
    CALLS.clear()
    x.fill_(4.0)
    with Operators() as seen:
        graph.replay()
    return seen.names, list(CALLS), out


def test_a_defined_operator_is_dispatched_under_its_name(ours: Any) -> None:
    x, out = torch.ones(3), torch.zeros(3)
    with Operators() as seen:
        ours(x, 2.0, out)
    assert seen.names == ["paceline::scale_of_a_test"]
    assert out.tolist() == [2.0] * 3
    assert ours is torch.ops.paceline.scale_of_a_test.default
    assert ours._schema.is_mutable


def test_a_replay_calls_the_cpu_kernel_without_the_dispatcher(ours: Any) -> None:
    assert bind_of(ours) is not None
    names, calls, out = replay_of(ours)
    assert names == ["aten::mul"]  # the kernel's own work, and no operator around it
    assert (calls, out.tolist()) == ([2.0], [8.0] * 3)


def test_a_bound_kernel_is_bound_by_each_call_and_once_by_a_graph() -> None:
    bound: list[Tensor] = []

    def bind(x: Tensor, scale: float, out: Tensor) -> Run:
        bound.append(x)
        return partial(scale_into, x, scale, out)

    operator = define_op("bound_of_a_test(Tensor x, float scale, Tensor(a!) out) -> ()", bind=bind)
    x, out = torch.ones(3), torch.zeros(3)
    operator(x, 2.0, out)
    operator(x, 3.0, out)
    assert (len(bound), CALLS, out.tolist()) == (2, [2.0, 3.0], [3.0] * 3)
    bound.clear()
    CALLS.clear()
    names, calls, out = replay_of(operator)
    assert names == ["aten::mul"]
    assert (calls, out.tolist()) == ([2.0], [8.0] * 3)
    assert len(bound) == 2, "once to execute the capture, once for its replays"


@pytest.mark.parametrize("first_of", [lambda x: x[0], lambda x: host_array(x)[0]])
def test_a_bound_kernel_reads_what_a_graph_moved(first_of: Callable[[Tensor], Any]) -> None:
    """Its views and addresses are those of the arena, as it is when a replay begins."""

    def bind(x: Tensor, out: Tensor) -> Run:
        first = first_of(x)
        return lambda: out.copy_(torch.as_tensor(first))

    name = f"first_of_a_test_{id(first_of)}"
    operator = define_op(f"{name}(Tensor x, Tensor(a!) out) -> ()", bind=bind)
    x, out, arena = torch.ones(2, 3), torch.zeros(3), Arena()
    graph = RecordedGraph(poison=True, arena=arena)
    graph.capture(lambda: operator(x * 2.0, out))
    for size in (1, 99, 999):
        RecordedGraph(poison=True, arena=arena).capture(
            lambda size=size: x.repeat(size, size).exp()
        )
        x.fill_(size)
        graph.replay()
        assert out.tolist() == [2.0 * size] * 3


def test_an_unknown_operator_replays_through_the_dispatcher(foreign: Any) -> None:
    assert bind_of(foreign) is None
    names, calls, out = replay_of(foreign)
    assert names == ["paceline_elsewhere::scale"]
    assert (calls, out.tolist()) == ([2.0], [8.0] * 3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(12).view(3, 4),
        lambda: torch.arange(12.0).view(3, 4)[:, 1:3],
        lambda: torch.arange(12).view(3, 4)[1],
        lambda: torch.tensor([True, False]),
        lambda: torch.empty(0, 4),
    ],
)
def test_an_array_over_a_tensor_is_its_memory_and_leaves_its_storage_resizable(make) -> None:
    x = make()
    array = host_array(x)
    assert array.tolist() == x.tolist()
    if x.numel():
        array[...] = 0
        assert not x.any()
    storage = x.untyped_storage()
    storage.resize_(storage.nbytes() + 64)  # raises behind Tensor.numpy
