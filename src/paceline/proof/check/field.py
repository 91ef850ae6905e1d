"""The public matrix beside ours: which cell of ours covers each public one.  Imports torch nowhere.

`field_cells.tsv` names the cells of SGLang's attention unit tests as of mid 2026 (methods dense and
swa; backends triton, flashinfer, fa3 and fa4), and the areas that those tests leave out.
"""

import csv
from dataclasses import dataclass
from pathlib import Path

_COLUMNS = ("kind", "method", "backends", "runner", "variant", "status", "ours", "note")


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldRow:
    """One public cell, or one area without public cells, on one backend."""

    method: str
    backend: str  # of ours: "a+b" runs a in extend and b in decode
    runner: str | None  # the public name of how a cell is run; None: an area
    variant: str  # the public name of the cell, or the area in words
    status: str  # there: pass, fail, deferred, blocked, n/a; of an area: missing
    cells: tuple[str, ...]  # ids of ours that cover it, at least one
    note: str  # what differs, or ""

    @property
    def is_area(self) -> bool:
        return self.runner is None


def field_rows() -> tuple[FieldRow, ...]:
    """Every row of the data file on each of its backends, in the file's order."""
    text = Path(__file__).with_name("field_cells.tsv").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    table = csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    assert tuple(table.fieldnames or ()) == _COLUMNS, table.fieldnames
    return tuple(_row(line, backend) for line in table for backend in line["backends"].split(","))


def _row(line: dict[str, str], backend: str) -> FieldRow:
    """A line of the file for one of its backends."""
    places = (place.split("/") for place in line["ours"].split())
    return FieldRow(
        method=line["method"],
        backend=backend,
        runner=line["runner"] or None,
        variant=line["variant"],
        status=line["status"],
        cells=tuple(
            "/".join((line["method"], backend, mode, runner, variant))
            for mode, runner, variant in places
        ),
        note=line["note"],
    )
