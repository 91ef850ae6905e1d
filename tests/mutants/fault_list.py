"""Faults written by hand: what an engineer might get wrong, and which tests must notice."""

import runpy
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mutant_child import ROOT, Verdict

# The package is imported by the children alone; this module of it imports nothing of ours.
_ANCHORS = runpy.run_path(str(ROOT / "src" / "paceline" / "core" / "reverts" / "anchors.py"))
ROOMS = ("engine", "cache", "runner", "sampling", "speculation", "text", "server")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One edit of one module."""

    id: str
    room: str  # one of ROOMS
    module: str  # dotted
    symbol: str  # qualified name within it
    find: str  # occurs once in the symbol
    replace: str
    tests: tuple[str, ...]  # files below tests/, or ids of tests in them
    equivalent: str | None = None  # why nobody can see it; None: some test must

    def applied(self, package: Path) -> str:
        """The edited source.  Raises ValueError where the place is not there once."""
        home = package.joinpath(*self.module.split(".")[1:])
        path = home / "__init__.py" if home.is_dir() else home.with_suffix(".py")
        try:
            source = path.read_text(encoding="utf-8")
            edited: str = _ANCHORS["replaced"](source, self.symbol, self.find, self.replace)
            return edited
        except _ANCHORS["AnchorError"] as error:
            raise ValueError(
                f"what fault '{self.id}' edits must be once in {self.module}, got {error}; write "
                "it for the source as it is now"
            ) from error


def read_faults(path: Path) -> list[Fault]:
    """Raises ValueError for an id given twice, an unknown room, no tests, an empty reason."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["fault"]
    faults = [Fault(**entry | {"tests": tuple(entry["tests"])}) for entry in entries]
    for name, count in Counter(fault.id for fault in faults).items():
        if count > 1:
            raise ValueError(f"{path.name}: the id '{name}' is given {count} times")
    for fault in faults:
        if fault.room not in ROOMS:
            raise ValueError(f"{path.name}: '{fault.id}' is of room {fault.room}, not of {ROOMS}")
        if not fault.tests:
            raise ValueError(f"{path.name}: '{fault.id}' names no tests")
        if fault.equivalent is not None and not fault.equivalent.strip():
            raise ValueError(f"{path.name}: '{fault.id}' is equivalent for no reason")
    return faults


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the faults that ran."""

    verdicts: Mapping[str, Verdict]  # by id
    faults: Sequence[Fault]

    @property
    def killed(self) -> list[Fault]:
        return [each for each in self.faults if self.verdicts[each.id].killer is not None]

    @property
    def survived(self) -> list[Fault]:
        """Those that should have been noticed."""
        return [each for each in self._silent if each.equivalent is None]

    @property
    def equivalent(self) -> list[Fault]:
        return [each for each in self._silent if each.equivalent is not None]

    @property
    def stale(self) -> list[Fault]:
        """Called equivalent, and noticed."""
        return [each for each in self.killed if each.equivalent is not None]

    @property
    def is_clean(self) -> bool:
        return not self.survived and not self.stale

    @property
    def _silent(self) -> list[Fault]:
        return [each for each in self.faults if self.verdicts[each.id].killer is None]


def report(outcome: Outcome, *, seconds: float) -> dict[str, object]:
    """Print the table and what is unexplained; returns the summary."""
    groups = {name: getattr(outcome, name) for name in ("killed", "equivalent", "survived")}
    counts = Counter((fault.room, name) for name, found in groups.items() for fault in found)
    rooms = [room for room in ROOMS if any(fault.room == room for fault in outcome.faults)]
    print(f"{'room':<16}" + "".join(f"{name:>12}" for name in groups))
    for room in rooms:
        print(f"{room:<16}" + "".join(f"{counts[room, name]:>12}" for name in groups))
    for fault in outcome.survived:
        print(f"survived: {fault.id} ({fault.module}); looked: {', '.join(fault.tests)}")
    for fault in outcome.stale:
        killer = outcome.verdicts[fault.id].killer
        print(f"called equivalent, noticed by {killer}: {fault.id} ({fault.module})")
    return {
        "faults": len(outcome.faults),
        **{name: len(found) for name, found in groups.items()},
        "seconds": round(seconds),
        "rooms": {room: {name: counts[room, name] for name in groups} for room in rooms},
        "killed_by": {fault.id: outcome.verdicts[fault.id].killer for fault in outcome.killed},
        "equivalents": {fault.id: fault.equivalent for fault in outcome.equivalent},
        "survivors": [fault.id for fault in outcome.survived],
    }
