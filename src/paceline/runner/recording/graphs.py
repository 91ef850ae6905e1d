"""Graphs: keys, the two implementations behind one interface, and who decides what is captured."""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from paceline.core.events import Event, Notify
from paceline.core.modes import GENERATES, POOLS, End, MaskKind
from paceline.core.request.sampling_params import SamplerTier
from paceline.core.step import kind_of_step
from paceline.runner.extents import PaddedSize
from paceline.runner.recording.arena import Arena
from paceline.runner.recording.host_reads import refuse_host_reads
from paceline.runner.recording.recorded import GraphTooLarge, RecordedGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphKey:
    """Everything that is frozen into a graph.  Whatever is not here is device data or a bound."""

    padded_reqs: int
    extend_len: int | None  # exact, of every row; None: ragged
    ragged_tokens: int | None  # padded tokens of a ragged step in all, which bound each row's
    pad_len: int = 0  # of these, tokens of a padded row at most; 0: any number
    mask: MaskKind  # a tree's shape is device data; that there is one is not
    is_round: bool = False  # drafts, verifies and commits; otherwise the step's tokens are known
    backend: str
    sampler: SamplerTier
    logprobs: bool
    taps: tuple[str, ...]
    observed: bool = True  # by the drafter, where there is one
    shares_prefix: bool = False  # looks for prefixes that rows share, and reads them once
    masked: bool = False  # rows may have masks: which, and of what tokens, is device data
    has_overlay: bool = False  # tokens may take their input row from the overlay
    ends: frozenset[End] = GENERATES  # which results it makes

    @property
    def program(self) -> "GraphKey":
        """The same for all padded sizes of one program; rows of another length are another's."""
        return replace(self, padded_reqs=0, ragged_tokens=None)

    @property
    def size(self) -> PaddedSize:
        """The padded shape of its steps."""
        if self.extend_len is not None:
            return PaddedSize.uniform(self.padded_reqs, self.extend_len)
        assert self.ragged_tokens is not None, self
        return PaddedSize.ragged(self.padded_reqs, self.ragged_tokens, self.pad_len)


class Graph(Protocol):
    """A captured function that replays on the same addresses."""

    def capture(self, function: Callable[[], None]) -> None: ...

    def replay(self) -> None: ...


class CudaGraph:
    """A CUDA graph.  All graphs of an engine share one memory pool, captured largest first.

    checked: refuse host reads by name; it doubles the time of a capture.
    """

    def __init__(self, pool: Any, *, checked: bool) -> None:
        self._pool = pool
        self._checked = checked
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, function: Callable[[], None]) -> None:
        """Record `function` without executing it, on the current stream.

        Raises HostReadError, as RecordedGraph does, where it is checked.
        """
        net = refuse_host_reads(lambda *_: None) if self._checked else nullcontext()
        with _no_collection(), torch.no_grad(), net, self._recording():
            function()

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """As torch.cuda.graph, which also gives back what the allocator keeps for the next step."""
        self._graph.capture_begin(pool=self._pool)
        try:
            yield
        finally:
            self._graph.capture_end()

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        self._graph.replay()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Within the block no garbage is collected: to destroy another graph spoils a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class GraphFactory(Protocol):
    """Makes graphs for a device and tells how many bytes they hold."""

    needs_warm_up: bool  # capture does not execute, so what it launches must be loaded before
    shares_memory: bool  # a graph takes the storage of those captured before it

    def make(self, *, checked: bool) -> Graph: ...

    def bytes_held(self) -> int: ...


class CudaGraphFactory:
    """CUDA graphs over one pool."""

    needs_warm_up = True
    shares_memory = True

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def make(self, *, checked: bool) -> Graph:
        """checked: see CudaGraph."""
        return CudaGraph(self._pool, checked=checked)

    def bytes_held(self) -> int:
        """Device bytes of the pool.

        Not the difference of what the allocator holds: a capture gives other memory back.
        """
        segments = torch.cuda.memory_snapshot()
        return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == self._pool)


class RecordedGraphFactory:
    """Recorded graphs for the CPU, over one arena.

    limit_bytes: what the arena may hold; None: what the largest graph needs.
    """

    needs_warm_up = False
    shares_memory = True

    def __init__(self, *, poison: bool, limit_bytes: int | None) -> None:
        self._poison = poison
        self._arena = Arena(limit_bytes=limit_bytes)

    def make(self, *, checked: bool) -> Graph:
        """Every recording is checked: it follows each operator anyway."""
        return RecordedGraph(poison=self._poison, arena=self._arena)

    def bytes_held(self) -> int:
        return self._arena.nbytes


@dataclass(frozen=True, slots=True)
class CapturePolicy:
    """When keys get their graphs."""

    at_boot: bool  # the largest of each shape; they size the reserve
    on_use: int  # any other key, at least 2: eager before, which loads what a capture launches
    when_idle: bool = False  # one that its next use would capture, while nothing else is to be done


