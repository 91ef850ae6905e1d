"""What became of the mutants: killed, explained as equivalent, or survived without a reason."""

import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mutant_child import Verdict
from mutant_source import Mutant


@dataclass(frozen=True, slots=True)
class Result:
    """One mutant's end."""

    mutant: Mutant
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Equivalent:
    """Why a mutant cannot be observed.  Found by its lines, wherever they move."""

    file: str
    function: str
    before: str
    after: str
    reason: str

    def fits(self, mutant: Mutant) -> bool:
        theirs = (mutant.file, mutant.function, mutant.before, mutant.after)
        return theirs == (self.file, self.function, self.before, self.after)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A campaign's results, sorted."""

    killed: list[Result]
    equivalent: list[tuple[Result, str]]  # with the reason
    survived: list[Result]
    stale: list[Equivalent]  # explanations of nothing

    @property
    def is_clean(self) -> bool:
        return not self.survived and not self.stale


def read_equivalents(path: Path) -> list[Equivalent]:
    """One entry per edit of the file.  Raises ValueError for a reason that is empty."""
    entries = []
    for group in tomllib.loads(path.read_text(encoding="utf-8")).get("equivalent", ()):
        if not group["reason"].strip():
            raise ValueError(f"{path}: a reason of {group['file']} is empty")
        for before, after in group["edits"]:
            entries.append(
                Equivalent(group["file"], group["function"], before, after, group["reason"].strip())
            )
    return entries


def explained(
    results: Sequence[Result], entries: Sequence[Equivalent], *, is_whole: bool
) -> Outcome:
    """Sort the results; is_whole: every mutant ran, so that an unused explanation is stale."""
    outcome = Outcome([], [], [], [])
    used: set[Equivalent] = set()
    for result in results:
        if result.verdict.killer is not None:
            outcome.killed.append(result)
            continue
        fitting = [entry for entry in entries if entry.fits(result.mutant)]
        if fitting:
            used.add(fitting[0])
            outcome.equivalent.append((result, fitting[0].reason))
        else:
            outcome.survived.append(result)
    if is_whole:
        outcome.stale.extend(entry for entry in entries if entry not in used)
    return outcome


def report(outcome: Outcome, *, seconds: float) -> dict[str, object]:
    """Print the table and what is unexplained; returns the summary."""
    groups = {
        "killed": outcome.killed,
        "equivalent": [result for result, _ in outcome.equivalent],
        "survived": outcome.survived,
    }
    files = Counter((r.mutant.file, kind) for kind, found in groups.items() for r in found)
    names = sorted({file for file, _ in files})
    print(f"{'file':<48}" + "".join(f"{kind:>12}" for kind in groups))
    for name in names:
        print(f"{name:<48}" + "".join(f"{files[name, kind]:>12}" for kind in groups))
    for result in outcome.survived:
        mutant = result.mutant
        print(f"survived: {mutant.id} in {mutant.function}\n  {mutant.before}\n  {mutant.after}")
    for entry in outcome.stale:
        print(f"explains nothing: {entry.file} {entry.function}\n  {entry.before}\n  {entry.after}")
    return {
        "mutants": sum(len(found) for found in groups.values()),
        **{kind: len(found) for kind, found in groups.items()},
        "seconds": round(seconds),
        "files": {name: {kind: files[name, kind] for kind in groups} for name in names},
        "killed_by": dict(Counter(_kind(r.verdict) for r in outcome.killed).most_common()),
        "equivalents": _by_reason(outcome),
        "survivors": [result.mutant.id for result in outcome.survived],
    }


def _kind(verdict: Verdict) -> str:
    killer = verdict.killer or ""
    if ".py" in killer:
        return "test"
    return "cell" if "/" in killer else killer


def _by_reason(outcome: Outcome) -> list[dict[str, object]]:
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for result, reason in outcome.equivalent:
        mutant = result.mutant
        key = mutant.file, mutant.function, reason
        reasons.setdefault(key, []).append(mutant.after)
    return [
        {"file": file, "function": function, "reason": reason, "mutants": mutants}
        for (file, function, reason), mutants in sorted(reasons.items())
    ]
