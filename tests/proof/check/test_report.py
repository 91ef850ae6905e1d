"""The report of a run: the documents, what the terminal shows, exit codes, and files."""

import io
import json
import re
import shlex
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import jsonschema
import pytest
from fake_harness import HARNESS, suite_of

from paceline.core.errors import ConfigError
from paceline.proof.check import report
from paceline.proof.check import run as check_module
from paceline.proof.check.filters import parse_filter
from paceline.proof.check.flags import FLAGS
from paceline.proof.check.html import LEGEND, cell_id, page
from paceline.proof.check.run import run_check

SCHEMA = json.loads((Path(__file__).parents[3] / "docs" / "schemas" / "check.json").read_text())
EVERYTHING = ("passes", "emulated", "refused", "fails", "exits")


def check(*names, limit_s=30.0, **values):
    """Exit code, stdout and stderr of a run over these cases, one worker, eager cells."""
    plain = {flag.name: False if flag.kind is bool else flag.default for flag in FLAGS}
    asked = plain | {"device": "cpu", "workers": 1, "backend": ["torch"]} | values
    asked = {"filter": "eager"} | {name: v for name, v in asked.items() if v is not None}
    out, err = io.StringIO(), io.StringIO()
    code = run_check(
        plain | asked,
        suite=suite_of(*names),
        harness=HARNESS,
        limit_s=limit_s,
        out=out,
        err=err,
    )
    return code, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """A run with one cell of each outcome: exit code, stdout, stderr, document, page."""
    folder = tmp_path_factory.mktemp("report")
    paths = {name: folder / f"out.{name}" for name in ("json", "html")}
    ran = check(*EVERYTHING, **{name: str(path) for name, path in paths.items()})
    return *ran, json.loads(paths["json"].read_text()), paths["html"].read_text()


def test_the_json_file_fits_its_schema_and_counts_its_cells(everything):
    document = everything[3]
    jsonschema.validate(document, SCHEMA)
    statuses = [cell["status"] for cell in document["cells"]]
    assert {name: statuses.count(name) for name in document["counts"]} == document["counts"]
    assert document["counts"] == {
        "proven": 1,
        "emulated": 1,
        "refused": 1,
        "failing": 2,
        "timed_out": 0,
        "not_run": 0,
    }


def test_cells_are_ordered_by_name_whatever_order_they_came_in(everything):
    names = [cell["variant"] for cell in everything[3]["cells"]]
    assert names == sorted(EVERYTHING)


def test_an_error_without_a_number_is_null(everything):
    cells = {cell["variant"]: cell for cell in everything[3]["cells"]}
    assert cells["fails"]["error"] is None
    assert cells["passes"]["error"] == 0.25


@pytest.mark.parametrize(
    ("status", "reason"), [("proven", "because"), ("refused", None), ("failing", None)]
)
def test_the_schema_wants_a_reason_of_what_did_not_pass_and_of_nothing_else(
    everything, status, reason
):
    document = everything[3]
    wrong = document["cells"][0] | {"status": status, "reason": reason}
    with pytest.raises(jsonschema.ValidationError, match="type"):
        jsonschema.validate(document | {"cells": [wrong]}, SCHEMA)


def test_stdout_holds_the_table_then_failing_cells_then_one_json_line(everything):
    code, out, _, document, _ = everything
    assert code == 1
    table, _, rest = out.partition("FAILING ")
    head, row, total, *why = (" ".join(line.split()) for line in table.splitlines())
    assert head == "method backend mode failing timed out proven emulated refused not run"
    assert row == "dense torch decode 2 - 1 1 1 -"
    assert total == "all 2 - 1 1 1 -"
    assert why == ["refused torch, 1 cell: no <window>", "refused torch, 1 cell: no sinks"]
    assert "dense/torch/decode/eager/exits\n  its process ended: exit code 7" in rest
    assert "dense/torch/decode/eager/fails\n  row 3 is wrong" in rest
    assert json.loads(out.splitlines()[-1]) == {
        name: part for name, part in document.items() if name != "cells"
    }


