"""What passes of traffic come to: rates, percentiles, the excess of turns, time by kind of step."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, NamedTuple

from paceline.bench.traffic.one_pass import TrafficPass
from paceline.bench.traffic.waits import Percentiles, quantiles_ms
from paceline.bench.turn_log import StepFacts, StepKind, TimedTurn
from paceline.core.step import RunKind

NUM_LONGEST = 10  # turns told one by one
NUM_SLICES = 40  # of a pass's time line
PARTS = ("schedule", "launch", "wait", "process", "text")  # of a turn
IDLE = "idle"  # the kind of a turn that had no step


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One pass in numbers."""

    seconds: float
    output_tok_s: float
    total_tok_s: float
    decode_tok_s: float | None  # while every request decodes
    ttft_ms: Percentiles | None
    inter_token_ms: Percentiles | None
    turns: int
    cached_tokens: int
    preemptions: int

    @classmethod
    def of(cls, done: TrafficPass) -> "Summary":
        output, prompt = done.num_output_tokens, done.num_prompt_tokens
        return cls(
            seconds=done.seconds,
            output_tok_s=output / done.seconds,
            total_tok_s=(output + prompt) / done.seconds,
            decode_tok_s=_decode_rate(done),
            ttft_ms=Percentiles.of(done.ttft_s),
            inter_token_ms=Percentiles.of(done.gaps_s),
            turns=len(done.turns),
            cached_tokens=done.num_cached_tokens,
            preemptions=done.num_preemptions,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A number of several passes."""

    median: float
    spread: float  # (largest - least) / median

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """values: at least one."""
        middle = median(values)
        return cls(median=middle, spread=(max(values) - min(values)) / middle if middle else 0.0)


def over_passes(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The Spread of each number in the documents of passes; None of none."""
    if not rows:
        return None
    found: dict[str, Any] = {}
    for name, value in rows[0].items():
        values = [row[name] for row in rows]
        if isinstance(value, dict):
            found[name] = over_passes(values)
        else:
            found[name] = None if None in values else asdict(Spread.of(values))
    return found


def median_pass(passes: Sequence[TrafficPass]) -> TrafficPass | None:
    """The one of middle length, the quicker of two; None of none."""
    ordered = sorted(passes, key=lambda done: done.seconds)
    return ordered[(len(ordered) - 1) // 2] if ordered else None


@dataclass(slots=True, kw_only=True)
class KindTime:
    """Where the time of steps of one kind, run in one way, went.  Seconds."""

    kind: str
    run: str
    steps: int = 0
    rows: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    schedule_s: float = 0.0
    launch_s: float = 0.0
    wait_s: float = 0.0
    process_s: float = 0.0
    text_s: float = 0.0

    @property
    def name(self) -> str:
        """Such as "decode graph"."""
        return self.kind if self.kind == self.run else f"{self.kind} {self.run}"

    @property
    def seconds(self) -> float:
        computed = self.schedule_s + self.launch_s
        return computed + self.wait_s + self.process_s + self.text_s

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": self.seconds}


@dataclass(frozen=True, slots=True, kw_only=True)
class LongTurn:
    """One of the longest turns."""

    turn: TimedTurn
    excess_ms: float | None  # beyond a steady turn of the same steps

    def to_json(self) -> dict[str, Any]:
        turn = self.turn
        return {
            "began_s": turn.began_s,
            "ms": 1e3 * turn.seconds,
            "excess_ms": self.excess_ms,
            **{f"{part}_ms": 1e3 * getattr(turn, f"{part}_s") for part in PARTS},
            "launched": _step(turn.launched),
            "received": _step(turn.landed),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Of a pass's time."""

    slice_s: float
    output_tok_s: tuple[float, ...]  # [NUM_SLICES] of each slice

    @classmethod
    def of(cls, done: TrafficPass) -> "Timeline":
        slice_s, tokens = done.seconds / NUM_SLICES, [0] * NUM_SLICES
        for turn in done.turns:
            if turn.num_tokens:
                tokens[min(NUM_SLICES - 1, int(turn.ended_s / slice_s))] += turn.num_tokens
        return cls(slice_s=slice_s, output_tok_s=tuple(count / slice_s for count in tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """One pass from within."""

    kinds: tuple[KindTime, ...]  # the most time first
    excess_ms: Percentiles | None  # of turns, beyond steady ones of the same steps
    longest: tuple[LongTurn, ...]
    timeline: Timeline
    ttft_ms: tuple[float, ...]  # of QUANTILES; empty of nothing
    inter_token_ms: tuple[float, ...]  # likewise

    @classmethod
    def of(cls, done: TrafficPass, steady: Sequence[TrafficPass]) -> "Details":
        """steady: those by which the excess of its turns is told."""
        excess_s = Steady(steady).excess_s(done.turns) if steady else None
        told = sorted(range(len(done.turns)), key=lambda index: -done.turns[index].seconds)
        return cls(
            kinds=tuple(time_by_kind(done)),
            excess_ms=None if excess_s is None else Percentiles.of(excess_s),
            longest=tuple(
                LongTurn(
                    turn=done.turns[index],
                    excess_ms=None if excess_s is None else 1e3 * excess_s[index],
                )
                for index in told[:NUM_LONGEST]
            ),
            timeline=Timeline.of(done),
            ttft_ms=quantiles_ms(done.ttft_s),
            inter_token_ms=quantiles_ms(done.gaps_s),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Within:
    """Where the time of one pass went."""

    outside_s: float  # what was not in a turn
    details: Details

    @classmethod
    def of(cls, done: TrafficPass, steady: Sequence[TrafficPass]) -> "Within":
        """steady: see Details."""
        inside_s = sum(turn.seconds for turn in done.turns)
        outside_s = max(0.0, done.turns[-1].ended_s - inside_s)
        return cls(outside_s=outside_s, details=Details.of(done, steady))


class _Shape(NamedTuple):
    """What a step costs by: two of one shape take one time, whatever runs them."""

    kind: StepKind
    padded_rows: int
    padded_tokens: int

    @classmethod
    def of(cls, step: StepFacts | None) -> "_Shape | None":
        return None if step is None else cls(step.kind, step.padded_rows, step.padded_tokens)


_Pair = tuple[_Shape | None, _Shape | None]  # of the steps a turn receives and launches


class Steady:
    """How long turns take once nothing is new: the median of those with the same steps, of which
    none was captured; where there is none, of those nearest in tokens.
    """

    def __init__(self, passes: Sequence[TrafficPass]) -> None:
        """passes: at least one."""
        turns = [turn for done in passes for turn in done.turns]
        calm = [turn for turn in turns if not _is_capture(turn)]
        found: dict[_Pair, list[float]] = defaultdict(list)
        for turn in calm or turns:
            found[_pair(turn)].append(turn.seconds)
        self._seconds = {pair: median(values) for pair, values in found.items()}

    def excess_s(self, turns: Sequence[TimedTurn]) -> list[float]:
        """[num_turns] how much longer each took; never below 0."""
        return [max(0.0, turn.seconds - self._expected(_pair(turn))) for turn in turns]

    def _expected(self, pair: _Pair) -> float:
        if pair not in self._seconds:
            nearest = min(self._seconds, key=lambda other: _distance(pair, other))
            self._seconds[pair] = self._seconds[nearest]
        return self._seconds[pair]


def _pair(turn: TimedTurn) -> _Pair:
    return _Shape.of(turn.landed), _Shape.of(turn.launched)


def _is_capture(turn: TimedTurn) -> bool:
    return turn.launched is not None and turn.launched.run is RunKind.CAPTURE


def _distance(one: _Pair, other: _Pair) -> tuple[int, int]:
    """(steps of another kind, tokens apart)."""
    steps = list(zip(one, other, strict=True))
    kinds = sum((a and a.kind) != (b and b.kind) for a, b in steps)
    tokens = [((a.padded_tokens if a else 0), (b.padded_tokens if b else 0)) for a, b in steps]
    return kinds, sum(abs(a - b) for a, b in tokens)


def time_by_kind(done: TrafficPass) -> list[KindTime]:
    """A row per kind of step and how it ran, the most time first; their seconds and `outside` (the
    sender's own, and waiting for requests) add up to the pass.

    Each part of a turn counts for the step it served: schedule and launch for the one launched,
    wait, process and text for the one received.
    """
    rows: dict[tuple[str, str], KindTime] = {}

    def row(step: StepFacts | None) -> KindTime:
        kind, run = (IDLE, IDLE) if step is None else (step.kind.value, step.run.value)
        return rows.setdefault((kind, run), KindTime(kind=kind, run=run))

    for turn in done.turns:
        launched, landed = row(turn.launched or turn.landed), row(turn.landed or turn.launched)
        if turn.launched is not None:
            launched.steps += 1
            launched.rows += turn.launched.rows
            launched.tokens += turn.launched.tokens
            launched.padded_tokens += turn.launched.padded_tokens
        launched.schedule_s += turn.schedule_s
        launched.launch_s += turn.launch_s
        landed.wait_s += turn.wait_s
        landed.process_s += turn.process_s
        landed.text_s += turn.text_s
    return sorted(rows.values(), key=lambda each: -each.seconds)


def _decode_rate(done: TrafficPass) -> float | None:
    """Tokens per second while every request decodes: behind the last first token, until the first
    request ends.  None where that time is empty.
    """
    has_first = {name: turn.ended_s for turn in reversed(done.turns) for name in turn.receivers}
    begin = max(has_first.values())
    end = next(turn.ended_s for turn in done.turns if turn.num_finished)
    if end <= begin:
        return None
    tokens = sum(turn.num_tokens for turn in done.turns if begin < turn.ended_s <= end)
    return tokens / (end - begin)


def _step(step: StepFacts | None) -> dict[str, Any] | None:
    if step is None:
        return None
    return {**step._asdict(), "kind": step.kind.value, "run": step.run.value}
