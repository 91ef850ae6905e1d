"""One mutant's fate: a forked process with the mutated module, killer cells, then tests.

The parent has imported what is slow and nothing of the package, so that a child imports the package
anew.  The child writes one line to a pipe: the cell or test that failed first, and how.
"""

import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "proof"))  # holds named_cell
PASSING = {"proven", "emulated"}
_PATIENCE = 20  # how much longer a child may sleep or wait than work


@dataclass(frozen=True, slots=True)
class Killers:
    """What may kill a mutant, in order."""

    cells: tuple[str, ...]
    tests: tuple[str, ...]  # files below tests/, or ids of tests in them


@dataclass(frozen=True, slots=True)
class Verdict:
    """killer: what failed first; None: everything passed."""

    killer: str | None
    reason: str


SURVIVED = Verdict(None, "")


def start(sources: Mapping[str, str], killers: Killers, *, limit_s: int) -> tuple[int, int]:
    """Fork; returns the child's process id and the pipe that its verdict comes by.

    limit_s: CPU seconds of the child.
    """
    ours, theirs = os.pipe()
    child = os.fork()
    if child:
        os.close(theirs)
        return child, ours
    os.close(ours)
    signal.setitimer(signal.ITIMER_PROF, limit_s)  # at work; a loaded machine kills no mutant
    signal.alarm(_PATIENCE * limit_s)  # and asleep
    assert "paceline" not in sys.modules, "the package is imported by the child alone"
    _silence()
    verdict = judge(sources, killers)
    os.write(theirs, json.dumps([verdict.killer, verdict.reason]).encode())
    os._exit(0)


def collect(pipe: int, status: int) -> Verdict:
    """The verdict of a child that has ended with a wait status."""
    with os.fdopen(pipe) as stream:
        text = stream.read()
    if text:
        return Verdict(*json.loads(text))
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        is_hang = number in (signal.SIGPROF, signal.SIGALRM)
        return Verdict("timeout" if is_hang else "crash", signal.Signals(number).name)
    return Verdict("crash", f"exit code {os.WEXITSTATUS(status)}")


def judge(sources: Mapping[str, str], killers: Killers) -> Verdict:
    """Run the killers until one fails, on modules with these sources."""
    try:
        from paceline.core.reverts.hook import RevertingFinder

        sys.meta_path.insert(0, RevertingFinder(sources))
        for cell in killers.cells:
            verdict = _run_cell(cell)
            if verdict.killer is not None:
                return verdict
    except Exception:  # noqa: BLE001  a mutated module may fail in any way
        return Verdict("import", _last_line(traceback.format_exc()))
    return run_tests(killers.tests)


def run_tests(tests: Sequence[str]) -> Verdict:
    """Run test files in this process; stops at the first failure."""
    if not tests:
        return SURVIVED
    recorder = _FirstFailure()
    # No timeouts of single tests: they would reset the alarm of the whole.
    flags = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:faulthandler", "--timeout", "0"]
    flags += [
        "-p",
        "no:unraisableexception",
        "-W",
        "ignore::pytest.PytestAssertRewriteWarning",
    ]
    paths = [str(ROOT / "tests" / test) for test in tests]
    flags += ["-m", "not gpu and not slow", "--rootdir", str(ROOT)]
    with tempfile.TemporaryDirectory() as folder:  # the shared one is swept by whoever ends
        code = pytest.main([*flags, "--basetemp", folder, *paths], plugins=[recorder])
    if recorder.verdict.killer is None and code != pytest.ExitCode.OK:
        return Verdict("pytest", f"exit code {int(code)}")
    return recorder.verdict


class _FirstFailure:
    """A pytest plugin that remembers what failed first."""

    def __init__(self) -> None:
        self.verdict = SURVIVED

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._note(report.nodeid, report.longreprtext)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._note(report.nodeid, report.longreprtext)

    def _note(self, test: str, text: str) -> None:
        if self.verdict.killer is None:
            self.verdict = Verdict(test.removeprefix("tests/"), _last_line(text))


def _run_cell(cell: str) -> Verdict:
    from named_cell import run_named

    result = run_named(cell)
    if result.status.value in PASSING:
        return SURVIVED
    return Verdict(cell, f"{result.status.value}: {result.reason}"[:300])


def _silence() -> None:
    """What a child prints is noise."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(null, stream)


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else ""
