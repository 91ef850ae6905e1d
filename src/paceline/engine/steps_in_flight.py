"""StepsInFlight: launched steps whose outputs have not been processed, oldest first."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from paceline.core.errors import IntegrityError
from paceline.core.step import Step, StepOutputs
from paceline.engine.request import Request
from paceline.engine.step_plan import PlannedRow


class _Launched(NamedTuple):
    epoch: int
    rows: tuple[PlannedRow, ...]


class StepsInFlight:
    """Owns the order of launched steps, and each request's count of them, of the tokens they add
    and last epochs.
    """

    def __init__(self) -> None:
        self._steps: deque[_Launched] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def launch(self, epoch: int, rows: Iterable[PlannedRow]) -> None:
        """A step is on its way."""
        launched = tuple(rows)
        for row in launched:
            request = row.request
            request.in_flight += 1
            request.least_in_flight += row.least
            request.most_in_flight += row.most
            request.last_epoch = epoch
            if row.num_given:
                request.given_epoch = epoch
        self._steps.append(_Launched(epoch, launched))

    def land(self, step: Step, outputs: StepOutputs) -> tuple[PlannedRow, ...]:
        """The rows of the oldest step.  Raises IntegrityError when it is another one's outputs."""
        launched = self._steps.popleft()
        if not launched.epoch == step.epoch == outputs.epoch:
            raise IntegrityError.about(
                "the epoch of processed outputs",
                expected=f"{launched.epoch} (the oldest step in flight)",
                got=f"step {step.epoch}, outputs {outputs.epoch}",
                remedy="process every launched step once, in order",
            )
        for row in launched.rows:
            request = row.request
            request.in_flight -= 1
            request.least_in_flight -= row.least
            request.most_in_flight -= row.most
        return launched.rows

    def requests(self) -> Iterator[Request]:
        """One entry per row of each step."""
        return (row.request for launched in self._steps for row in launched.rows)
