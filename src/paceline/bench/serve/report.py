"""What a load came to: its document, its table, its drawings."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.bench.page import Bars, Curves, Drawing
from paceline.bench.serve.load import Answer, Load
from paceline.bench.serve.shape import LoadShape, Slo
from paceline.bench.traffic.waits import Percentiles, by_share, quantiles_ms
from paceline.core.progress import cut_mark
from paceline.plan.machine import installed

_NUM_SLICES = 40  # of the load's time line
_WAITS: dict[str, str] = {
    "ttft_ms": "time to first token",
    "inter_token_ms": "per further token, mean of a request",
    "gap_ms": "between two events of a stream",
    "e2e_ms": "whole answer",
    "queue_ms": "until the engine began",
    "late_ms": "the client sent late",
}


def waits_of(answers: Sequence[Answer]) -> dict[str, list[float]]:
    """[s] of answers that are good, by the names of _WAITS."""
    good = [answer for answer in answers if answer.is_good]
    pairs = [
        pair for answer in good for pair in zip(answer.came_s, answer.came_s[1:], strict=False)
    ]
    return {
        "ttft_ms": _present(answer.ttft_s for answer in good),
        "inter_token_ms": _present(answer.inter_token_s for answer in good),
        "gap_ms": [later - earlier for earlier, later in pairs],
        "e2e_ms": [answer.e2e_s for answer in good],
        "queue_ms": _present(answer.queue_s for answer in good),
        "late_ms": [answer.sent_s - answer.due_s for answer in answers],
    }


def _present(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def keeps(answer: Answer, slo: Slo) -> bool:
    """Whether an answer is good enough; where there was nothing to measure, it is."""
    found = {"ttft": answer.ttft_s, "inter_token": answer.inter_token_s, "e2e": answer.e2e_s}
    limits = slo.asked.items()
    return answer.is_good and all(1e3 * (found[name] or 0.0) <= limit for name, limit in limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAnswers:
    """Of one kind."""

    count: int
    first: str  # what it said


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Answers that keep the SLO."""

    requests_s: float
    share: float  # of all answers


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRates:
    """Per second, from the begin to the last end."""

    requests_s: float
    output_tok_s: float
    total_tok_s: float
    mean_running: float  # requests at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTimeline:
    """By slices of the load's time, [_NUM_SLICES] each."""

    slice_s: float
    output_tok_s: list[float]
    running: list[int]  # requests in the middle of the slice
    failed: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeReport:
    """What was found.  A `Report` of bench/page.py."""

    shape: LoadShape
    load: Load
    started: tuple[str, ...] | None  # words of the server that was started here; None: none was

    @property
    def is_cut(self) -> bool:
        return self.load.is_cut

    @property
    def good(self) -> list[Answer]:
        """Answers that came whole."""
        return [answer for answer in self.load.answers if answer.is_good]

    @property
    def errors(self) -> dict[str, FailedAnswers]:
        """By kind."""
        counts = Counter(answer.error for answer in self.load.answers if answer.error is not None)
        first: dict[str, str] = {}
        for answer in self.load.answers:
            if answer.error is not None:
                first.setdefault(answer.error, answer.details)
        return {
            kind: FailedAnswers(count=counts[kind], first=first[kind]) for kind in sorted(counts)
        }

    @property
    def goodput(self) -> Goodput | None:
        """None where there is no SLO."""
        if not self.shape.slo.asked:
            return None
        kept = sum(keeps(answer, self.shape.slo) for answer in self.load.answers)
        share = kept / len(self.load.answers)
        return Goodput(requests_s=kept / self.load.seconds, share=share)

    @property
    def rates(self) -> LoadRates:
        """Of answers that came whole."""
        seconds, good = self.load.seconds, self.good
        outputs = sum(answer.output_tokens for answer in good)
        prompts = sum(answer.prompt_tokens for answer in good)
        return LoadRates(
            requests_s=len(good) / seconds,
            output_tok_s=outputs / seconds,
            total_tok_s=(outputs + prompts) / seconds,
            mean_running=sum(answer.ended_s - answer.sent_s for answer in self.load.answers)
            / seconds,
        )

    def to_json(self) -> dict[str, Any]:
        """The document."""
        load, good = self.load, self.good
        waits, goodput = waits_of(load.answers), self.goodput
        return {
            "benchmark": "serve",
            "server": {
                "base_url": load.target.base_url,
                "model": load.target.model,
                "context_len": load.target.context_len,
                "started_with": None if self.started is None else list(self.started),
            },
            "versions": installed(["paceline", "h11"]),
            "load": self.shape.to_json(),
            "tokens": {
                "counted_by": "the server's usage",
                "prompt": sum(answer.prompt_tokens for answer in good),
                "cached": sum(answer.cached_tokens for answer in good),
                "output": sum(answer.output_tokens for answer in good),
                "per_char": load.scale.per_char,
            },
            "texts_checked_twice": self.shape.checks,
            "requests": {
                "asked": load.num_asked,
                "answered": len(good),
                "failed": len(load.answers) - len(good),
            },
            "errors": {kind: asdict(failed) for kind, failed in self.errors.items()},
            "seconds": load.seconds,
            **asdict(self.rates),
            "goodput": None if goodput is None else asdict(goodput),
            "waits": {name: _told(Percentiles.of(waits[name])) for name in _WAITS},
            "quantiles_ms": {name: list(quantiles_ms(waits[name])) for name in _WAITS},
            "timeline": asdict(self._timeline()),
            **cut_mark(load.is_cut),
        }

    def table(self) -> str:
        """For people."""
        load, rates = self.load, self.rates
        good, errors = self.good, self.errors
        prompts = sum(answer.prompt_tokens for answer in good)
        cached = sum(answer.cached_tokens for answer in good)
        outputs = sum(answer.output_tokens for answer in good)
        count = max(1, len(good))
        rows = [
            f"{load.target.model} at {load.target.base_url}: {self.shape.loop_words}",
            f"{len(good)} of {load.num_asked} answered in {load.seconds:.2f} s; prompts "
            f"{prompts / count:.0f} tokens ({cached / max(1, prompts):.0%} cached), outputs "
            f"{outputs / count:.0f}, by the server's counts",
            f"{rates.requests_s:.2f} requests/s, {rates.output_tok_s:.1f} output tok/s, "
            f"{rates.total_tok_s:.1f} total tok/s, {rates.mean_running:.1f} at a time",
        ]
        for kind, failed in errors.items():
            rows.append(f"ERROR {failed.count} x {kind}: {failed.first}")
        goodput = self.goodput
        if goodput is not None:
            slo = ", ".join(
                f"{name} <= {limit:g} ms" for name, limit in self.shape.slo.asked.items()
            )
            rows.append(f"goodput {goodput.requests_s:.2f} requests/s, {goodput.share:.1%} ({slo})")
        rows.append(f"{'[ms]':<40}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}")
        for name, seconds in waits_of(load.answers).items():
            found = Percentiles.of(seconds)
            if found is not None:
                numbers = "".join(f"{value:>10.1f}" for value in asdict(found).values())
                rows.append(f"{_WAITS[name]:<40}{numbers}")
        return "\n".join(rows)

    def drawings(self) -> list[Drawing]:
        """Rates and requests over time, waits, errors."""
        line = self._timeline()

        def over_time(values: Sequence[float]) -> list[tuple[float, float]]:
            return [((index + 0.5) * line.slice_s, value) for index, value in enumerate(values)]

        waits = waits_of(self.load.answers)
        drawn: list[Drawing] = [
            Curves(
                title="Output tokens per second over time [s]",
                curves=[("tokens", over_time(line.output_tok_s))],
            ),
            Curves(
                title="Requests at a time over time [s]",
                curves=[("running", over_time(line.running)), ("failed", over_time(line.failed))],
            ),
        ]
        for name, words in _WAITS.items():
            drawn.append(
                Curves(
                    title=f"{words.capitalize()} [ms] by share of all [%]",
                    curves=[(name, by_share(quantiles_ms(waits[name])))],
                )
            )
        counts = [(kind, float(failed.count)) for kind, failed in self.errors.items()]
        return [*drawn, Bars(title="Errors", rows=counts, form=",.0f")]

    def _timeline(self) -> LoadTimeline:
        """An answer's tokens are shared among its events."""
        slice_s = self.load.seconds / _NUM_SLICES

        def counted(times: Callable[[Answer], Iterable[tuple[float, float]]]) -> list[float]:
            found = [0.0] * _NUM_SLICES
            for answer in self.load.answers:
                for when, amount in times(answer):
                    found[min(_NUM_SLICES - 1, int(when / slice_s))] += amount
            return found

        tokens = counted(
            lambda answer: [
                (when, answer.output_tokens / len(answer.came_s)) for when in answer.came_s
            ]
        )
        failed = counted(lambda answer: [] if answer.is_good else [(answer.ended_s, 1.0)])
        middles = [(index + 0.5) * slice_s for index in range(_NUM_SLICES)]
        return LoadTimeline(
            slice_s=slice_s,
            output_tok_s=[amount / slice_s for amount in tokens],
            running=[
                sum(answer.sent_s <= middle < answer.ended_s for answer in self.load.answers)
                for middle in middles
            ],
            failed=failed,
        )


def _told(found: Percentiles | None) -> dict[str, float] | None:
    return None if found is None else asdict(found)
