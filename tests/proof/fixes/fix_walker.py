"""Runs cases with bugs switched back on: one process per bug, forked behind the heavy imports.

    python fix_walker.py < jobs > results

jobs: JSON [[fix id, case], ...]; results: one JSON line each, {fix, case, status, reason}.
The parent imports what is slow, and of the package what needs no module that a job edits: those,
and what imports them, every child imports anew, with its own edits.
"""

import contextlib
import gc
import io
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from importlib.abc import MetaPathFinder
from pathlib import Path

import hypothesis  # noqa: F401
import numpy  # noqa: F401
import pytest
import torch
import transformers.models.llama.modeling_llama  # noqa: F401
import triton.language  # noqa: F401

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "src" / "paceline"
ROOMS = ("attention", "cache", "core", "kernels", "layers", "models", "proof", "runner")
sys.path += [str(ROOT / "tests" / room) for room in ("", "models", "proof")]
import tiny_checkpoints  # noqa: E402

from paceline.core.reverts.hook import revert  # noqa: E402
from paceline.proof.fixes.registry import all_fixes  # noqa: E402
from patched_once import patch_once  # noqa: E402

WORKERS = 2
SECONDS = 60  # of the processor, for a child
_OPTIONS = (
    "--capture=no",
    f"--rootdir={ROOT}",
    "-pno:cacheprovider",
    "-pno:xdist",  # imports that no case needs
    "-pno:anyio",
    "-pno:unraisableexception",  # what the parent left uncollected is not the case's fault
    "-otimeout=0",  # a child has its own
    "-Wignore:Module already imported",  # before the fork
)


def main() -> int:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:  # transformers builds tables at its first
        tiny_checkpoints.save("llama-gqa2-untied", Path(folder))
    gc.disable()  # an import of many modules looks for none: a child ends soon
    jobs = json.load(sys.stdin)
    import_what_needs_none(edited_by({fix for fix, _ in jobs}))
    gc.freeze()  # pytest collects garbage twice in every child; theirs is theirs alone
    running: set[int] = set()
    while jobs or running:
        while jobs and len(running) < WORKERS:
            running.add(_start(*jobs.pop(0)))
        done, _ = os.wait()
        running.remove(done)
    return 0


def edited_by(fixes: Iterable[str]) -> set[str]:
    """The modules that the edits of any of these are in."""
    return {module for fix in all_fixes() if fix.id in fixes for module in fix.modules}


def import_what_needs_none(edited: set[str]) -> None:
    """Import the modules of the package that import none of these, nor one that does."""
    refusing = _Refusing(edited)
    sys.meta_path.insert(0, refusing)
    for room in ROOMS:
        for path in sorted((PACKAGE / room).rglob("*.py")):
            parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
            with suppress(ImportError):  # of one that is edited, or a vendor's
                import_module(".".join(parts).removesuffix(".__init__"))
    sys.meta_path.remove(refusing)


class _Refusing(MetaPathFinder):
    """Fails the import of some modules, and so that of what imports them."""

    def __init__(self, modules: set[str]) -> None:
        self._modules = modules

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname in self._modules:
            raise ImportError(fullname)


def _start(fix: str, case: str) -> int:
    """Fork a child that runs `case`; returns its process id."""
    child = os.fork()
    if child:
        return child
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.alarm(10 * SECONDS)  # asleep
    status, reason = _result(fix, case)
    line = {"fix": fix, "case": case, "status": status, "reason": reason}
    os.write(1, (json.dumps(line) + "\n").encode())  # one write: lines do not mix
    os._exit(0)


def _result(fix: str, case: str) -> tuple[str, str]:
    os.environ["PACELINE_REVERT_FIX"] = fix
    revert([fix], fixes=PACKAGE / "proof" / "fixes", package=PACKAGE)
    try:
        return _tested(case) if "::" in case else _checked(case)
    except Exception:  # noqa: BLE001
        return "crash", traceback.format_exc()[-2000:]


def _checked(case: str) -> tuple[str, str]:
    """A cell of the conformance matrix."""
    from named_cell import run_named
    from triton.runtime import interpreter

    patch_once(pytest.MonkeyPatch(), interpreter)  # for as long as the child lives
    result = run_named(case)
    return result.status.value, result.reason


class _Reports:
    """What pytest says of one test."""

    def __init__(self) -> None:
        self.status, self.reason = "crash", "no such test"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.status = "failing" if report.when == "call" else "crash"
            self.reason = report.longreprtext if crash is None else crash.message
        elif report.when == "call":
            self.status, self.reason = "passed", ""

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.reason = report.longreprtext


def _tested(case: str) -> tuple[str, str]:
    """A test, by its node id."""
    reports = _Reports()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        own = f"--basetemp={folder}"  # the shared one is swept by whoever ends, and a race fails
        pytest.main([str(ROOT / case), own, *_OPTIONS], plugins=[reports])
    return reports.status, reports.reason


if __name__ == "__main__":
    sys.exit(main())
