"""Receipt: how a request was computed, where it asked for that; plain data, made by the engine."""

import time
from dataclasses import dataclass

from paceline.core.step import Step, StepRun
from paceline.engine.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseBackends:
    """Names of attention backends."""

    prefill: str
    decode: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What is the same for every request of an engine."""

    model: str
    device: str
    dtype: str
    attention: PhaseBackends
    drafter: str | None  # one of DRAFT_ALGORITHMS; None: nobody drafts
    versions: dict[str, str]  # of Python and of libraries that are there


@dataclass(slots=True, kw_only=True)
class PhaseRuns:
    """Steps of one phase that were run in one way and held a row of the request."""

    phase: str  # "prefill": known tokens were computed; "decode"; "round"
    run: str  # RunKind: "graph", "capture", "eager"
    steps: int = 0
    tokens: int = 0  # of the request; a round's drafts included
    most_rows: int = 0  # of the fullest of these steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What a request is told beside its counts."""

    facts: EngineFacts | None  # None: nobody told the engine
    queue_s: float | None  # from arrival until its first step was launched; None: none was
    phases: tuple[PhaseRuns, ...]  # in the order in which they first came


class ReceiptLog:
    """Owns what is noted of one request, of all its completions."""

    def __init__(self, facts: EngineFacts | None) -> None:
        self._facts = facts
        self._arrival_s = time.perf_counter()
        self._queue_s: float | None = None
        self._phases: dict[tuple[str, str], PhaseRuns] = {}

    def note(self, request: Request, index: int, step: Step, run: StepRun) -> None:
        """A step was launched that holds `request` at row `index`."""
        if self._queue_s is None:
            self._queue_s = time.perf_counter() - self._arrival_s
        is_known = step.prefix_lens_bound[index] < request.join_len
        phase = "prefill" if is_known else "round" if step.is_round else "decode"
        key = phase, run.kind.value
        row = self._phases.setdefault(key, PhaseRuns(phase=phase, run=run.kind.value))
        row.steps += 1
        row.tokens += step.layout.extend_lens[index]
        row.most_rows = max(row.most_rows, step.layout.num_reqs)

    def receipt(self) -> Receipt:
        """As it stands."""
        return Receipt(
            facts=self._facts, queue_s=self._queue_s, phases=tuple(self._phases.values())
        )