AHEAD = CapturePolicy(at_boot=True, on_use=2, when_idle=True)
# A recording costs as much as 8 to 15 of its replays save: decision 035.
ONCE_IT_PAYS = CapturePolicy(at_boot=False, on_use=8)
# The reserve of CUDA graphs, as a multiple of the largest, whose storage the others share: once
# more is for what does not fit into its pieces.
RESERVE_FACTOR = 2


class GraphStore:
    """Owns the captured graphs of an engine and decides what is captured when.

    A key that needs storage of its own stays eager when the reserve is short, with an event.
    reserve_factor: the reserve, as a multiple of the graphs captured at boot; None: the factory
    knows its limit, and a graph that would pass it is not kept.
    largest_round: padded requests; larger ones, which are not served, get no graph on use; None:
    all are served.
    """

    def __init__(
        self,
        factory: GraphFactory,
        *,
        reserve_factor: int | None,
        notify: Notify,
        policy: CapturePolicy = AHEAD,
        largest_round: int | None = None,
    ) -> None:
        self.factory = factory
        self.policy = policy
        self._largest_round = largest_round
        self._reserve_factor = reserve_factor
        self._notify = notify
        self._too_large: set[GraphKey] = set()
        self._graphs: dict[GraphKey, Graph] = {}
        self._uses: dict[GraphKey, int] = {}
        self._largest: dict[bool, tuple[int, int]] = {}  # is ragged: padded tokens, bytes
        self._bytes = 0
        self._programs: set[GraphKey] = set()  # of which one size has been captured and checked

    @property
    def graphs(self) -> Mapping[GraphKey, Graph]:
        """What is captured."""
        return self._graphs

    @property
    def bytes_used(self) -> int:
        return self._bytes

    @property
    def bytes_reserved(self) -> int:
        """What graphs may hold in all; 0 before the first capture, and without a factor."""
        return (self._reserve_factor or 0) * sum(size for _, size in self._largest.values())

    def find(self, key: GraphKey) -> Graph | None:
        return self._graphs.get(key)

    def wants(self, key: GraphKey) -> bool:
        """Count a use of a key that is not captured; True when it should be captured now."""
        if not self._is_served(key):
            return False
        self._uses[key] = self._uses.get(key, 0) + 1
        if self._uses[key] < self.policy.on_use or key in self._too_large:
            return False
        if self._fits(key):
            return True
        left = self.bytes_reserved - self._bytes
        self._stays_eager(
            key,
            f"needs about {self._estimate(key)} bytes, {left} of {self.bytes_reserved} left",
        )
        return False

    def owed(self) -> GraphKey | None:
        """A key that its next use would capture, where the policy takes such when idle; none that
        would take of the reserve, which a use decides."""
        if not self.policy.when_idle:
            return None
        last = self.policy.on_use - 1
        return next(
            (
                key
                for key, uses in self._uses.items()
                if uses == last
                and not (key in self._graphs or key in self._too_large)
                and self._is_free(key)
            ),
            None,
        )

    def _is_served(self, key: GraphKey) -> bool:
        most = self._largest_round
        return not key.is_round or most is None or key.padded_reqs <= most

    def _fits(self, key: GraphKey) -> bool:
        """Whether the reserve has room for it."""
        return self._is_free(key) or self._bytes + self._estimate(key) <= self.bytes_reserved

    def _is_free(self, key: GraphKey) -> bool:
        """Whether it would take nothing of the reserve."""
        return self._reserve_factor is None or self._is_covered(key)

    def capture(self, key: GraphKey, function: Callable[[], None]) -> Graph | None:
        """Capture `function` and keep its graph; None when it is too large to keep.

        The caller has padded the buffers.  The first of each program is checked for host reads.
        """
        before = self.factory.bytes_held()
        program = key.program
        graph = self.factory.make(checked=program not in self._programs)
        try:
            graph.capture(function)
        except GraphTooLarge as error:
            self._too_large.add(key)
            self._stays_eager(key, str(error))
            return None
        self._programs.add(program)
        grown = self.factory.bytes_held() - before
        self._bytes += grown
        self._largest.setdefault(key.extend_len is None, (key.size.tokens, max(grown, 1)))
        self._graphs[key] = graph
        return graph

    def _stays_eager(self, key: GraphKey, why: str) -> None:
        kind = kind_of_step(key.extend_len, is_round=key.is_round)
        what = f"{kind} x {key.padded_reqs}, {key.size.tokens} tokens"
        self._notify(Event("graph_reserve_short", f"{what}, stays eager: {why}"))

    def _is_covered(self, key: GraphKey) -> bool:
        """Whether captured graphs of as many tokens, and as many rows of the same sampler, share
        their storage with this one.  A pooled row is a vector, smaller than any of a token."""
        tokens = max((k.size.tokens for k in self._graphs), default=0)
        if not self.factory.shares_memory or key.size.tokens > tokens:
            return False
        sampler = (key.sampler, key.logprobs)
        alike = [k.size.reqs for k in self._graphs if (k.sampler, k.logprobs) == sampler]
        return key.ends == POOLS or key.size.reqs <= max(alike, default=0)

    def _estimate(self, key: GraphKey) -> int:
        largest = self._largest.get(key.extend_len is None)
        if largest is None:
            return 0
        tokens, size = largest
        return size * key.size.tokens // tokens
