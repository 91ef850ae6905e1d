"""The report as one self-contained page: what fails, a matrix per method, what is refused."""

from collections import Counter
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

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
STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 1.5rem; color: #1c1c1e; background: #fff; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; } th { text-align: left; font-weight: 600; }
thead th { position: sticky; top: 0; background: #fff; }
td, th { padding: 1px 8px; border: 1px solid #e3e3e6; }
td.cell { text-align: center; cursor: pointer; } td.time { text-align: right; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 12px; } dd { margin: 0; }
code { user-select: all; }
.proven { background: #d6f0dc; } .emulated { background: #dbe7fb; }
.refused { background: #f1f1f3; color: #66666b; } .not_run { color: #a0a0a6; }
.failing { background: #f8cfcb; font-weight: 700; } .timed_out { background: #fbe6c2; }
.chip { padding: 2px 10px; margin-right: 6px; border-radius: 10px; }
input { font: inherit; width: 24rem; padding: 4px 8px; }
#failing td { vertical-align: top; white-space: pre-wrap; }
@media (prefers-color-scheme: dark) {
  body, thead th { background: #1c1c1e; color: #ececf0; } td, th { border-color: #3a3a3e; }
  .proven { background: #1f4a2b; } .emulated { background: #213a63; }
  .refused { background: #2c2c30; color: #a0a0a6; } .failing { background: #6d2520; }
  .timed_out { background: #5c4514; }
}
"""
SCRIPT = """
const box = document.getElementById("filter");
box.addEventListener("input", () => {
  const words = box.value.toLowerCase().split(/\\s+/).filter(Boolean);
  for (const row of document.querySelectorAll("tr[data-text]"))
    row.hidden = !words.every(word => row.dataset.text.includes(word));
});
document.addEventListener("click", event => {
  const again = event.target.dataset.again;
  if (again) document.getElementById("again").textContent = again;
});
"""


def page(document: Mapping[str, Any]) -> str:
    """The whole page; `document` is that of report.document."""
    cells = document["cells"]
    methods = sorted({cell["method"] for cell in cells})
    parts = [_summary(document), _failing(cells)]
    parts += [_matrix(method, [c for c in cells if c["method"] == method]) for method in methods]
    parts.append(_refused(cells))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f"<title>paceline check: {escape(document['device']['name'])}</title>\n"
        f"<style>{STYLE}</style></head><body>\n{''.join(parts)}"
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def _summary(document: Mapping[str, Any]) -> str:
    counts = document["counts"]
    chips = "".join(
        f'<span class="chip{f" {status}" if counts[status] else ""}">{sign} '
        f"{counts[status]} {_words(status)}</span>"
        for status, (sign, _) in LEGEND.items()
    )
    legend = "".join(
        f'<dt><span class="chip {status}">{sign}</span> {_words(status)}</dt><dd>{meaning}</dd>'
        for status, (sign, meaning) in LEGEND.items()
    )
    seconds = sum(cell["seconds"] for cell in document["cells"])
    versions = ", ".join(f"{name} {found}" for name, found in document["versions"].items() if found)
    return (
        f"<h1>paceline check on {escape(document['device']['name'])}</h1>\n"
        f"<p>{escape(document['date'])}<br>{escape(versions)}</p>\n"
        f"<p>{chips} {_time(seconds)} of CPU time</p>\n<dl>{legend}</dl>\n"
        '<p>Run a cell again: <code id="again">click one for its command</code></p>\n'
        '<p><input id="filter" placeholder="words of a mode, variant or status" autofocus></p>\n'
    )


def _failing(cells: Iterable[Mapping[str, Any]]) -> str:
    rows = "".join(
        f'<tr data-text="{escape(cell_id(cell).lower())}"><td>{escape(cell_id(cell))}</td>'
        f"<td>{_words(cell['status'])}</td><td>{escape(str(cell['reason']))}</td>"
        f'<td class="time">{_time(cell["seconds"])}</td><td><code>{escape(_again(cell))}</code>'
        "</td></tr>\n"
        for cell in cells
        if cell["status"] in WRONG
    )
    if not rows:
        return "<h2>No cell fails</h2>\n"
    return (
        '<h2>Failing</h2>\n<table id="failing"><thead><tr><th>cell</th><th>status</th><th>why</th>'
        "<th>CPU time</th><th>again</th></tr></thead>\n"
        f"<tbody>{rows}</tbody></table>\n"
    )


def _refused(cells: Iterable[Mapping[str, Any]]) -> str:
    """Why cells are refused, each reason once for a backend."""
    found = Counter(
        (cell["backend"], str(cell["reason"])) for cell in cells if cell["status"] == "refused"
    )
    if not found:
        return ""
    rows = "".join(
        f'<tr data-text="{escape(f"{backend} {reason} refused".lower())}">'
        f"<td>{escape(backend)}</td><td>{count}</td><td>{escape(reason)}</td></tr>\n"
        for (backend, reason), count in sorted(found.items())
    )
    return (
        "<h2>Refused</h2>\n<table><thead><tr><th>backend</th><th>cells</th><th>why</th></tr>"
        f"</thead>\n<tbody>{rows}</tbody></table>\n"
    )


def _matrix(method: str, cells: list[Mapping[str, Any]]) -> str:
    """Rows are (mode, variant), columns (backend, runner)."""
    columns = sorted({(cell["backend"], cell["runner"]) for cell in cells})
    found = {
        ((cell["mode"], cell["variant"]), (cell["backend"], cell["runner"])): cell for cell in cells
    }
    head = "".join(f"<th>{escape(backend)}<br>{escape(runner)}</th>" for backend, runner in columns)
    rows = []
    for row in sorted({(cell["mode"], cell["variant"]) for cell in cells}):
        here = [found.get((row, column)) for column in columns]
        statuses = {cell["status"] for cell in here if cell is not None}
        text = " ".join((method, *row, *sorted(statuses))).lower()
        rows.append(
            f'<tr data-text="{escape(text)}"><th>{escape(row[0])}</th><th>{escape(row[1])}</th>'
            f"{''.join(map(_square, here))}"
            f'<td class="time">{_time(sum(cell["seconds"] for cell in here if cell))}</td></tr>\n'
        )
    return (
        f"<h2>{escape(method)}</h2>\n<table><thead><tr><th>mode</th><th>variant</th>{head}"
        "<th>CPU time</th></tr>"
        f"</thead>\n<tbody>{''.join(rows)}</tbody></table>\n"
    )


def _square(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return "<td></td>"
    status = cell["status"]
    said = [_words(status)]
    if cell.get("ran_as"):
        said.append(f"ran as {cell['ran_as']}")
    if cell["reason"]:
        said.append(str(cell["reason"]))
    if cell["error"] is not None and cell["tolerance"] is not None:
        said.append(f"error {cell['error']:.3g} of {cell['tolerance']:.3g} allowed")
    said.append(f"{_time(cell['seconds'])} of CPU time")
    title, again = escape("\n".join(said)), escape(_again(cell))
    sign = LEGEND[status][0]
    return f'<td class="cell {status}" title="{title}" data-again="{again}">{sign}</td>'


def _again(cell: Mapping[str, Any]) -> str:
    return rerun_command(cell_id(cell), cell["backend"])


def _words(status: str) -> str:
    return status.replace("_", " ")


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s"


def cell_id(cell: Mapping[str, Any]) -> str:
    """The name of a cell of the document, as CellResult.id."""
    return "/".join(cell[part] for part in ("method", "backend", "mode", "runner", "variant"))
