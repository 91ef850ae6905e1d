"""What came of a run: counts, tables for a terminal, the JSON document and where it is written."""

import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.gpus import DeviceFacts
from paceline.plan.machine import installed, versions
from paceline.proof.check.cell import CellResult, Status
from paceline.proof.suite.states import STATE_METHODS

VENDORS = ("flashinfer-python", "flash-attn-4", "flash-attn-3", "flash-attn", "sglang-kernel")
ORDER = (
    Status.FAILING,
    Status.TIMED_OUT,
    Status.PROVEN,
    Status.EMULATED,
    Status.REFUSED,
    Status.NOT_RUN,
)
UNRUN = (Status.REFUSED, Status.NOT_RUN)


def document(
    cells: Sequence[CellResult], device: DeviceFacts, *, date: datetime | None = None
) -> dict[str, Any]:
    """The JSON document of docs/schemas/check.json; date: None is now."""
    when = date or datetime.now(UTC)
    return {
        "device": {
            "name": device.name,
            "type": device.device_type,
            "cuda_arch": None if device.cuda_arch is None else list(device.cuda_arch),
        },
        "versions": versions() | installed(VENDORS),
        "date": when.isoformat(timespec="seconds"),
        "counts": counts(cells),
        "cells": [_row(cell) for cell in cells],
    }


def summary_line(document: dict[str, Any]) -> str:
    """The document without its cells, on one line."""
    return json.dumps({name: part for name, part in document.items() if name != "cells"})


def json_text(document: dict[str, Any]) -> str:
    """The document with one line per cell, so that two of them can be compared line by line."""
    head = "".join(
        f" {json.dumps(name)}: {json.dumps(part)},\n"
        for name, part in document.items()
        if name != "cells"
    )
    rows = ",\n".join(f"  {json.dumps(cell, allow_nan=False)}" for cell in document["cells"])
    return f'{{\n{head} "cells": [\n{rows}\n ]\n}}\n'


def counts(results: Iterable[CellResult]) -> dict[str, int]:
    """How many cells have each status; every status is there."""
    found = Counter(result.status for result in results)
    return {status.value: found[status] for status in Status}


def table(results: Sequence[CellResult]) -> str:
    """Counts by method, backend and mode."""
    groups: dict[tuple[str, str, str], Counter[Status]] = {}
    for result in results:
        key = (result.method, result.backend, result.mode)
        groups.setdefault(key, Counter())[result.status] += 1
    head = ("method", "backend", "mode", *map(said, ORDER))
    rows = [
        (*key, *(str(found[status] or "-") for status in ORDER))
        for key, found in sorted(groups.items())
    ]
    total = Counter(result.status for result in results)
    rows.append(("all", "", "", *(str(total[status] or "-") for status in ORDER)))
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return "\n".join(_aligned(row, widths) for row in (head, *rows))


def failing_text(results: Iterable[CellResult]) -> str:
    """Every cell that failed or ran out of time, why, and how to run it again."""
    return "\n".join(
        f"{said(result.status).upper()} {result.id}{_as(result)}\n  {result.reason}\n"
        f"  again: {rerun_command(result.id, result.backend)}"
        for result in results
        if is_failing(result)
    )


def reasons_text(results: Iterable[CellResult]) -> str:
    """Each reason of what did not run once per backend, and what ran by another composition."""
    found: Counter[tuple[str, str, str]] = Counter()
    for result in results:
        if result.status in UNRUN and result.reason:
            reasons = result.reason.split("; ")
            found.update((said(result.status), result.backend, each) for each in reasons)
        elif result.ran_as is not None:
            found["ran", result.backend, f"as {result.ran_as}"] += 1
    return "\n".join(
        f"{status} {backend}, {count} cell{'s' * (count > 1)}: {reason}"
        for (status, backend, reason), count in sorted(found.items())
    )


def is_failing(result: CellResult) -> bool:
    """Whether the cell makes the run fail."""
    return result.status in (Status.FAILING, Status.TIMED_OUT)


def said(status: Status) -> str:
    """A status in words."""
    return status.value.replace("_", " ")


def rerun_command(cell_id: str, backend: str) -> str:
    """The command that runs one cell again, for a shell."""
    pattern = re.sub(r"[()]", "?", cell_id)  # brackets belong to the language of --filter
    flag = "--state-backend" if cell_id.partition("/")[0] in STATE_METHODS else "--backend"
    words = ["paceline", "check", "--full", flag, backend, "--filter", pattern]
    return " ".join(map(shlex.quote, words))


def _as(result: CellResult) -> str:
    return f" (as {result.ran_as})" if result.ran_as else ""


def require_writable(flag: str, path: Path) -> None:
    """Raises ConfigError when `path` cannot be written; leaves it as it is."""
    existed = path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise _unwritable(flag, path, error) from error
    if not existed:
        path.unlink()


def write(flag: str, path: Path, text: str) -> None:
    """Write the file of `flag`.  Raises ConfigError, as when the disk is full by now."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _unwritable(flag, path, error) from error


def _unwritable(flag: str, path: Path, error: OSError) -> ConfigError:
    return ConfigError.about(
        flag,
        expected="a file that can be written",
        got=f"{str(path)!r} ({error.strerror})",
        remedy="name a file in a folder that exists and that you may write to",
    )


def _row(result: CellResult) -> dict[str, Any]:
    """A cell as JSON, which has no word for infinity: an error without a number is null."""
    row = asdict(result) | {"status": result.status.value, "seconds": round(result.seconds, 4)}
    for name in ("error", "tolerance"):
        if row[name] is not None and not math.isfinite(row[name]):
            row[name] = None
    return row


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    words = [word.ljust(width) for word, width in zip(row[:3], widths[:3], strict=True)]
    words += [word.rjust(width) for word, width in zip(row[3:], widths[3:], strict=True)]
    return "  ".join(words).rstrip()
