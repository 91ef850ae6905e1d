"""docs/matrix.md: it is what the recorded runs and the public matrix make of it."""

import json
from pathlib import Path

import click
import jsonschema
import pytest

from paceline.proof.check.docs_matrix import MORE, RESULTS, FieldRow, field_rows, main, matrix_page

DOCS = Path(__file__).parents[3] / "docs"
ROW = FieldRow(
    method="dense",
    backend="fa4",
    runner="cg_decode",
    variant="all_heads",
    status="deferred",
    cells=("dense/fa4/decode/cuda_graph/mha", "dense/fa4/decode/cuda_graph/gqa4"),
    note="",
)


def cell(variant, status, *, runner="cuda_graph", reason=None):
    return {
        "method": "dense",
        "backend": "fa4",
        "mode": "decode",
        "runner": runner,
        "variant": variant,
        "status": status,
        "reason": reason,
    }


def page(folder, *, gpu=None, cpu=None, rows=(ROW,)):
    """The page for these cells of each run; None: the run is not recorded."""
    (folder / "results").mkdir(exist_ok=True)
    for name, cells in (("GPU", gpu), ("CPU", cpu)):
        if cells is not None:
            document = {
                "device": {"name": f"a {name}"},
                "versions": {"torch": "2.11", "triton": None},
                "date": "2026-01-01T00:00:00+00:00",
                "cells": cells,
            }
            (folder / "results" / RESULTS[name]).write_text(json.dumps(document))
    return matrix_page(folder, rows)


def row_of(text, start):
    """The words of the table row that begins with `start`."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {start}")]
    return [word.strip() for word in line.strip("|").split("|")]


def test_the_page_in_the_repository_is_not_stale():
    assert (DOCS / "matrix.md").read_text() == matrix_page(DOCS), (
        "run python -m paceline.proof.check.docs_matrix"
    )


@pytest.mark.parametrize("name", RESULTS.values())
def test_a_recorded_run_fits_the_schema_and_has_no_failing_cell(name):
    path = DOCS / "results" / name
    if not path.is_file():
        pytest.skip(f"{name} is not recorded yet")
    document = json.loads(path.read_text())
    jsonschema.validate(document, json.loads((DOCS / "schemas" / "check.json").read_text()))
    assert not [cell for cell in document["cells"] if cell["status"] == "failing"]


def test_every_public_row_is_on_the_page_with_its_cells():
    lines = matrix_page(DOCS).splitlines()
    for row in field_rows():
        name = f"{row.method}, {row.backend}: {row.variant} |"
        if not row.is_area:
            name = f"`{row.method}/{row.backend}/{row.runner}/{row.variant}` |"
        ours = {"/".join(cell.split("/")[2:]) for cell in row.cells}
        assert any(name in line and all(f"`{c}`" in line for c in ours) for line in lines), name


def test_a_run_that_is_not_recorded_is_said(tmp_path):
    text = page(tmp_path)
    assert text.count("No run is recorded.") == 2
    assert row_of(text, "`dense/fa4/cg_decode")[3:5] == ["not recorded", "not recorded"]


def test_a_public_row_is_proven_when_all_its_cells_are(tmp_path):
    text = page(tmp_path, gpu=[cell("mha", "proven"), cell("gqa4", "proven")])
    assert row_of(text, "`dense/fa4/cg_decode")[3] == "proven"
    assert row_of(text, "deferred") == ["deferred", "1", "1", "0", "0", "0"]


def test_a_public_row_with_one_other_cell_is_not_proven(tmp_path):
    cells = [cell("mha", "proven"), cell("gqa4", "failing", reason="row 3 | is wrong")]
    text = page(tmp_path, gpu=cells)
    assert row_of(text, "`dense/fa4/cg_decode")[3] == "1 proven, 1 failing"
    assert row_of(text, "deferred")[2] == "0"
    assert "row 3 \\| is wrong" in text


def test_a_graph_of_a_cpu_is_the_recorded_one(tmp_path):
    cells = [cell(name, "emulated", runner="recorded") for name in ("mha", "gqa4")]
    text = page(tmp_path, cpu=cells)
    assert row_of(text, "`dense/fa4/cg_decode")[4] == "emulated"
    assert row_of(text, "deferred") == ["deferred", "1", "0", "0", "0", "1"]


def test_refused_reasons_are_grouped_and_counted(tmp_path):
    cells = [
        cell("mha", "refused", reason="no sinks; no window"),
        cell("gqa4", "refused", reason="no sinks"),
    ]
    text = page(tmp_path, gpu=cells)
    assert row_of(text, "refused | fa4 | no sinks") == ["refused", "fa4", "no sinks", "2"]
    assert row_of(text, "refused | fa4 | no window")[3] == "1"


def test_counts_are_by_backend_and_mode(tmp_path):
    text = page(tmp_path, gpu=[cell("mha", "proven"), cell("gqa4", "not_run", reason="why")])
    assert row_of(text, "fa4 | decode") == ["fa4", "decode", "1", "", "", "", "", "1"]


def test_the_command_writes_the_page_where_docs_is(tmp_path):
    main(["--docs", str(tmp_path)], standalone_mode=False)
    assert (tmp_path / "matrix.md").read_text() == matrix_page(tmp_path)
    with pytest.raises(click.BadParameter, match=r"Directory .*absent' does not exist"):
        main(["--docs", str(tmp_path / "absent")], standalone_mode=False)


def test_a_run_of_some_cells_adds_to_the_column_and_has_a_section(tmp_path):
    (tmp_path / "results").mkdir()
    document = {
        "device": {"name": "another GPU"},
        "versions": {},
        "date": "2026-01-02T00:00:00+00:00",
        "cells": [cell("mha", "proven"), cell("gqa4", "refused", reason="no such heads")],
    }
    (tmp_path / "results" / MORE["GPU"][0]).write_text(json.dumps(document))
    text = page(tmp_path, gpu=[cell("gqa4", "proven")])
    assert row_of(text, "`dense/fa4/cg_decode/all_heads`")[3] == "proven"
    assert "## GPU, some cells: another GPU" in text
    assert f"[{MORE['GPU'][0]}](results/{MORE['GPU'][0]}), 2026-01-02" in text
    assert "no such heads" in text