def test_failing_cells_are_said_as_they_happen_and_progress_counts_them(everything):
    err = everything[2]
    assert re.findall(r"^FAILING (\S+): (.+)$", err, re.MULTILINE) == [
        ("dense/torch/decode/eager/fails", "row 3 is wrong"),
        ("dense/torch/decode/eager/exits", "its process ended: exit code 7"),
    ]
    assert re.search(r"^5 of 5 cells, 2 failing, \d+\.\d s$", err, re.MULTILINE)


def test_a_cell_out_of_time_is_no_failing_one_and_fails_the_run():
    code, out, err = check("hangs", limit_s=0.2)
    assert code == 1
    assert "TIMED OUT dense/torch/decode/eager/hangs\n  did nothing for 0.2 s\n  again: " in out
    assert "TIMED OUT dense/torch/decode/eager/hangs: did nothing" in err
    counts = json.loads(out.splitlines()[-1])["counts"]
    assert (counts["failing"], counts["timed_out"]) == (0, 1)


def test_cells_that_ran_by_another_composition_say_so():
    code, out, _ = check("composed")
    assert code == 0
    assert "ran torch, 1 cell: as cascade(torch)\n" in out


def test_the_command_of_a_cell_selects_it_alone():
    backend = "cascade(module:Class)"
    names = [f"dense/{backend}/decode/eager/{name}" for name in ("one", "one-more")]
    *_, pattern = shlex.split(report.rerun_command(names[0], backend))
    assert [name for name in names if parse_filter(pattern)(name)] == names[:1]


def test_nothing_failing_is_exit_code_0():
    code, out, err = check("passes", "refused")
    assert code == 0
    assert "FAILING" not in out + err


