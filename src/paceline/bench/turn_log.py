"""TurnLog: where the time of an engine's turns goes.

It stands between a turn function and its scheduler and runner, and hands them on under a clock:
what is timed is the one loop of `engine.loop`, and an engine without a log pays nothing.

    schedule   the next step is planned               of the step that this turn launches
    launch     staged, its graph found, queued        of the same; on a CPU the step runs here
    wait       until the device is done               of the step that this turn receives
    process    outputs read, tokens and ends booked   of the same
    text       trackers: text, stop strings, the rest of `Engine.step`
"""

import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from paceline.core.step import RunKind, Step, StepOutputs, StepRun
from paceline.engine.engine import Engine
from paceline.engine.loop import Launched, Runner, Schedules, Turn, TurnFunction
from paceline.engine.scheduler import RequestUpdate


class StepKind(StrEnum):
    """What a step is to those who wait for it."""

    DECODE = "decode"
    MIXED = "mixed"
    PREFILL = "prefill"
    ROUND = "round"  # drafts, verified


class StepFacts(NamedTuple):
    """A step as it was executed."""

    kind: StepKind
    run: RunKind
    rows: int
    tokens: int
    padded_rows: int
    padded_tokens: int


@dataclass(slots=True)
class TimedTurn:
    """One turn.  Seconds; `began_s` by time.perf_counter."""

    began_s: float = 0.0
    seconds: float = 0.0  # of the whole Engine.step
    launched: StepFacts | None = None
    landed: StepFacts | None = None  # the step whose outputs it received
    schedule_s: float = 0.0
    launch_s: float = 0.0
    wait_s: float = 0.0
    process_s: float = 0.0
    receivers: list[str] = field(default_factory=list)  # ids of requests that got tokens
    num_tokens: int = 0  # they got, in all
    num_finished: int = 0  # of them, by this

    @property
    def ended_s(self) -> float:
        return self.began_s + self.seconds

    @property
    def text_s(self) -> float:
        """The rest of the turn."""
        known = self.schedule_s + self.launch_s + self.wait_s + self.process_s
        return max(0.0, self.seconds - known)


class TurnLog:
    """Turns an engine that was built with Knobs(around_turn=log.around), and tells of each turn."""

    def __init__(self) -> None:
        self._turn = TimedTurn()

    def around(self, turn: TurnFunction) -> TurnFunction:
        """The same turn, timed."""

        def timed(
            scheduler: Schedules, runner: Runner, epoch: int, in_flight: Launched | None
        ) -> Turn:
            now = self._turn
            now.landed = None if in_flight is None else _facts(in_flight)
            done = turn(
                _TimedScheduler(scheduler, now),
                _TimedRunner(runner, now),
                epoch,
                None if in_flight is None else _TimedStep(in_flight, now),
            )
            launched = done.in_flight
            if launched is not None:
                assert isinstance(launched, _TimedStep), "a turn returns what it launched"
                launched = launched.inner
                now.launched = _facts(launched)
            got = [update for update in done.updates if update.new_token_ids]
            now.receivers = [update.request.parent_id for update in got]
            now.num_tokens = sum(len(update.new_token_ids) for update in got)
            now.num_finished = sum(update.finish is not None for update in got)
            return Turn(launched, done.updates)

        return timed

    def step(self, engine: Engine) -> TimedTurn:
        """One `Engine.step`, and where its time went.  Raises what the engine raises."""
        turn = self._turn = TimedTurn(began_s=time.perf_counter())
        engine.step()
        turn.seconds = time.perf_counter() - turn.began_s
        return turn


def _facts(launched: Launched) -> StepFacts:
    step, run = launched.step, launched.run
    return StepFacts(
        kind=_kind(step),
        run=run.kind,
        rows=step.layout.num_reqs,
        tokens=step.layout.num_tokens,
        padded_rows=run.padded_reqs,
        padded_tokens=run.padded_tokens,
    )


def _kind(step: Step) -> StepKind:
    """From its rows: a row of one token that emits decodes, or might as well."""
    if step.is_round:
        return StepKind.ROUND
    if not step.is_ragged:
        return StepKind.DECODE
    rows = zip(step.layout.extend_lens, step.layout.emits, strict=True)
    return StepKind.MIXED if (1, True) in rows else StepKind.PREFILL


class _TimedScheduler:
    def __init__(self, inner: Schedules, turn: TimedTurn) -> None:
        self._inner = inner
        self._turn = turn

    def schedule(self, epoch: int) -> Step | None:
        began = time.perf_counter()
        step = self._inner.schedule(epoch)
        self._turn.schedule_s += time.perf_counter() - began
        return step

    def process(self, step: Step, outputs: StepOutputs) -> list[RequestUpdate]:
        began = time.perf_counter()
        updates = self._inner.process(step, outputs)
        self._turn.process_s += time.perf_counter() - began
        return updates


class _TimedRunner:
    def __init__(self, inner: Runner, turn: TimedTurn) -> None:
        self._inner = inner
        self._turn = turn

    def launch(self, step: Step) -> "_TimedStep":
        began = time.perf_counter()
        launched = self._inner.launch(step)
        self._turn.launch_s += time.perf_counter() - began
        return _TimedStep(launched, self._turn)


class _TimedStep:
    """A launched step; what is waited for it counts for `turn`."""

    def __init__(self, inner: Launched, turn: TimedTurn) -> None:
        self.inner = inner
        self._turn = turn

    @property
    def step(self) -> Step:
        return self.inner.step

    @property
    def run(self) -> StepRun:
        return self.inner.run

    def synchronize(self) -> None:
        began = time.perf_counter()
        self.inner.synchronize()
        self._turn.wait_s += time.perf_counter() - began

    def wait(self) -> StepOutputs:
        self.synchronize()
        began = time.perf_counter()
        outputs = self.inner.wait()
        self._turn.process_s += time.perf_counter() - began
        return outputs
