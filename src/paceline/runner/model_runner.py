"""ModelRunner: turns a Step into queued device work.  Owns the rings, programs and graphs."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch

from paceline.attention.contract import GraphSupport
from paceline.core.events import Event, Notify
from paceline.core.modes import ExtendShape, ForwardMode
from paceline.core.sampling_params import SamplerTier
from paceline.core.step import Step, StepLayout, padded_step
from paceline.runner.buffers import PaddedSize
from paceline.runner.graphs import Graph, GraphKey, GraphStore
from paceline.runner.guard import Guard, tensors_in
from paceline.runner.outputs_ring import LaunchedStep, OutputsRing
from paceline.runner.program import Parts, Segment, StepProgram, group_segments
from paceline.runner.staging import Copy, StagingRing
from paceline.runner.streams import Stream

# What a backend must support for a step of this shape to be captured; other shapes run eagerly.
_NEEDED_SUPPORT = {
    ExtendShape.ONE: GraphSupport.DECODE,
    ExtendShape.UNIFORM: GraphSupport.UNIFORM,
}


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """Padded request counts that graphs are made for."""

    sizes: tuple[int, ...]  # ascending

    @staticmethod
    def up_to(max_reqs: int, *, every: int = 4) -> "GraphSizes":
        """Every size up to `every`, then 6, 8, 12, 16, then each 8 up to max_reqs, which is in."""
        fine = set(range(1, every + 1))
        coarse = {6, 8, 12, *range(16, max_reqs, 8)}
        return GraphSizes(tuple(sorted({n for n in fine | coarse if n < max_reqs} | {max_reqs})))

    def pad(self, num_reqs: int) -> int | None:
        """The smallest size that holds `num_reqs`; None when none does."""
        index = bisect_left(self.sizes, num_reqs)
        return self.sizes[index] if index < len(self.sizes) else None


class ModelRunner:
    """Launches steps on one stream.

    graphs: None runs every step eagerly (--enforce-eager).
    """

    def __init__(
        self,
        parts: Parts,
        *,
        stream: Stream,
        staging: StagingRing,
        outputs: OutputsRing,
        graphs: GraphStore | None,
        sizes: GraphSizes,
        guard: Guard,
        notify: Notify,
    ) -> None:
        self._parts = parts
        self._stream = stream
        self._staging = staging
        self._outputs = outputs
        self._graphs = graphs
        self._sizes = sizes
        self._guard = guard
        self._split_before = frozenset(self._split_reasons())
        for name, reason in self._split_reasons().items():
            notify(Event("segments_split", f"before {name}: {reason}"))

    def boot(self) -> None:
        """Capture the largest decode graph, which sizes the graph reserve."""
        if self._graphs is not None:
            self._capture(self._key(ForwardMode.DECODE, self._sizes.sizes[-1], 1))

    def named_bytes(self) -> dict[str, int]:
        """Bytes held: the KV pools, and the workspace of table, step and backend."""
        parts = self._parts
        owned = {
            **parts.table.named_tensors(),
            **parts.buffers.named_tensors(),
            **tensors_in("backend", parts.backend_buffers),
        }
        return {
            "kv": sum(layer.k_cache.nbytes + layer.v_cache.nbytes for layer in parts.layers),
            "workspace": sum(tensor.nbytes for tensor in owned.values()),
        }

    def launch(self, step: Step) -> LaunchedStep:
        """Queue one step; returns at once on an asynchronous device."""
        slot = self._staging.slot(step.epoch)
        copies = self._parts.table.stage(step.deltas, slot)
        key = self._graph_key(step)
        graphs = self._find_or_capture(key) if key is not None else None
        if graphs is not None:
            assert key is not None
            self._guard.check(key, step)
            size = PaddedSize.uniform(key.padded_reqs, key.extend_len)
        else:
            size = PaddedSize.exact(step.layout)
        buffers = self._parts.buffers
        if not buffers.holds(step.layout, size):
            copies.append(buffers.fill(step.layout, size, slot))
        if copies:
            self._stream.run(lambda: _execute(copies))
        if graphs is not None:
            self._run_groups(step, size, [graph.replay for graph in graphs])
        else:
            self._run_groups(step, size, self._eager_groups(step, size))
        return self._receive(step)

    def _receive(self, step: Step) -> LaunchedStep:
        slot = self._outputs.slot(step.epoch)
        buffers, num_reqs = self._parts.buffers, step.layout.num_reqs
        self._stream.run(lambda: slot.receive(buffers, num_reqs, logprobs=step.logprobs))
        return LaunchedStep(step, self._stream.record(), slot)

    def _run_groups(self, step: Step, size: PaddedSize, groups: list[Callable[[], None]]) -> None:
        """Queue segment groups; the host plans between the first and the second if it must."""
        for index, group in enumerate(groups):
            if index == 1:
                self._host_plan(step, size)
            self._stream.run(group)

    def _host_plan(self, step: Step, size: PaddedSize) -> None:
        """Let a backend that plans on the host do so, padded rows included."""
        backend = self._parts.backend
        if backend.capabilities.host_plan:
            backend.host_plan(
                padded_step(step, size.reqs, size.max_extend_len), self._parts.backend_buffers
            )

    def _eager_groups(self, step: Step, size: PaddedSize) -> list[Callable[[], None]]:
        groups = self._segment_groups(step.mode, size, sampler=step.sampler, logprobs=step.logprobs)
        return [_without_autograd(group) for group in groups]

    def _segment_groups(
        self, mode: ForwardMode, size: PaddedSize, *, sampler: SamplerTier, logprobs: bool
    ) -> list[Segment]:
        view = self._parts.buffers.view(size, mode.facts.mask)
        program = StepProgram(self._parts, view, sampler=sampler, logprobs=logprobs)
        return group_segments(program.segments(), self._split_before)

    def _split_reasons(self) -> dict[str, str]:
        """Segments that need the host before them, each with its reason code."""
        if self._parts.backend.capabilities.host_plan:
            return {"forward": "host_plan"}
        return {}

    def _graph_key(self, step: Step) -> GraphKey | None:
        """The key a step would replay under; None when it must run eagerly."""
        needed = _NEEDED_SUPPORT.get(step.mode.facts.extend)
        if self._graphs is None or needed is None or not step.mode.facts.graphable:
            return None
        if self._parts.backend.capabilities.graph < needed:
            return None
        padded = self._sizes.pad(step.layout.num_reqs)
        if padded is None:
            return None
        return self._key(
            step.mode,
            padded,
            max(step.layout.extend_lens),
            sampler=step.sampler,
            logprobs=step.logprobs,
        )

    def _key(
        self,
        phase: ForwardMode,
        padded_reqs: int,
        extend_len: int,
        *,
        sampler: SamplerTier = SamplerTier.GREEDY,
        logprobs: bool = False,
    ) -> GraphKey:
        return GraphKey(
            phase=phase,
            padded_reqs=padded_reqs,
            extend_len=extend_len,
            tree=None,
            backend=self._parts.backend.name,
            sampler=sampler,
            logprobs=logprobs,
            taps=self._parts.taps,
        )

    def _find_or_capture(self, key: GraphKey) -> list[Graph] | None:
        assert self._graphs is not None
        found = self._graphs.find(key)
        if found is None and self._graphs.wants(key):
            found = self._capture(key)
        return found

    def _capture(self, key: GraphKey) -> list[Graph]:
        """Capture a key over padded rows alone, which are harmless to execute."""
        assert self._graphs is not None
        size = PaddedSize.uniform(key.padded_reqs, key.extend_len)
        groups = self._segment_groups(key.phase, size, sampler=key.sampler, logprobs=key.logprobs)
        self._stream.run(lambda: self._parts.buffers.pad(size))
        self._host_plan(_empty_step(key), size)
        if self._graphs.factory.needs_warm_up:
            for group in groups:
                self._stream.run(_without_autograd(group))
        self._stream.synchronize()
        graphs = self._graphs
        captured: list[Graph] = []
        self._stream.run(
            lambda: captured.extend(graphs.capture(key, [group.run for group in groups]))
        )
        self._stream.synchronize()
        return captured


def _empty_step(key: GraphKey) -> Step:
    """The step of a key before anything is in it."""
    return Step(
        epoch=0,
        mode=key.phase,
        layout=StepLayout(rows=(), extend_lens=(), emits=()),
        prefix_lens_bound=(),
        sampler=key.sampler,
        logprobs=key.logprobs,
        deltas=(),
    )


def _execute(copies: list[Copy]) -> None:
    for destination, source in copies:
        destination.copy_(source, non_blocking=True)


def _without_autograd(segment: Segment) -> Callable[[], None]:
    def run() -> None:
        with torch.inference_mode():
            segment.run()

    return run
