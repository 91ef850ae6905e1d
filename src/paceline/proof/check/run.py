"""What a run of `paceline check` does."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from paceline.core.errors import ConfigError
from paceline.core.progress import INTERRUPTED, collect, cut_mark
from paceline.proof.check import report
from paceline.proof.check.baseline import Baseline, read_cells
from paceline.proof.check.cell import CellResult
from paceline.proof.check.filters import parse_filter
from paceline.proof.check.matrix import (
    BACKENDS,
    HARNESS,
    LIMIT_S,
    QUICK_LIMIT_S,
    Cell,
    Harness,
    Selection,
    cells_of,
    run_cells,
)
from paceline.proof.suite.case import Case

Suite = Callable[[], Iterable[Case]]
MOST_REASON = 160  # characters of a reason on one line; the report has all
GPU_WORKERS = 6  # a GPU's cells wait for the oracle and for compilers


def run_check(
    values: Mapping[str, Any],
    *,
    suite: Suite | None = None,
    harness: Harness = HARNESS,
    limit_s: float | None = None,
    out: TextIO | None = None,
    err: TextIO | None = None,
) -> int:
    """Run what the flags in `values` select; returns the exit code.  After Ctrl-C the tables
    show the cells that were done.

    suite: the cases, for tests.  limit_s: CPU time of a cell; None: the suite's.  out, err: where
    tables and progress go; None is the process's own.  Raises ConfigError before any cell runs;
    after the tables only for a file that can no longer be written.
    """
    from paceline.plan.machine import local_device
    from paceline.proof.check.html import page

    device = local_device(None if values["device"] == "auto" else values["device"])
    paths = output_paths(values)
    baseline = None if values["against"] is None else Baseline.read(Path(values["against"]))
    selection = selection_of(values, device.device_type)
    cells = cells_of(selection, (suite or _suite)())
    out, err = out or sys.stdout, err or sys.stderr
    if limit_s is None:
        is_short = selection.device_type == "cpu" and not selection.is_full
        limit_s = QUICK_LIMIT_S if is_short else LIMIT_S
    results, is_cut = _run(cells, selection.device_type, values, harness, limit_s, err)
    results.sort(key=lambda result: result.id)
    failing = report.failing_text(results)
    texts = [report.table(results), report.reasons_text(results), failing]
    print("\n".join(filter(None, texts)), file=out, flush=True)
    document = report.document(results, device) | cut_mark(is_cut)
    is_as_before = True
    if baseline is not None:
        compared = baseline.compare(results)
        is_as_before = compared.is_equal
        print(baseline.said(compared, document), file=out, flush=True)
    print(report.summary_line(document), file=out, flush=True)
    if "--json" in paths:
        report.write("--json", paths["--json"], report.json_text(document))
    if "--html" in paths:
        report.write("--html", paths["--html"], page(document))
    if is_cut:
        print("stopped", file=err, flush=True)
        return INTERRUPTED
    return 1 if failing or not is_as_before else 0


def selection_of(values: Mapping[str, Any], device_type: str) -> Selection:
    """The cells that the flags want.  Raises ConfigError."""
    if values["quick"] and values["full"]:
        raise ConfigError.about(
            "the suite",
            expected="--quick or --full",
            got="both",
            remedy="drop one of the two; --full holds the quick cases too",
        )
    of_states = tuple(dict.fromkeys(values["state_backend"] or ()))
    usual = () if of_states else BACKENDS[device_type]
    return Selection(
        device_type=device_type,
        backends=tuple(dict.fromkeys(values["backend"] or usual)),
        state_backends=of_states,
        methods=tuple(values["method"] or ()),
        modes=tuple(values["mode"] or ()),
        wanted=None if values["filter"] is None else parse_filter(values["filter"]),
        names=None if values["cells"] is None else read_cells(Path(values["cells"])),
        is_full=values["full"],
    )


def output_paths(values: Mapping[str, Any]) -> dict[str, Path]:
    """The files to write, by flag.  Raises ConfigError when one cannot be written."""
    from paceline.proof.check.report import require_writable

    paths = {flag: values[flag[2:]] for flag in ("--json", "--html")}
    found = {flag: Path(path) for flag, path in paths.items() if path is not None}
    for flag, path in found.items():
        require_writable(flag, path)
    if len(found) == 2 and found["--json"].resolve() == found["--html"].resolve():
        raise ConfigError.about(
            "--html",
            expected="another file than --json",
            got=repr(str(found["--html"])),
            remedy="name two files",
        )
    return found


def num_workers(asked: int | None, device_type: str) -> int:
    """How many processes run cells.  Raises ConfigError."""
    from paceline.plan.machine import usable_cores

    if asked is None:
        cores = usable_cores()
        return cores if device_type == "cpu" else max(1, min(GPU_WORKERS, cores // 2))
    if asked < 1:
        raise ConfigError.about(
            "--workers", expected="at least 1", got=asked, remedy="leave the flag out"
        )
    return asked


def _run(
    cells: Sequence[Cell],
    device_type: str,
    values: Mapping[str, Any],
    harness: Harness,
    limit_s: float,
    err: TextIO,
) -> tuple[list[CellResult], bool]:
    """(the results, whether Ctrl-C ended them early); raises KeyboardInterrupt before the first."""
    workers = min(num_workers(values["workers"], device_type), len(cells))
    began = time.monotonic()
    run = run_cells(
        cells, device_type=device_type, workers=workers, limit_s=limit_s, harness=harness
    )
    results, is_cut = collect("check", _telling(run, err), total=len(cells), unit="cell")
    failing = sum(map(report.is_failing, results))
    seconds = time.monotonic() - began
    text = f"{len(results)} of {len(cells)} cells, {failing} failing, {seconds:.1f} s"
    print(text, file=err, flush=True)
    return results, is_cut


def _telling(results: Iterable[CellResult], err: TextIO) -> Iterator[CellResult]:
    """The same results; one that fails is said at once, above the bar."""
    from tqdm import tqdm

    for result in results:
        if report.is_failing(result):
            word = report.said(result.status).upper()
            reason = (result.reason or "").partition("\n")[0][:MOST_REASON]
            tqdm.write(f"{word} {result.id}: {reason}", file=err)
        yield result


def _suite() -> Iterable[Case]:
    from paceline.proof.suite.cases import cases
    from paceline.proof.suite.states import state_cases

    return (*cases(), *state_cases())
