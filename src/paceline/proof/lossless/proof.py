"""Proof: what `paceline prove` found: answers compared, layers at fault, acceptance by its band."""

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from paceline.engine.acceptance import Acceptance, AcceptanceBand
from paceline.proof.lossless.verdicts import Parting, Verdict


class Outcome(StrEnum):
    """Of a whole run, from good to bad."""

    EQUAL = "equal"
    TIE = "tie"
    COLLAPSE = "collapse"  # equal texts, but far fewer drafts accepted than there should be
    BUG = "bug"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One prompt, answered by both engines."""

    prompt: str  # its name
    num_tokens: int  # of the reference's answer
    parting: Parting | None  # None: the answers are equal
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One contender with one way of sampling."""

    sampling: str  # "greedy" or "seeded"
    answers: tuple[Answered, ...]
    acceptance: Acceptance  # of the contender; no rounds where nobody drafts

    def count(self, verdict: Verdict) -> int:
        """Prompts of this verdict."""
        return Counter(each.verdict for each in self.answers)[verdict]

    @property
    def divergence_rate(self) -> float:
        """Share of prompts whose answers differ, for whatever reason."""
        return 1.0 - self.count(Verdict.EQUAL) / len(self.answers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Where a bug's engines first disagree about the same tokens."""

    prompt: str
    sampling: str
    layer: int | None  # None: every layer agrees
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BandReading:
    """A drafter on the prompts of its band."""

    band: AcceptanceBand
    tokens_per_round: float | None  # None: there was no round
    detail: str | None  # what the engine's own test at boot said; None: it was content

    @property
    def has_collapsed(self) -> bool:
        return (self.tokens_per_round or 0.0) < self.band.least_tokens_per_round


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """One contender against the reference."""

    label: str  # what is different about it
    attention: str
    speculation: str | None  # the drafter in words
    comparisons: tuple[Comparison, ...]
    fault: Fault | None  # of the earliest bug
    band: BandReading | None

    @property
    def outcome(self) -> Outcome:
        if any(each.count(Verdict.BUG) for each in self.comparisons):
            return Outcome.BUG
        if self.band is not None and self.band.has_collapsed:
            return Outcome.COLLAPSE
        has_ties = any(each.count(Verdict.TIE) for each in self.comparisons)
        return Outcome.TIE if has_ties else Outcome.EQUAL


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """A whole run."""

    model: str
    device: str
    dtype: str
    attention: str  # of the reference
    tie_ulps: float
    contests: tuple[Contest, ...]
    is_cut: bool = False  # Ctrl-C came before every contender was judged

    @property
    def outcome(self) -> Outcome:
        """The worst there is."""
        order = list(Outcome)
        return max((each.outcome for each in self.contests), key=order.index)

    @property
    def exit_code(self) -> int:
        return int(self.outcome in (Outcome.BUG, Outcome.COLLAPSE))
