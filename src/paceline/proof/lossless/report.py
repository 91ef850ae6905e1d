"""A proof for people, and as the document of docs/schemas/prove.json."""

import math
from collections.abc import Iterator

from paceline.core.progress import cut_mark
from paceline.plan.machine import versions
from paceline.proof.lossless.proof import Answered, BandReading, Comparison, Contest, Outcome, Proof
from paceline.proof.lossless.verdicts import Parting, Verdict

_ENDS = {
    Outcome.EQUAL: "every text is equal",
    Outcome.TIE: "the texts are equal up to ties, at which rounding decides",
    Outcome.COLLAPSE: "COLLAPSE: the texts are equal, but far fewer drafts are accepted than this "
    "drafter is known for",
    Outcome.BUG: "BUG: a text differs, and rounding does not explain it",
}


def document(proof: Proof) -> dict[str, object]:
    return {
        "model": proof.model,
        "device": proof.device,
        "dtype": proof.dtype,
        "versions": versions(),
        "reference": {"attention": proof.attention},
        "tie_ulps": proof.tie_ulps,
        "outcome": proof.outcome.value,
        "contests": [_contest(each) for each in proof.contests],
        **cut_mark(proof.is_cut),
    }


def table(proof: Proof) -> str:
    """The proof as lines; every prompt that is not equal has its own."""
    lines = [
        f"{proof.model} on {proof.device}, {proof.dtype}; the reference decodes plainly, attention "
        f"{proof.attention}"
    ]
    for contest in proof.contests:
        lines += ["", *_lines(contest, proof.tie_ulps)]
    return "\n".join([*lines, "", _ENDS[proof.outcome]])


def _lines(contest: Contest, tie_ulps: float) -> Iterator[str]:
    yield f"{contest.label}: attention {contest.attention}"
    if contest.speculation is not None:
        yield f"  {contest.speculation}"
    for each in contest.comparisons:
        counts = ", ".join(f"{each.count(v)} {v.value}" for v in Verdict)
        yield f"  {each.sampling}: {len(each.answers)} prompts, {counts}; " + (
            f"{each.divergence_rate:.0%} diverge; {each.acceptance}"
        )
        for answered in each.answers:
            if answered.parting is not None:
                told = _told(answered.parting, tie_ulps)
                yield f"    {answered.prompt}: {answered.verdict.value} at {told}"
    if contest.fault is not None:
        fault = contest.fault
        yield f"  first fault, behind {fault.prompt} {fault.sampling}: {fault.detail}"
    if contest.band is not None:
        yield f"  {_band_words(contest.band)}"


def _told(parting: Parting, tie_ulps: float) -> str:
    names = ["the end" if each is None else str(each) for each in (parting.wanted, parting.got)]
    gap = ""
    if parting.gap_ulps is not None:
        gap = f", {parting.gap_ulps:.1f} ulps apart (a tie up to {tie_ulps:g})"
    return f"output {parting.index}: token {names[0]} became {names[1]}{gap}"


def _band_words(reading: BandReading) -> str:
    reached = reading.tokens_per_round
    words = "no round" if reached is None else f"{reached:.2f} tokens per round"
    least, usual = reading.band.least_tokens_per_round, reading.band.tokens_per_round
    verdict = "COLLAPSED" if reading.has_collapsed else "within"
    told = f"known-good band: {words}, {verdict}: at least {least:.2f}, usual {usual:.2f}"
    return told if reading.detail is None else f"{told}; at boot: {reading.detail}"


def _contest(contest: Contest) -> dict[str, object]:
    fault, band = contest.fault, contest.band
    return {
        "label": contest.label,
        "attention": contest.attention,
        "speculation": contest.speculation,
        "outcome": contest.outcome.value,
        "comparisons": [_comparison(each) for each in contest.comparisons],
        "fault": None
        if fault is None
        else {
            "prompt": fault.prompt,
            "sampling": fault.sampling,
            "layer": fault.layer,
            "detail": fault.detail,
        },
        "band": None
        if band is None
        else {
            "mean_tokens_per_round": band.tokens_per_round,
            "usual": band.band.tokens_per_round,
            "least": band.band.least_tokens_per_round,
            "detail": band.detail,
        },
    }


def _comparison(comparison: Comparison) -> dict[str, object]:
    return {
        "sampling": comparison.sampling,
        **{each.value: comparison.count(each) for each in Verdict},
        "divergence_rate": comparison.divergence_rate,
        "acceptance": comparison.acceptance.to_json(),
        "answers": [_answered(each) for each in comparison.answers],
    }


def _answered(answered: Answered) -> dict[str, object]:
    """An infinite gap, of a token that a filter keeps out, is null: JSON has no word for it."""
    parting = answered.parting
    row: dict[str, object] = {
        "prompt": answered.prompt,
        "num_tokens": answered.num_tokens,
        "verdict": answered.verdict.value,
    }
    if parting is None:
        return row | {"parting": None}
    gap = parting.gap_ulps
    return row | {
        "parting": {
            "index": parting.index,
            "wanted": parting.wanted,
            "got": parting.got,
            "gap_ulps": None if gap is None or math.isinf(gap) else gap,
        }
    }