class Balance(HTMLParser):
    """Whether every element of a page is closed in order, and what it would load."""

    VOID = frozenset({"meta", "input", "br"})

    def __init__(self):
        super().__init__()
        self.open, self.loads, self.titles = [], [], []

    def handle_starttag(self, tag, attrs):
        self.loads += [value for name, value in attrs if name in ("src", "href")]
        self.titles += [value for name, value in attrs if name == "title"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_loads_nothing(everything):
    parser = Balance()
    parser.feed(everything[4])
    assert not parser.open
    assert not parser.loads
    assert "http" not in everything[4]
    assert "error 0.25 of 1 allowed\n0.50 s of CPU time" in "\n".join(parser.titles)


def test_the_page_shows_failing_cells_first_and_escapes_reasons(everything):
    text = everything[4]
    assert text.index("row 3 is wrong") < text.index("<h2>dense</h2>")
    assert "no &lt;window&gt;; no sinks" in text
    assert "no <window>" not in text


def test_the_page_has_a_legend_durations_and_the_command_of_each_cell(everything):
    text, cells = everything[4], everything[3]["cells"]
    for status, (_, meaning) in LEGEND.items():
        assert f"{status.replace('_', ' ')}</dt><dd>{meaning}</dd>" in text
    assert ".50 s of CPU time</p>" in text
    for cell in cells:
        again = f"paceline check --full --backend torch --filter {cell_id(cell)}"
        assert f'data-again="{again}"' in text
    failing = [cell for cell in cells if cell["status"] == "failing"]
    assert text.count("<td><code>paceline check --full ") == len(failing) == 2


def test_a_count_of_nothing_is_not_painted(everything):
    text = everything[4]
    assert '<span class="chip failing">✗ 2 failing</span>' in text
    assert '<span class="chip">⧗ 0 timed out</span>' in text


def test_the_page_uses_the_width(everything):
    assert "table { border-collapse: collapse; width: 100%; }" in everything[4]


def test_the_page_says_which_composition_ran(everything):
    cells = [everything[3]["cells"][0] | {"ran_as": "cascade(torch)"}]
    assert "ran as cascade(torch)" in page(everything[3] | {"cells": cells})


def test_a_page_without_failing_cells_says_so(everything):
    cells = [cell for cell in everything[3]["cells"] if cell["status"] != "failing"]
    assert "No cell fails" in page(everything[3] | {"cells": cells})


def test_the_page_says_why_cells_are_refused(everything):
    (reason,) = {c["reason"] for c in everything[3]["cells"] if c["status"] == "refused"}
    below = everything[4].partition("<h2>Refused</h2>")[2]
    assert f"<td>torch</td><td>1</td><td>{escape(reason)}</td>" in below


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is full")
def test_a_disk_that_is_full_by_the_end_costs_the_file_alone(monkeypatch):
    words = []
    monkeypatch.setattr(report, "summary_line", lambda document: words.append("said") or "{}")
    with pytest.raises(ConfigError, match="--json must be a file that can be written, got '/dev/"):
        check("passes", json="/dev/full")
    assert words == ["said"]


@pytest.mark.parametrize("flag", ["json", "html"])
@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("absent/out", "No such file or directory"),
        (".", "Is a directory"),
        ("file/out", "Not a directory"),
        ("", "Is a directory|No such file"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_the_run(tmp_path, flag, path, text):
    (tmp_path / "file").touch()
    target = str(tmp_path / path) if path else ""
    with pytest.raises(
        ConfigError, match=rf"--{flag} must be a file that can be written.*({text})"
    ):
        check("hangs", **{flag: target})


def test_an_output_without_permission_is_refused_before_the_run(monkeypatch, tmp_path):
    plain = Path.open

    def refuse(path, mode="r", **settings):  # root may write anywhere
        if "r" not in mode:
            raise PermissionError(13, "Permission denied", str(path))
        return plain(path, mode, **settings)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ConfigError, match=r"out.json' \(Permission denied\); name a file in a fol"):
        check("hangs", json=str(tmp_path / "out.json"))


def test_the_test_of_an_output_leaves_it_as_it_was(tmp_path):
    kept, absent = tmp_path / "kept", tmp_path / "absent"
    kept.write_text("older")
    for path in (kept, absent):
        report.require_writable("--json", path)
    assert kept.read_text() == "older"
    assert not absent.exists()


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"quick": True, "full": True}, "the suite must be --quick or --full, got both"),
        ({"workers": 0}, "--workers must be at least 1, got 0"),
        ({"filter": "a and"}, "--filter must be an expression"),
        ({"json": "same", "html": "./same"}, "--html must be another file than --json"),
        ({"method": ["mla"]}, "--method must be one of dense"),
        ({"backend": ["unheard-of"]}, "--backend must be a backend that can be loaded"),
    ],
)
def test_flags_that_cannot_work_are_refused(monkeypatch, tmp_path, values, text):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=text):
        check("passes", **values)


def test_ctrl_c_leaves_the_cells_that_were_done(monkeypatch, tmp_path):
    """And the code of a program that was interrupted."""
    whole = check_module.run_cells

    def interrupted(cells, **how):
        yield next(iter(whole(cells, **how)))
        raise KeyboardInterrupt

    monkeypatch.setattr(check_module, "run_cells", interrupted)
    code, out, err = check("passes", "refused", json=str(tmp_path / "out.json"))
    document = json.loads((tmp_path / "out.json").read_text())
    jsonschema.validate(document, SCHEMA)
    assert (code, len(document["cells"]), document["interrupted"]) == (130, 1, True)
    assert json.loads(out.splitlines()[-1])["counts"] == document["counts"]
    assert err.endswith("stopped\n")


def test_ctrl_c_before_the_first_cell_leaves_nothing(monkeypatch):
    def interrupted(cells, **how):
        raise KeyboardInterrupt

    monkeypatch.setattr(check_module, "run_cells", interrupted)
    with pytest.raises(KeyboardInterrupt):
        check("passes")
