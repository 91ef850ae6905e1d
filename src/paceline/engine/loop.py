"""The two loops of the engine, one turn each.

Overlapped: step t + 1 is scheduled and launched before the outputs of step t are read, so the host
works while the device computes.  Its twin makes the same decisions with the same one-turn delay but
waits for each step at once; it is the specification: both give the same tokens, bit for bit.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from paceline.core.step import Step, StepOutputs, StepRun
from paceline.engine.scheduler import RequestUpdate


class Launched(Protocol):
    """A step whose work is queued (runner.outputs_ring.LaunchedStep)."""

    @property
    def step(self) -> Step: ...

    @property
    def run(self) -> StepRun: ...

    def synchronize(self) -> None: ...

    def wait(self) -> StepOutputs: ...


class Schedules(Protocol):
    """What a loop needs of engine.scheduler.Scheduler."""

    def schedule(self, epoch: int) -> Step | None: ...

    def process(self, step: Step, outputs: StepOutputs) -> list[RequestUpdate]: ...


class Runner(Protocol):
    """What a loop needs of runner.model_runner.ModelRunner."""

    def launch(self, step: Step) -> Launched: ...


class IdlingRunner(Runner, Protocol):
    """What an engine needs of it beside."""

    def capture_owed(self) -> bool: ...


class Turn(NamedTuple):
    """What one turn hands to the next, and what it brought to requests."""

    in_flight: Launched | None
    updates: list[RequestUpdate]


TurnFunction = Callable[[Schedules, Runner, int, Launched | None], Turn]


def overlapped_turn(
    scheduler: Schedules, runner: Runner, epoch: int, in_flight: Launched | None
) -> Turn:
    """Launch the next step, then process the one in flight."""
    step = scheduler.schedule(epoch)
    launched = runner.launch(step) if step is not None else None
    return Turn(launched, _process(scheduler, in_flight))


def twin_turn(scheduler: Schedules, runner: Runner, epoch: int, in_flight: Launched | None) -> Turn:
    """The same decisions, executed synchronously."""
    step = scheduler.schedule(epoch)
    launched = runner.launch(step) if step is not None else None
    if launched is not None:
        launched.synchronize()
    return Turn(launched, _process(scheduler, in_flight))


def _process(scheduler: Schedules, in_flight: Launched | None) -> list[RequestUpdate]:
    if in_flight is None:
        return []
    return scheduler.process(in_flight.step, in_flight.wait())
