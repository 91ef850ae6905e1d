"""What a model serves under traffic: tokens per second, waits, and where the time of turns goes.

    python -m paceline bench throughput --model llama-3.1-8b --load-format dummy \
        --attention-backend triton --max-num-seqs 256 --max-model-len 20480

One engine, as it is served: prefix cache on unless it is asked otherwise.  Its passes:

    first     right behind boot: what is not compiled, not captured, not warm shows here
    check     the same requests, nothing of them cached: every token is compared with the first's
    steady    --repeats passes, new tokens each

End tokens are ignored, so every request gets exactly the tokens it asked for, which is verified in
each pass.  No number is told when a check fails.  Needs nothing beyond what the engine needs.
"""

import time
from collections.abc import Iterator, Mapping

from paceline.bench.throughput_report import Summary, Within, median_pass
from paceline.bench.throughput_table import Check, ThroughputReport
from paceline.bench.traffic.one_pass import TrafficPass, run_pass
from paceline.bench.traffic.plan import Traffic, plan_traffic
from paceline.bench.traffic.shape import TrafficShape
from paceline.bench.turn_log import TurnLog
from paceline.core.errors import IntegrityError
from paceline.core.events import Event
from paceline.llm.boot import Knobs
from paceline.llm.llm import LLM
from paceline.llm.prepare import prepare
from paceline.plan.machine import (
    cache_state,
    kernel_cache,
    seconds_since_process_start,
    settled,
)
from paceline.proof.lossless.judge import Judge
from paceline.proof.lossless.verdicts import Verdict

TRAFFIC_SCALED = "traffic_scaled"  # reason code
MOST_JUDGED = 8  # answers that differ, of which it is asked why


class ThroughputBench:
    """Builds one engine, sends it the passes, and tells."""

    def __init__(self, asked: Mapping[str, object], shape: TrafficShape) -> None:
        """Decides everything; no weight is read.  Raises ConfigError, ModelError."""
        self._prepared = prepare(asked)
        self._traffic = plan_traffic(shape, self._prepared)
        if self._traffic.scaled_by is not None:
            context_len = self._prepared.admission.context_len
            detail = (
                f"the usual lengths are scaled by {self._traffic.scaled_by:.3f}, to fit the "
                f"context of {context_len} tokens"
            )
            self._prepared.events(Event(TRAFFIC_SCALED, detail))
        self._log = TurnLog()

    def run(self) -> ThroughputReport:
        """Boot, send, check.  Raises IntegrityError from a check."""
        entries_before, began = kernel_cache().entries, time.perf_counter()
        llm = LLM(self._prepared, knobs=Knobs(around_turn=self._log.around))
        boot_s, ready_s = time.perf_counter() - began, seconds_since_process_start()
        passes: list[TrafficPass] = []
        check: Check | None = None
        is_cut = False
        try:
            try:
                with settled():  # as a server is
                    for done in self._passes(llm):
                        passes.append(done)
                        if len(passes) == 2:
                            check = compare_passes(llm, self._traffic, *passes)
            except KeyboardInterrupt:
                if check is None:  # nothing that is checked
                    raise
                is_cut = True
        finally:
            llm.close()
        assert check is not None, "the second pass has come"
        first, *steady = passes[0], *passes[2:]
        middle = median_pass(steady)
        return ThroughputReport(
            prepared=self._prepared,
            boot_s=boot_s,
            ready_s=ready_s,
            kernel_cache=cache_state(self._prepared.device.device_type, entries_before),
            traffic=self._traffic,
            check=check,
            first=Summary.of(first),
            within_first=Within.of(first, steady),
            passes=tuple(map(Summary.of, steady)),
            median_pass=None if middle is None else Within.of(middle, steady),
            is_cut=is_cut,
        )

    def _passes(self, llm: LLM) -> Iterator[TrafficPass]:
        traffic = self._traffic
        yield run_pass(llm, self._log, traffic.arrivals(0), name="first")
        yield run_pass(llm, self._log, traffic.arrivals(0, check=True), name="check")
        for number in range(1, traffic.shape.repeats + 1):
            yield run_pass(llm, self._log, traffic.arrivals(number), name=f"steady {number}")


def compare_passes(llm: LLM, traffic: Traffic, first: TrafficPass, second: TrafficPass) -> Check:
    """How many answers of two passes of the same requests differ, and why.

    Steps of other shapes round otherwise, so an answer may differ where tokens tie; of the first
    MOST_JUDGED that differ each is judged.  Raises IntegrityError for one that is no tie.
    """
    differing = [
        index
        for index, (one, other) in enumerate(zip(first.tokens, second.tokens, strict=True))
        if one != other
    ]
    judged = differing[:MOST_JUDGED]
    judge = Judge(llm) if judged else None
    for index in judged:
        assert judge is not None
        prompt = first.outputs[index].prompt_token_ids
        params = traffic.arrivals(0)[index].params
        parting = judge.part(prompt, first.tokens[index], second.tokens[index], params)
        assert parting is not None, "they differ"
        if judge.verdict(parting) is Verdict.BUG:
            raise IntegrityError.about(
                f"tokens of request {index}, sent twice",
                expected="the same, up to ties",
                got=f"token {parting.got} for {parting.wanted} at output {parting.index}, "
                f"{parting.gap_ulps} ulps apart",
                remedy="do not trust a timing of this configuration; try --enforce-eager",
            )
    return Check(
        repeat_seconds=second.seconds,
        equal=len(first.tokens) - len(differing),
        differ=len(differing),
        judged_ties=len(judged),
        same_steps=_steps(first) == _steps(second),
    )


def _steps(done: TrafficPass) -> list[tuple[int, int]]:
    """What was computed together, turn by turn."""
    steps = (turn.launched for turn in done.turns)
    return [(step.rows, step.tokens) for step in steps if step is not None]


def bench_throughput(asked: Mapping[str, object], shape: TrafficShape) -> ThroughputReport:
    """Run the benchmark.  Raises ConfigError, ModelError, IntegrityError."""
    return ThroughputBench(asked, shape).run()
