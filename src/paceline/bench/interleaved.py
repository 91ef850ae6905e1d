"""Times functions side by side, so that what the machine does meanwhile meets all of them."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

ROUNDS = 9
LEAST_S = 0.01  # of one sample on a GPU
MOST_REPLAYS = 1000
Run = Callable[[int], object]  # of a layer's index


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of one call, over the samples of all rounds."""

    median_s: float
    spread: float  # (slowest - fastest) / median


def time_interleaved(
    runs: Mapping[str, Run], *, layers: int, device: torch.device
) -> dict[str, Timing]:
    """Time each of `runs` over all layers, in rounds A, B, B, A, A, B, ...

    On CUDA each is captured as one graph of `layers` calls and replayed for about LEAST_S.
    """
    prepare = _graph_sampler if device.type == "cuda" else _loop_sampler
    samplers = {name: prepare(run, layers) for name, run in runs.items()}
    samples: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs)
    for _ in range(ROUNDS):
        for name in order:
            samples[name].append(samplers[name]() / layers)
        order.reverse()
    return {name: _timing(found) for name, found in samples.items()}


def _timing(samples: list[float]) -> Timing:
    median = statistics.median(samples)
    return Timing(median_s=median, spread=(max(samples) - min(samples)) / median)


def _loop_sampler(run: Run, layers: int) -> Callable[[], float]:
    """Seconds of one pass over all layers, on the CPU."""

    def sample() -> float:
        began = time.perf_counter()
        for layer in range(layers):
            run(layer)
        return time.perf_counter() - began

    sample()
    return sample


def _graph_sampler(run: Run, layers: int) -> Callable[[], float]:
    """Seconds of one replay of a graph over all layers."""
    for layer in range(layers):
        run(layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            run(layer)

    def replayed(times: int) -> float:
        start: Any = torch.cuda.Event(enable_timing=True)
        end: Any = torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(times):
            graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / times

    replays = max(1, min(MOST_REPLAYS, int(LEAST_S / max(replayed(3), 1e-6))))
    return lambda: replayed(replays)
