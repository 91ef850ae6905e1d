"""ModelRunner: turns a Step into queued device work.  Owns the rings, programs and graphs."""

from collections.abc import Callable
from functools import partial

import torch

from paceline.core.expansion import Expansion, whole_step
from paceline.core.modes import End, MaskKind
from paceline.core.progress import Progress
from paceline.core.request.input_rows import EncoderInput
from paceline.core.request.sampling_params import SamplerTier
from paceline.core.step import JoinDelta, RunKind, Step, StepRun, leading_rows, padded_step
from paceline.kernels.compile_ahead import compile_ahead
from paceline.runner.extents import PaddedSize
from paceline.runner.outputs_ring import LaunchedStep, OutputsRing
from paceline.runner.program import Parts, StepProgram
from paceline.runner.recording.graph_keys import GraphKeys, empty_step
from paceline.runner.recording.graph_sizes import GraphSizes
from paceline.runner.recording.graphs import Graph, GraphKey, GraphStore
from paceline.runner.recording.guard import Guard
from paceline.runner.sanitizer.poisoned_run import CheckedStep
from paceline.runner.sanitizer.sanitizer import Sanitizer
from paceline.runner.staging import Copy, StagingRing
from paceline.runner.streams import Stream, Work


class ModelRunner:
    """Launches steps on one stream.

    A step that may be a graph is padded as the graph is, whether it replays or runs eagerly: both
    are the same operations on the same shapes, and give the same bits.
    graphs: None runs every step eagerly (--enforce-eager).  sanitizer: runs every step, twice.
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
        sanitizer: Sanitizer | None,
    ) -> None:
        self._parts = parts
        self._stream = stream
        self._staging = staging
        self._outputs = outputs
        self._graphs = graphs
        self._keys = GraphKeys(parts, sizes)
        self._guard = guard
        self._sanitizer = sanitizer
        self._captured: dict[GraphKey, StepProgram] = {}  # what graphs leave; with a sanitizer

    def boot(self) -> None:
        """Unless nothing is captured ahead: load what steps launch, and capture the largest graph
        of each shape, largest first."""
        if self._graphs is None or not self._graphs.policy.at_boot:
            return
        if self._graphs.factory.needs_warm_up:
            self._compile_ahead()
        keys = [self._keys.longest_extend(), self._keys.largest_decode()]
        wanted = [key for key in keys if key is not None]
        with Progress("recording graphs", len(wanted), unit="graph") as bar:
            for key in wanted:
                self._capture(key, warm_up=self._graphs.factory.needs_warm_up)
                bar.advance()

    def _compile_ahead(self) -> None:
        """Compile every kernel that steps of this engine launch, side by side."""
        make = [partial(self._empty_program, key) for key in self._keys.ahead()]
        if self._parts.latent_expand_from:
            make += [partial(self._empty_expanded, num_pieces) for num_pieces in (0, 1)]
        device = self._parts.buffers.row_ids.device
        with Progress("loading kernels", len(make), unit="step") as bar, compile_ahead(device):
            for program in make:
                self._stream.run(_without_autograd(program()))
                bar.advance()
        self._stream.synchronize()

    @property
    def parts(self) -> Parts:
        """The device-side parts, for who looks on."""
        return self._parts

    @property
    def padded_tokens(self) -> tuple[int, ...]:
        """Ascending sizes that steps with prompts are padded to, up to the last; (): none."""
        return self._keys.ragged_tokens

    @property
    def graphs_captured(self) -> int:
        """How many keys have a graph."""
        return 0 if self._graphs is None else len(self._graphs.graphs)

    def named_bytes(self) -> dict[str, int]:
        """Bytes held: KV pools, the workspace of table, step and backend, and captured graphs."""
        parts = self._parts
        return {
            "kv": sum(
                tensor.nbytes for pool in parts.device_pools for tensor in pool.parts.values()
            ),
            "workspace": sum(tensor.nbytes for tensor in parts.named_tensors().values()),
            "graphs": 0 if self._graphs is None else self._graphs.bytes_used,
        }

    def launch(self, step: Step) -> LaunchedStep:
        """Queue one step; returns at once on an asynchronous device."""
        slot = self._staging.slot(step.epoch)
        # A steady decode has none.
        copies = self._parts.table.stage(step.deltas, slot) if step.deltas else []
        key, graph, kind = self._keys.of(step), None, RunKind.EAGER
        if key is None:
            size = PaddedSize.exact(step.layout)
        else:
            graph, kind = self._find_or_capture(key)
            # Without graphs nothing holds an address.
            check = self._guard.check_shape if self._graphs is None else self._guard.check
            check(key, step)
            size = key.size
        buffers = self._parts.buffers
        if not buffers.holds(step.layout, size):
            copies += buffers.fill(step.layout, size, slot)
        if step.masks is not None:
            copies += buffers.fill_masks(step.masks, size.sampled(is_round=step.is_round), slot)
            if step.is_round:
                has_tree = step.mask is MaskKind.TREE
                copies += buffers.fill_given(step.given, size, slot, has_tree=has_tree)
        if copies:
            self._stream.run(lambda: _execute(copies))
        for delta in step.deltas:
            if isinstance(delta, JoinDelta) and delta.encoder is not None:
                self._stream.run(partial(self._write_encoder, delta.row, delta.encoder))
        if graph is not None:
            assert key is not None
            self._queue(step, size, graph.replay, self._captured.get(key))
            return self._receive(step, size, kind)
        program = self._program_of(step, size)
        self._queue(step, size, _without_autograd(program), program)
        if step.prompt_spans:
            outputs = self._outputs.slot(step.epoch)
            self._stream.run(lambda: outputs.receive_prompt(program.prompt_logprobs))
        return self._receive(step, size, kind)

    def capture_owed(self) -> bool:
        """Capture one graph that a coming step would, while nothing runs; whether there was one.
        Takes as long as a capture, during which no step can be launched."""
        key = None if self._graphs is None else self._graphs.owed()
        if key is None:
            return False
        self._capture(key, warm_up=False)
        return True

    def _write_encoder(self, row: int, given: EncoderInput) -> None:
        """What a request brings for its encoder, into the pages that it has been given."""
        parts = self._parts
        assert parts.encoder is not None, "the scheduler refuses rows where there is no encoder"
        with torch.inference_mode():
            parts.encoder.write(parts.model, given, parts.table, row)

    def _receive(self, step: Step, size: PaddedSize, kind: RunKind) -> LaunchedStep:
        slot = self._outputs.slot(step.epoch)
        buffers, num_reqs = self._parts.buffers, step.layout.num_reqs
        most = self._parts.max_emitted(is_round=step.is_round)
        tree_rows = size.max_extend_len if step.tells_drafts else 0
        self._stream.run(
            lambda: slot.receive(
                buffers,
                num_reqs,
                max_emitted=most,
                logprobs=step.logprobs,
                tree_rows=tree_rows,
                pools=End.POOL in step.ends,
            )
        )
        run = StepRun(kind, size.reqs, size.tokens)
        return LaunchedStep(step, run, self._stream.record(), slot, most)

    def _queue(self, step: Step, size: PaddedSize, run: Work, program: StepProgram | None) -> None:
        """Queue a step's work; program: the functions behind `run`, where they are known."""
        host_plan = self._host_plan(step, size)
        sanitizer = self._sanitizer
        if sanitizer is None:
            if host_plan is not None:
                self._stream.run(host_plan)
            self._stream.run(run)
            return
        checked = CheckedStep(
            step=step,
            size=size,
            run=_in_order(host_plan, run),
            program=program,
            explain=_in_order(host_plan, self._program_of(step, size).run),
        )
        self._stream.run(lambda: sanitizer.run(checked))

    def _host_plan(self, step: Step, size: PaddedSize) -> Work | None:
        """What lets a backend that plans on the host do so, padded rows included.

        It plans from host lengths alone, before the step's first operation: nothing of the step
        waits for the host, and the step stays one graph.
        """
        backend, held = self._parts.backend, self._parts.backend_buffers
        if not backend.capabilities.host_plan:
            return None
        padded, proposer = padded_step(step, size.pad_lens(step.layout)), self._parts.proposer
        expansion = self._expansion(step)
        served = padded if expansion is None else leading_rows(padded, expansion.first_row)

        def plan() -> None:
            if served.layout.rows:
                backend.host_plan(served, held)
            proposer.host_plan(padded)

        return plan

    def _expansion(self, step: Step) -> Expansion | None:
        """A step of a graph's size has none: whether a prompt expands hangs on no graph and no
        score."""
        expansion = self._parts.expansion(step)
        return None if expansion is None or self._keys.size_of(step) is not None else expansion

    def _program_of(self, step: Step, size: PaddedSize) -> StepProgram:
        parts = self._parts
        return StepProgram(
            parts,
            parts.buffers.view(
                size,
                step.mask,
                shares_prefix=step.shares_prefix,
                has_overlay=step.has_overlay,
            ),
            sampler=step.sampler,
            logprobs=step.logprobs,
            is_round=step.is_round,
            prompt_spans=step.prompt_spans,
            observed=step.observed,
            masked=step.masks is not None,
            ends=step.ends,
            expansion=self._expansion(step),
        )

    def _find_or_capture(self, key: GraphKey) -> tuple[Graph | None, RunKind]:
        """The graph of a key's step, and how that runs."""
        if self._graphs is None:
            return None, RunKind.EAGER
        found = self._graphs.find(key)
        if found is not None:
            return found, RunKind.GRAPH
        captured = self._capture(key, warm_up=False) if self._graphs.wants(key) else None
        return captured, RunKind.EAGER if captured is None else RunKind.CAPTURE

    def _empty_program(self, key: GraphKey) -> StepProgram:
        """The functions of a key's step, over padded rows alone: harmless to execute."""
        size, empty = key.size, empty_step(key)
        self._stream.run(lambda: self._parts.buffers.pad(size))
        host_plan = self._host_plan(empty, size)
        if host_plan is not None:
            self._stream.synchronize()  # its epoch's pinned memory may be a running step's
            self._stream.run(host_plan)
        return self._program_of(empty, size)

    def _empty_expanded(self, num_pieces: int) -> StepProgram:
        """The functions of the longest step, expanded, with so many pieces of prefixes; as
        `_empty_program`."""
        parts = self._parts
        rows = parts.buffers.input_ids.shape[0]
        size = PaddedSize.ragged(1, rows)
        self._stream.run(lambda: parts.buffers.pad(size))
        return StepProgram(
            parts,
            parts.buffers.view(size, MaskKind.CAUSAL),
            sampler=SamplerTier.GREEDY,
            logprobs=False,
            ends=parts.usual_ends,
            expansion=whole_step(rows, num_pieces),
        )

    def _capture(self, key: GraphKey, *, warm_up: bool) -> Graph | None:
        """Capture a key, behind an eager run where it had none.

        A CUDA graph is captured while the device works on earlier steps: nothing is executed.
        None: its graph is too large to keep.
        """
        assert self._graphs is not None
        program, graphs = self._empty_program(key), self._graphs
        if warm_up:
            self._stream.run(_without_autograd(program))
        executes = not graphs.factory.needs_warm_up
        waits = warm_up or executes or self._parts.backend.capabilities.host_plan
        if waits:
            self._stream.synchronize()
        captured: list[Graph | None] = []
        self._stream.run(lambda: captured.append(graphs.capture(key, program.run)))
        if waits:
            self._stream.synchronize()
        if self._sanitizer is not None:
            self._captured[key] = program
        return captured[0]


def _execute(copies: list[Copy]) -> None:
    for destination, source in copies:
        destination.copy_(source, non_blocking=True)


def _in_order(first: Work | None, second: Work) -> Work:
    def run() -> None:
        if first is not None:
            first()
        second()

    return run


def _without_autograd(program: StepProgram) -> Callable[[], None]:
    def run() -> None:
        with torch.inference_mode():
            program.run()

    return run
