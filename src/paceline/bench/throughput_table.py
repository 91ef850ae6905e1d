"""What `paceline bench throughput` found: its document, its table, its drawings."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.bench.page import Bars, Curves, Drawing
from paceline.bench.subject import (
    attention_words,
    document,
    document_value,
    drafter_words,
    forced_words,
)
from paceline.bench.throughput_report import (
    PARTS,
    KindTime,
    LongTurn,
    Spread,
    Summary,
    Timeline,
    Within,
    over_passes,
)
from paceline.bench.traffic.plan import Traffic
from paceline.bench.traffic.waits import by_share
from paceline.bench.turn_log import StepFacts
from paceline.llm.prepare import Prepared

OPTIONS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "chunked_prefill_size",
    "max_model_len",
    "enable_prefix_cache",
    "enforce_eager",
    "overlap",
)
_WAITS = ("p50", "p90", "p99", "max")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Two passes of the same requests, compared."""

    repeat_seconds: float  # the second one's
    equal: int  # answers
    differ: int
    judged_ties: int  # of those that differ
    same_steps: bool  # whether the same was computed together
    counts_exact: bool = True

    def words(self) -> str:
        """In a line."""
        count = self.equal + self.differ
        words = f"check: counts are exact; sent twice, {self.equal} of {count} answers are equal"
        if not self.differ:
            return words
        steps = "the same" if self.same_steps else "other"
        return (
            f"{words}, {self.differ} differ, computed in {steps} steps: the {self.judged_ties} "
            "looked into are ties"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputReport:
    """What was found."""

    prepared: Prepared  # the engine that served
    boot_s: float
    ready_s: float | None  # behind the start of the process; None: unknown
    kernel_cache: str
    traffic: Traffic
    check: Check
    first: Summary
    within_first: Within
    passes: tuple[Summary, ...]  # the steady ones
    median_pass: Within | None  # of the steady pass of middle length
    is_cut: bool  # by Ctrl-C

    @property
    def to_steady(self) -> float | None:
        """How many times a steady pass the first one took."""
        if not self.passes:
            return None
        return self.first.seconds / Spread.of([each.seconds for each in self.passes]).median

    def to_json(self) -> dict[str, Any]:
        """The document."""
        options, passes = self.prepared.options, document_value(self.passes)
        return {
            **document(self, without=("within_first",)),
            "dtype": options.dtype,
            "options": {name: getattr(options, name) for name in OPTIONS},
            "first": {
                **document_value(self.first),
                **document_value(self.within_first),
                "to_steady": self.to_steady,
            },
            "steady": over_passes(passes),
        }

    def table(self) -> str:
        """For people."""
        options, device = self.prepared.options, self.prepared.device
        told = "unknown" if self.ready_s is None else f"{self.ready_s:.2f} s"
        plan = self.prepared.speculation
        drafter = "" if plan is None else f"speculation {drafter_words(plan)}{forced_words(plan)}"
        rows = [
            f"{options.model} ({options.dtype}) on {device.name}",
            f"boot {self.boot_s:.2f} s, ready {told} after process start, kernel cache "
            f"{self.kernel_cache}",
            attention_words(self.prepared),
            *([drafter] if drafter else []),
            *_traffic(self.traffic, self.prepared),
            self.check.words(),
            *_rates(self),
            "",
            "first pass, beside steady turns of the same steps",
            *_within(self.within_first, device.device_type),
        ]
        if self.median_pass is not None:
            rows += ["", "the steady pass of middle length"]
            rows += _within(self.median_pass, device.device_type)
        return "\n".join(rows)

    def drawings(self) -> list[Drawing]:
        """Rate over time, waits, steps by kind; the first pass beside a steady one."""
        passes = {"first": self.within_first.details}
        if self.median_pass is not None:
            passes["steady"] = self.median_pass.details
        drawn: list[Drawing] = [
            Curves(
                title="Output tokens per second over time [s]",
                curves=[(name, _over_time(within.timeline)) for name, within in passes.items()],
            ),
            Curves(
                title="Time to first token [ms] by share of all [%]",
                curves=[(name, by_share(within.ttft_ms)) for name, within in passes.items()],
            ),
            Curves(
                title="Time between tokens of a request [ms] by share of all [%]",
                curves=[(name, by_share(within.inter_token_ms)) for name, within in passes.items()],
            ),
        ]
        for name, within in passes.items():
            drawn += [
                Bars(
                    title=f"Steps of the {name} pass",
                    rows=[(each.name, each.steps) for each in within.kinds if each.steps],
                    form=",.0f",
                ),
                Bars(
                    title=f"Where the time of the {name} pass went [s]",
                    rows=[
                        (f"{each.name}: {part}", getattr(each, f"{part}_s"))
                        for each in within.kinds
                        for part in PARTS
                    ],
                    form=",.3f",
                ),
            ]
        return drawn


def _traffic(traffic: Traffic, prepared: Prepared) -> list[str]:
    shape, options, scale = traffic.shape, prepared.options, traffic.scaled_by
    shared, rate = shape.shared_prefix_len, shape.request_rate
    sent = "at once" if rate is None else f"at {rate:g} per second"
    return [
        f"{len(traffic.input_lens)} requests {sent}, "
        + (f"{shared} tokens shared and " if shared else "")
        + f"prompts {_lengths(traffic.input_lens)}, outputs {_lengths(traffic.output_lens)}"
        + (f" (the usual lengths x {scale:.3f}, to fit the context)" if scale is not None else ""),
        f"temperature {shape.temperature:g}, top-p {shape.top_p:g}, "
        f"at most {options.max_num_seqs} run; prefix cache "
        f"{'on' if options.enable_prefix_cache else 'off'}, where passes find "
        f"{traffic.found_in_cache}",
    ]


def _lengths(lens: Sequence[int]) -> str:
    least, most = min(lens), max(lens)
    return str(least) if least == most else f"{least}-{most} (mean {sum(lens) / len(lens):.0f})"


def _rates(report: ThroughputReport) -> list[str]:
    rows = [
        "",
        f"{'pass':<10}{'s':>9}{'output tok/s':>14}{'total tok/s':>13}{'decode tok/s':>14}"
        + "".join(f"{f'ttft {name}':>11}" for name in _WAITS)
        + "".join(f"{f'itl {name}':>10}" for name in _WAITS),
        _rate("first", report.first),
        f"{'check':<10}{report.check.repeat_seconds:>9.2f}",
        *(_rate(f"steady {n}", row) for n, row in enumerate(report.passes, 1)),
    ]
    if report.passes:
        rate = Spread.of([each.output_tok_s for each in report.passes])
        total = Spread.of([each.total_tok_s for each in report.passes])
        seconds = Spread.of([each.seconds for each in report.passes])
        rows.append(
            f"median {rate.median:.1f} output tok/s, spread {rate.spread:.1%}, total "
            f"{total.median:.1f}; the first took {report.to_steady:.2f} x "
            f"the steady {seconds.median:.2f} s  (waits in ms)"
        )
    return rows


def _rate(name: str, row: Summary) -> str:
    return (
        f"{name:<10}{row.seconds:>9.2f}{row.output_tok_s:>14.1f}{row.total_tok_s:>13.1f}"
        f"{_number(row.decode_tok_s):>14}"
        + "".join(f"{_number(getattr(row.ttft_ms, each, None)):>11}" for each in _WAITS)
        + "".join(f"{_number(getattr(row.inter_token_ms, each, None)):>10}" for each in _WAITS)
    )


def _within(within: Within, device_type: str) -> list[str]:
    details = within.details
    where = "a CPU runs a step in its launch" if device_type == "cpu" else "seconds"
    rows = [
        f"{'step':<16}{'steps':>7}{'tokens':>9}{'padded':>9}{'waste':>7}"
        + "".join(f"{name:>10}" for name in PARTS)
        + f"{'all s':>9}  ({where})",
        *map(_kind, details.kinds),
        f"{'outside turns':<98}{within.outside_s:>9.3f}",
    ]
    excess = details.excess_ms
    if excess is not None:
        rows.append(
            f"turns beyond their steady time: p50 {excess.p50:.1f} ms, p90 {excess.p90:.1f}, "
            f"p99 {excess.p99:.1f}, max {excess.max:.1f}"
        )
    return [*rows, "longest turns", *map(_turn, details.longest)]


def _kind(row: KindTime) -> str:
    padded = row.padded_tokens
    waste = f"{1 - row.tokens / padded:.1%}" if padded else "-"
    return (
        f"{row.name:<16}{row.steps:>7}{row.tokens:>9}{padded:>9}{waste:>7}"
        + "".join(f"{getattr(row, f'{part}_s'):>10.3f}" for part in PARTS)
        + f"{row.seconds:>9.3f}"
    )


def _turn(row: LongTurn) -> str:
    turn, beyond = row.turn, "" if row.excess_ms is None else f" ({row.excess_ms:.1f} beyond)"
    parts = " ".join(f"{part} {1e3 * getattr(turn, f'{part}_s'):.1f}" for part in PARTS)
    return (
        f"  {1e3 * turn.seconds:.1f} ms{beyond} at {turn.began_s:.2f} s: {parts}; "
        f"launched {_step(turn.launched)}, received {_step(turn.landed)}"
    )


def _step(step: StepFacts | None) -> str:
    if step is None:
        return "nothing"
    return (
        f"{step.kind} {step.run.value} {step.rows} x {step.tokens} tokens "
        f"(padded {step.padded_rows} x {step.padded_tokens})"
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _over_time(line: Timeline) -> list[tuple[float, float]]:
    """Each slice at its middle."""
    return [((index + 0.5) * line.slice_s, rate) for index, rate in enumerate(line.output_tok_s)]
