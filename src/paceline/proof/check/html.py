"""The report as one self-contained page: what page.html.jinja shows of a document."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from paceline.proof.check.report import rerun_command

LEGEND = {
    "failing": ("✗", "ran, and its answer, its writes or its plan are wrong"),
    "timed_out": ("⧗", "ended at the limit of its CPU time, or idle"),
    "proven": ("✓", "ran on the real library, equals the oracle, and the comparison is sharp"),
    "emulated": ("e", "the same, on an emulator of the library"),
    "refused": ("–", "the backend says that it cannot, and why"),
    "not_run": ("·", "nothing here can run it"),
}
WRONG = ("failing", "timed_out")
Cell = Mapping[str, Any]  # of the document


def page(document: Mapping[str, Any]) -> str:
    """The whole page; `document` is that of report.document."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "again": lambda cell: rerun_command(cell_id(cell), cell["backend"]),
        "cell_id": cell_id,
        "time": _time,
        "told": _told,
        "words": _words,
    }
    cells = document["cells"]
    found = document["versions"].items()
    refused = Counter(
        (cell["backend"], str(cell["reason"])) for cell in cells if cell["status"] == "refused"
    )
    methods = sorted({cell["method"] for cell in cells})
    return environment.get_template("page.html.jinja").render(
        document,
        versions=", ".join(f"{name} {version}" for name, version in found if version),
        legend=LEGEND,
        failing=[cell for cell in cells if cell["status"] in WRONG],
        grids=[_grid(method, [c for c in cells if c["method"] == method]) for method in methods],
        refused=sorted(refused.items()),
    )


def _grid(method: str, cells: list[Cell]) -> dict[str, Any]:
    """Rows are (mode, variant), columns (backend, runner)."""
    columns = sorted({(cell["backend"], cell["runner"]) for cell in cells})
    found = {
        (cell["mode"], cell["variant"], cell["backend"], cell["runner"]): cell for cell in cells
    }
    rows = []
    for mode, variant in sorted({(cell["mode"], cell["variant"]) for cell in cells}):
        here = [found.get((mode, variant, *column)) for column in columns]
        statuses = sorted({cell["status"] for cell in here if cell is not None})
        text = " ".join((method, mode, variant, *statuses)).lower()
        rows.append({"mode": mode, "variant": variant, "text": text, "cells": here})
    return {"method": method, "columns": columns, "rows": rows}


def _told(cell: Cell) -> str:
    """What a cell says under the pointer."""
    told = [_words(cell["status"])]
    if cell.get("ran_as"):
        told.append(f"ran as {cell['ran_as']}")
    if cell["reason"]:
        told.append(str(cell["reason"]))
    if cell["error"] is not None and cell["tolerance"] is not None:
        told.append(f"error {cell['error']:.3g} of {cell['tolerance']:.3g} allowed")
    return "\n".join([*told, f"{_time(cell['seconds'])} of CPU time"])


def _words(status: str) -> str:
    return status.replace("_", " ")


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s"


def cell_id(cell: Cell) -> str:
    """The name of a cell of the document, as CellResult.id."""
    return "/".join(cell[part] for part in ("method", "backend", "mode", "runner", "variant"))
