"""docs/matrix.md: what the recorded runs prove, and our cell for each public one.

    python -m paceline.proof.check.docs_matrix

It reads the files in docs/results that `paceline check --full --json` wrote, and writes one page.
`field_cells.tsv` names the cells of SGLang's attention unit tests as of mid 2026 (of methods dense,
swa and mla, on backends that are here too), and the areas that those tests leave out.
"""

import csv
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from paceline.proof.check.cell import RunnerKind, Status
from paceline.proof.check.html import cell_id

RESULTS = {"GPU": "h200-check.json", "CPU": "check-cpu.json"}  # column -> file of docs/results
MORE = {  # runs of some cells
    "GPU": (
        *("h200-check-flashinfer-mla.json", "h200-check-flashmla.json"),
        *("h200-check-triton-latents.json", "h200-check-fa3-latents.json"),
        *("h200-check-expanded-latents.json", "h200-check-chunks.json"),
        *("h200-check-whole-page-chunks.json", "h200-check-chunks-flashinfer.json"),
        *("h200-check-chunks-fa4.json", "h200-check-fa3.json"),
        *("h200-check-states.json", "h200-check-states-triton.json"),
        *("h200-check-flex.json", "h200-check-blocks.json"),
    ),
    "CPU": (
        *("check-cpu-blackwell-latents.json", "check-cpu-trtllm-mha.json"),
        *("check-cpu-expanded-latents.json", "check-cpu-chunks.json"),
        *("check-cpu-steps-alone.json", "check-cpu-states.json"),
    ),
}
STATUSES = tuple(status.value for status in Status)
ABSENT = "not recorded"
HEAD = """\
# The conformance matrix

Written by `python -m paceline.proof.check.docs_matrix` from the files that
`paceline check --full --json` left in [results](results); a test fails when it is stale.

A cell is method / backend / mode / runner / variant. It is **proven** when it ran on the real
library, its answer equals the float64 oracle, and the comparison would have rejected every wrong
oracle that applies; **emulated** when the same holds on a contract emulator of the library;
**refused** when the backend says that it cannot, and why; **not run** when nothing on that machine
can run it. Anything else is **failing**. On a CPU a graph is a recorded one.
"""
_COLUMNS = ("kind", "method", "backends", "runner", "variant", "status", "ours", "note")
Cells = Mapping[str, Mapping[str, Any]]  # id -> cell of a document


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldRow:
    """One public cell, or one area without public cells, on one backend."""

    method: str
    backend: str  # of ours: "a+b" runs a in extend and b in decode
    runner: str | None  # the public name of how a cell is run; None: an area
    variant: str  # the public name of the cell, or the area in words
    status: str  # there: pass, fail, deferred, blocked, hardware-gated, n/a; of an area: missing
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


def matrix_page(docs: Path, rows: Sequence[FieldRow] | None = None) -> str:
    """The page for the results in the folder `docs`; rows: the public matrix, for tests."""
    documents = {name: _read(docs / "results" / file) for name, file in RESULTS.items()}
    found = {
        name: {} if document is None else {cell_id(cell): cell for cell in document["cells"]}
        for name, document in documents.items()
    }
    parts = [HEAD]
    parts += [_run(name, RESULTS[name], document) for name, document in documents.items()]
    for name, files in MORE.items():
        for file in files:
            document = _read(docs / "results" / file)
            if document is not None:
                found[name] = {cell_id(cell): cell for cell in document["cells"]} | found[name]
                parts.append(_run(f"{name}, some cells", file, document))
    parts.append(_field(field_rows() if rows is None else rows, found))
    return "\n".join(parts)


def statuses(row: FieldRow, cells: Cells, column: str) -> Counter[str]:
    """How many of our cells of a public row have each status in one run."""
    ids = row.cells
    if column == "CPU":
        graph, recorded = RunnerKind.CUDA_GRAPH.value, RunnerKind.RECORDED.value
        ids = tuple(cell.replace(f"/{graph}/", f"/{recorded}/") for cell in ids)
    return Counter(cells[cell]["status"] if cell in cells else ABSENT for cell in ids)


@click.command()
@click.option(
    "--docs",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path("docs"),
    show_default=True,
    help="The folder docs.",
)
def main(docs: Path) -> None:
    """Write docs/matrix.md from docs/results."""
    (docs / "matrix.md").write_text(matrix_page(docs), encoding="utf-8")


