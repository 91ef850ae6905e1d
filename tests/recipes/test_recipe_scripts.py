"""The recipe's commands say what they take, and the parse score counts what it says."""

import importlib
import re
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

RECIPES = Path(__file__).parents[2] / "recipes"
COMMANDS = ("acceptance_band", "evaluate", "evaluate_head", "prepare", "train", "train_head")

sys.path.append(str(RECIPES))

from parse_score import cut_at_last_line, parse_report, parses, read_headers  # noqa: E402


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run(monkeypatch, capsys):
    """Calls a command that ends before it has done anything."""

    def call(name, *words):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
        with pytest.raises(SystemExit) as end:
            importlib.import_module(name).main()
        return Done(end.value.code or 0, *capsys.readouterr())

    return call


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_every_flag_the_pages_use(name, run):
    done = run(name, "--help")
    assert done.returncode == 0, done.stderr
    pages = [RECIPES / "README.md", *RECIPES.glob("*.py")]
    text = "\n".join(page.read_text() for page in pages)
    lines = re.findall(rf"^    python recipes/{name}\.py([^#\n]*)", text, re.MULTILINE)
    assert lines
    for flag in re.findall(r"--[a-z-]+", " ".join(lines)):
        assert re.search(rf"{flag}\b(?!-)", done.stdout), flag


def test_bits_without_prepared_data_are_refused_with_the_remedy(tmp_path, run):
    done = run("evaluate", "--model", str(tmp_path), "--data", str(tmp_path))
    assert done.returncode == 2
    assert f"--data: expected heldout.npz in {tmp_path}" in done.stderr
    assert "run recipes/prepare.py first, or score with --parse-only" in done.stderr


@pytest.mark.parametrize("name", ["train", "train_head"])
def test_training_without_prepared_data_is_refused_with_the_remedy(name, tmp_path, run):
    done = run(name, "--data", str(tmp_path), "--out", str(tmp_path))
    assert done.returncode == 2
    assert f"expected train.npz in {tmp_path}; run recipes/prepare.py first" in done.stderr


def test_a_heads_score_without_prepared_data_is_refused_with_the_remedy(tmp_path, run):
    done = run("evaluate_head", "--data", str(tmp_path))
    assert done.returncode == 2
    assert f"expected heldout.npz in {tmp_path}; run recipes/prepare.py first" in done.stderr


def test_the_headers_are_a_hundred_different_ones():
    headers = read_headers()
    assert len({item["header"] for item in headers}) == 100
    assert all(re.match(r"(async )?def \w+\(.*:$", item["header"]) for item in headers)
    assert all(item["path"].endswith(".py") for item in headers)


def test_an_unfinished_last_line_is_cut_off():
    assert cut_at_last_line("\n    x = 1\n    retu", ended=False) == "\n    x = 1\n"
    assert cut_at_last_line("\n    return 1", ended=True) == "\n    return 1"
    assert cut_at_last_line(" return 1", ended=False) == ""


@pytest.mark.parametrize(
    ("header", "body", "expected"),
    [
        ("def f(x):", "\n    return x", True),
        ("def f(x):", "\n    if x:\n", False),
        ("def f(x):", "\nreturn x\n", False),
        ("def f(x): pass", "", False),
        ("def f(x): pass", "\n  \n", False),
        ("def f(x):", "\n    return '\0'", False),
    ],
    ids=["body", "open block", "no indent", "empty", "blank", "null character"],
)
def test_a_completion_counts_when_header_and_body_parse(header, body, expected):
    assert parses(header, body) is expected


def test_a_report_pairs_headers_with_completions():
    headers = [{"header": "def f():", "path": "a.py"}, {"header": "def g():", "path": "b.py"}]
    report = parse_report(headers, [("\n    return 1\n    x =", False), ("", True)])
    assert [(item["path"], item["parses"]) for item in report] == [("a.py", True), ("b.py", False)]
    with pytest.raises(ValueError, match="shorter"):
        parse_report(headers, [("", True)])
