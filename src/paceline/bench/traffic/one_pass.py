"""One pass of traffic through an engine: sent when due, turned to its end, every turn timed."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.bench.traffic.plan import Arrival
from paceline.bench.turn_log import TimedTurn, TurnLog
from paceline.core.errors import IntegrityError
from paceline.core.progress import Progress
from paceline.engine.answers.outputs import RequestOutput
from paceline.engine.answers.tracker import Tracker
from paceline.engine.request import FinishReason
from paceline.llm.llm import LLM


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficPass:
    """What a pass brought.  Seconds; times count from its begin."""

    turns: tuple[TimedTurn, ...]  # in order; their `began_s` too counts from the begin
    seconds: float  # until the last token
    outputs: tuple[RequestOutput, ...]  # [num_requests]
    ttft_s: tuple[float, ...]  # [num_requests] from when it was due to its first token
    gaps_s: tuple[float, ...]  # between two deliveries to one request; a round delivers several

    @property
    def tokens(self) -> list[tuple[int, ...]]:
        """[num_requests] generated ids."""
        return [output.outputs[0].token_ids for output in self.outputs]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(output.prompt_token_ids) for output in self.outputs)

    @property
    def num_output_tokens(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def num_cached_tokens(self) -> int:
        """Of the prompts."""
        return sum(output.metrics.cached_tokens for output in self.outputs if output.metrics)

    @property
    def num_preemptions(self) -> int:
        return sum(output.metrics.preemptions for output in self.outputs if output.metrics)


def run_pass(llm: LLM, log: TurnLog, arrivals: Sequence[Arrival], *, name: str) -> TrafficPass:
    """Send and turn to the end.  Nobody else has requests in the engine.

    name: for progress; requests are called `name`-0, ...  Raises IntegrityError when a request does
    not get exactly the tokens it asked for.
    """
    engine, due = llm.engine, deque(enumerate(arrivals))
    trackers: list[Tracker] = []
    turns: list[TimedTurn] = []
    while engine.has_work:  # of requests that have ended: those of boot, say
        engine.step()
    while engine.idle():  # as a server between two loads
        pass
    began = time.perf_counter()
    with Progress(name, len(arrivals), unit="request") as bar:
        while due or engine.has_work:
            now = time.perf_counter() - began
            while due and due[0][1].due_s <= now:
                index, arrival = due.popleft()
                tracker = engine.add(
                    f"{name}-{index}", arrival.prompt_ids, arrival.params, salt=arrival.salt
                )
                trackers.append(tracker)
            if not engine.has_work:
                time.sleep(max(0.0, due[0][1].due_s - now))
                continue
            turn = log.step(engine)
            turns.append(turn)
            bar.advance(turn.num_finished)
    for turn in turns:
        turn.began_s -= began
    outputs = tuple(tracker.snapshot() for tracker in trackers)
    _check_counts(outputs, arrivals)
    first_s, gaps_s = _deliveries(turns)
    return TrafficPass(
        turns=tuple(turns),
        seconds=max(turn.ended_s for turn in turns if turn.num_tokens),
        outputs=outputs,
        ttft_s=tuple(
            first_s[output.request_id] - arrival.due_s
            for output, arrival in zip(outputs, arrivals, strict=True)
        ),
        gaps_s=tuple(gaps_s),
    )


def _deliveries(turns: Sequence[TimedTurn]) -> tuple[dict[str, float], list[float]]:
    """(request -> when its first token came, every gap between two deliveries to one request)."""
    first_s: dict[str, float] = {}
    last_s: dict[str, float] = {}
    gaps_s: list[float] = []
    for turn in turns:
        now = turn.ended_s
        for name in turn.receivers:
            if name in last_s:
                gaps_s.append(now - last_s[name])
            else:
                first_s[name] = now
            last_s[name] = now
    return first_s, gaps_s


def _check_counts(outputs: Sequence[RequestOutput], arrivals: Sequence[Arrival]) -> None:
    for output, arrival in zip(outputs, arrivals, strict=True):
        (got,), wanted = output.outputs, arrival.params.max_tokens
        if len(got.token_ids) != wanted or got.finish_reason is not FinishReason.LENGTH:
            raise IntegrityError.about(
                f"output of '{output.request_id}'",
                expected=f"{wanted} tokens and finish_reason 'length'",
                got=f"{len(got.token_ids)} and {got.finish_reason!s} ({got.error})",
                remedy="do not trust a timing of this configuration; try --enforce-eager",
            )