def _read(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def _run(name: str, file: str, document: Mapping[str, Any] | None) -> str:
    """One recorded run, and its file: counts, and why cells are not proven."""
    if document is None:
        return f"## {name}\n\nNo run is recorded.\n"
    versions = ", ".join(f"{lib} {found}" for lib, found in document["versions"].items() if found)
    return "\n".join(
        [
            f"## {name}: {_plain(document['device']['name'])}\n",
            f"[{file}](results/{file}), {document['date']}. {versions}.\n",
            _counts(document["cells"]),
            _reasons(document["cells"]),
        ]
    )


def _counts(cells: Iterable[Mapping[str, Any]]) -> str:
    groups: dict[tuple[str, str], Counter[str]] = {}
    total: Counter[str] = Counter()
    for cell in cells:
        groups.setdefault((cell["backend"], cell["mode"]), Counter())[cell["status"]] += 1
        total[cell["status"]] += 1
    rows = [
        (backend, mode, *(found[s] or "" for s in STATUSES))
        for (backend, mode), found in sorted(groups.items())
    ]
    rows.append(("all", "", *(total[s] or "" for s in STATUSES)))
    return _table(("backend", "mode", *(s.replace("_", " ") for s in STATUSES)), rows)


def _reasons(cells: Iterable[Mapping[str, Any]]) -> str:
    """Each reason once per backend and status, with how many cells give it."""
    found: Counter[tuple[str, str, str]] = Counter()
    for cell in cells:
        reason = cell["reason"] or ""
        parts = reason.split("; ") if cell["status"] == Status.REFUSED.value else [reason]
        found.update((cell["status"], cell["backend"], part) for part in parts if part)
    if not found:
        return "Every cell is proven or emulated.\n"
    rows = [
        (status.replace("_", " "), backend, reason, count)
        for (status, backend, reason), count in sorted(found.items())
    ]
    return _table(("status", "backend", "reason", "cells"), rows)


def _field(rows: Sequence[FieldRow], found: Mapping[str, Cells]) -> str:
    """The public matrix: how its rows fare, then each row with our cells."""
    public = [row for row in rows if not row.is_area]
    areas = [row for row in rows if row.is_area]
    listed = [
        (
            f"`{row.method}/{row.backend}/{row.runner}/{row.variant}`",
            row.status,
            *_ours(row, found),
        )
        for row in public
    ]
    wanted = [
        (f"{row.method}, {row.backend}: {row.variant}", row.status, *_ours(row, found))
        for row in areas
    ]
    head = ("public cell", "there", "our cells", *RESULTS, "note")
    return "\n".join(
        [
            "## Beside the best public suite\n",
            "The cells of SGLang's attention unit tests as of mid 2026 for the methods dense, swa",
            "and mla and the backends that are here too (of mla FlashInfer is `flashinfer_mla`),",
            "with their status there, and ours that cover each. Our cells are mode/runner/variant",
            "on the same method and backend; where several are named, all of them must hold.\n",
            "*There* is how the cell fares in that suite (deferred: not tested; blocked: said not",
            "to run; hardware-gated: not on its machines; n/a: does not apply), or missing, for an",
            "area without cells. A row is emulated when one of its cells is and all others are",
            "proven.\n",
            _fare(rows, found),
            "### Public cells\n",
            _table(head, listed),
            "### Areas that suite refuses, fails or leaves out\n",
            _table(("area", *head[1:]), wanted),
        ]
    )


def _fare(rows: Sequence[FieldRow], found: Mapping[str, Cells]) -> str:
    """Rows by their status there and, in each run, by how many have only proven cells."""
    counted: dict[str, Counter[str]] = {}
    for row in rows:
        here = counted.setdefault(row.status, Counter())
        here["rows"] += 1
        for name, cells in found.items():
            alone = set(statuses(row, cells, name))
            here[f"{name} proven"] += alone <= {"proven"}
            here[f"{name} emulated"] += alone <= {"proven", "emulated"} and "emulated" in alone
    columns = ["rows", *(f"{name} {word}" for name in found for word in ("proven", "emulated"))]
    table = [
        (status, *(here[column] for column in columns)) for status, here in sorted(counted.items())
    ]
    return _table(("there", *columns), table)


def _ours(row: FieldRow, found: Mapping[str, Cells]) -> tuple[str, ...]:
    names = "<br>".join(f"`{'/'.join(cell.split('/')[2:])}`" for cell in row.cells)
    return (names, *(_said(statuses(row, found[name], name)) for name in RESULTS), row.note)


def _said(found: Counter[str]) -> str:
    """One word when all cells agree."""
    words = [status.replace("_", " ") for status in found]
    if len(words) == 1:
        return words[0]
    return ", ".join(f"{count} {status.replace('_', ' ')}" for status, count in found.items())


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(_plain(str(word)) for word in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    """`text` as a cell of a table."""
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    main(prog_name="python -m paceline.proof.check.docs_matrix")
