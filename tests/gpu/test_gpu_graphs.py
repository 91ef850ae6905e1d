"""CUDA graphs keep the contract that tests/runner shows of recorded graphs."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from refused_cases import METHODS, OPERATORS, REMEDY

from paceline.core.errors import HostReadError
from paceline.runner.recording.graphs import CudaGraphFactory, Graph
from paceline.runner.streams import CudaStream

# Warnings of drivers, and torch's about graphs that were refused half-way, fail nothing.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

# Those whose text does not name the device.
REFUSED_OPERATORS = (
    "mask index",
    "masked_select",
    "nonzero",
    "repeat_interleave by tensor",
    "equal",
    "tensor of a list",
    "rand_like",
    "in-place noise",
)


def captured(function: Callable[[], Any]) -> tuple[Graph, CudaStream]:
    """A graph of `function`, and the stream it was captured on."""
    device = torch.device("cuda")
    stream, graph = CudaStream(device), CudaGraphFactory().make(checked=True)
    stream.run(lambda: graph.capture(function))
    return graph, stream


def refused(function: Callable[[torch.Tensor], Any]) -> str:
    y = torch.zeros(4, device="cuda")
    with pytest.raises(HostReadError) as caught:
        captured(lambda: function(y))
    assert y.tolist() == [0.0] * 4  # nothing ran, and nothing is switched on any more
    return str(caught.value)


@pytest.mark.parametrize("method", METHODS)
def test_a_method_that_reads_on_the_host_is_refused_by_name(method: str) -> None:
    assert refused(METHODS[method]) == (
        f"a recorded region must be device-only with static shapes, got 'Tensor.{method}' "
        f"(reads a device value on the host); {REMEDY}"
    )


@pytest.mark.parametrize("case", REFUSED_OPERATORS)
def test_an_operator_no_graph_can_hold_is_refused_by_name(case: str) -> None:
    function, name, why = OPERATORS[case]
    text = refused(function)
    assert f"must be device-only with static shapes, got '{name}" in text
    assert why in text


def test_a_replay_follows_device_data_and_runs_no_python() -> None:
    x, out = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
    factor, calls = [2.0], []

    def run() -> None:
        calls.append(1)
        out.copy_(x * factor[0])

    graph, stream = captured(run)
    assert out.tolist() == [0.0] * 4  # capture does not execute
    factor[0] = 100.0
    x.fill_(5.0)
    torch.cuda.synchronize()
    stream.run(graph.replay)
    stream.synchronize()
    assert out.tolist() == [10.0] * 4
    assert len(calls) == 1


def test_garbage_that_owns_graphs_is_left_alone_during_a_capture() -> None:
    x = torch.zeros(4, device="cuda")
    garbage: list[object] = [captured(lambda: x.add_(1))[0]]
    garbage.append(garbage)
    del garbage
    threshold = gc.get_threshold()
    gc.set_threshold(1)  # almost every allocation collects
    try:
        graph, stream = captured(lambda: [x.add_(1) for _ in range(100)])
    finally:
        gc.set_threshold(*threshold)
    stream.run(graph.replay)
    stream.synchronize()
    assert x.tolist() == [100.0] * 4
