"""Graphs: keys, the two implementations behind one interface, and who decides what is captured."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from paceline.core.events import Event, Notify
from paceline.core.modes import ForwardMode
from paceline.core.sampling_params import SamplerTier
from paceline.runner.host_reads import refuse_host_reads
from paceline.runner.recorded import RecordedGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphKey:
    """Everything that is frozen into a graph.  Whatever is not here is device data or a bound."""

    phase: ForwardMode
    padded_reqs: int
    extend_len: int  # exact, uniform
    tree: tuple[int, ...] | None  # parent of each node; None: a chain
    backend: str
    sampler: SamplerTier
    logprobs: bool
    taps: tuple[str, ...]


class Graph(Protocol):
    """A captured function that replays on the same addresses."""

    def capture(self, function: Callable[[], None]) -> None: ...

    def replay(self) -> None: ...


class CudaGraph:
    """A CUDA graph.  All graphs of an engine share one memory pool, captured largest first."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, function: Callable[[], None]) -> None:
        """Record `function` without executing it.  Raises HostReadError, as RecordedGraph does."""
        with (
            torch.no_grad(),
            refuse_host_reads(lambda *_: None),
            torch.cuda.graph(self._graph, pool=self._pool, stream=torch.cuda.current_stream()),
        ):
            function()

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        self._graph.replay()


class GraphFactory(Protocol):
    """Makes graphs for a device and tells how many bytes they hold."""

    needs_warm_up: bool  # capture does not execute, so kernels must be compiled before

    def make(self) -> Graph: ...

    def bytes_held(self) -> int: ...


class CudaGraphFactory:
    """CUDA graphs over one pool."""

    needs_warm_up = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def make(self) -> Graph:
        return CudaGraph(self._pool)

    def bytes_held(self) -> int:
        """Device bytes the allocator holds; the pool's growth shows as its difference."""
        return torch.cuda.memory_reserved(self._device)


class RecordedGraphFactory:
    """Recorded graphs for the CPU."""

    needs_warm_up = False

    def __init__(self, *, poison: bool) -> None:
        self._poison = poison
        self._made: list[RecordedGraph] = []

    def make(self) -> Graph:
        graph = RecordedGraph(poison=self._poison)
        self._made.append(graph)
        return graph

    def bytes_held(self) -> int:
        """Bytes of the intermediates of all graphs made."""
        return sum(graph.intermediate_bytes() for graph in self._made)


# The reserve, as a multiple of the largest graph: recorded graphs share no memory between keys.
RESERVE_FACTOR = {"cpu": 32, "cuda": 4}


class GraphStore:
    """Owns the captured graphs of an engine and decides what is captured when.

    The largest key is captured at boot and sizes the reserve.  Any other key runs eagerly first and
    is captured on its second use; when the reserve is short it stays eager, with an event.
    """

    def __init__(self, factory: GraphFactory, *, reserve_factor: int, notify: Notify) -> None:
        self.factory = factory
        self._reserve_factor = reserve_factor
        self._notify = notify
        self._graphs: dict[GraphKey, list[Graph]] = {}
        self._uses: dict[GraphKey, int] = {}
        self._largest: tuple[int, int] | None = None  # padded requests, bytes
        self._bytes = 0

    @property
    def graphs(self) -> Mapping[GraphKey, list[Graph]]:
        """What is captured: one graph per segment group."""
        return self._graphs

    @property
    def bytes_used(self) -> int:
        return self._bytes

    @property
    def bytes_reserved(self) -> int:
        """What graphs may hold in all; 0 before the first capture."""
        return self._largest[1] * self._reserve_factor if self._largest is not None else 0

    def find(self, key: GraphKey) -> list[Graph] | None:
        """The captured graphs of a key."""
        return self._graphs.get(key)

    def wants(self, key: GraphKey) -> bool:
        """Count a use of a key that is not captured; True when it should be captured now."""
        self._uses[key] = self._uses.get(key, 0) + 1
        if self._uses[key] < 2:
            return False
        estimate = self._estimate(key)
        if self._bytes + estimate > self.bytes_reserved:
            self._notify(
                Event(
                    "graph_reserve_short",
                    f"{key.phase.value} x {key.padded_reqs} stays eager: needs about {estimate} "
                    f"bytes, {self.bytes_reserved - self._bytes} of {self.bytes_reserved} left",
                )
            )
            return False
        return True

    def capture(self, key: GraphKey, functions: list[Callable[[], None]]) -> list[Graph]:
        """Capture one graph per function and keep them.  The caller has padded the buffers."""
        before = self.factory.bytes_held()
        graphs = []
        for function in functions:
            graph = self.factory.make()
            graph.capture(function)
            graphs.append(graph)
        grown = self.factory.bytes_held() - before
        self._bytes += grown
        if self._largest is None:
            self._largest = (key.padded_reqs, max(grown, 1))
        self._graphs[key] = graphs
        return graphs

    def _estimate(self, key: GraphKey) -> int:
        if self._largest is None:
            return 0
        reqs, size = self._largest
        return size * key.padded_reqs // reqs
