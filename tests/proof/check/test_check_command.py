"""`paceline check` and its flags."""

import json
import re

import pytest
from click.testing import CliRunner
from fake_harness import HARNESS, suite_of

from paceline.cli.app import app
from paceline.cli.check import check
from paceline.proof.check.flags import FLAGS

pytestmark = pytest.mark.usefixtures("warm_workers")


def run(*words, names=("passes",)):
    given = {"suite": suite_of(*names), "harness": HARNESS}
    device = [] if "--device" in words else ["--device", "cpu"]
    return CliRunner().invoke(app, ["check", *device, *words], obj=given)


def test_a_passing_run_ends_with_its_counts_and_code_0(tmp_path):
    done = run("--backend", "a", "--backend", "b", "--json", str(tmp_path / "out.json"))
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout.splitlines()[-1])["counts"]["proven"] == 4
    cells = json.loads((tmp_path / "out.json").read_text())["cells"]
    assert {cell["backend"] for cell in cells} == {"a", "b"}


def test_a_failing_cell_is_code_1():
    done = run("--backend", "a", names=("passes", "fails"))
    assert done.exit_code == 1
    assert "FAILING dense/a/decode/recorded/fails\n  row 3 is wrong" in done.stdout
    again = "--full --backend a --filter dense/a/decode/recorded/fails"
    assert f"  again: paceline check {again}\n" in done.stdout


def test_a_run_is_compared_with_an_earlier_one_bit_by_bit(tmp_path):
    earlier = tmp_path / "earlier.json"
    first = run("--backend", "a", "--json", str(earlier))
    assert first.exit_code == 0, first.output
    same = run("--backend", "a", "--against", str(earlier))
    assert same.exit_code == 0, same.output
    assert f"against {earlier}: 2 digests equal, 0 differ, 0 gone, 0 not asked for\n" in same.stdout

    document = json.loads(earlier.read_text())
    eager = document["cells"][0]
    assert eager["runner"] == "eager"
    eager["digest"] = "0" * 64
    document["versions"] |= {"torch": "1.0"}
    earlier.write_text(json.dumps(document))
    other = run("--backend", "a", "--against", str(earlier))
    assert other.exit_code == 1
    assert "DIFFERS dense/a/decode/eager/passes\n" in other.stdout
    assert (
        f"against {earlier}: 1 digests equal, 1 differ, 0 gone, 0 not asked for\n" in other.stdout
    )
    assert f"versions of {earlier}: {document['versions']}, here: " in other.stdout


def test_a_cell_that_lost_its_digest_is_not_as_it_was(tmp_path):
    earlier = tmp_path / "earlier.json"
    run("--backend", "a", "--json", str(earlier), names=("passes",))
    document = json.loads(earlier.read_text())
    for cell in document["cells"]:
        cell["variant"] = "refused"
    earlier.write_text(json.dumps(document))
    done = run("--backend", "a", "--against", str(earlier), names=("refused", "passes"))
    assert done.exit_code == 1
    assert "HAS NO DIGEST dense/a/decode/eager/refused\n" in done.stdout
    assert "0 digests equal, 0 differ, 2 gone, 0 not asked for\n" in done.stdout


def test_a_run_that_shares_no_cell_with_the_earlier_one_shows_nothing(tmp_path):
    earlier = tmp_path / "earlier.json"
    run("--backend", "a", "--json", str(earlier))
    done = run("--backend", "b", "--against", str(earlier))
    assert done.exit_code == 1
    assert "0 digests equal, 0 differ, 0 gone, 2 not asked for\n" in done.stdout


def test_cells_are_picked_by_a_file_of_names(tmp_path):
    names = tmp_path / "cells.txt"
    names.write_text("# the one that counts\n\ndense/a/decode/eager/passes\n")
    done = run("--backend", "a", "--cells", str(names), names=("passes", "fails"))
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout.splitlines()[-1])["counts"]["proven"] == 1


@pytest.mark.parametrize(
    ("flag", "text", "said"),
    [
        ("--cells", None, "--cells must be a file with names of cells, one a line, got FileNotFou"),
        ("--cells", "# none\n", "cells.txt', which names none; `paceline check --full"),
        ("--cells", "dense/a/decode/eager/gone\n", "got 1 others, such as 'dense/a/decode/eager/g"),
        ("--against", None, "--against must be a document of `paceline check --json` with digests"),
        ("--against", "{}", "cells.txt' (KeyError: 'cells')"),
        ("--against", '{"cells": [], "device": {}, "versions": {}}', "(0 cells without a digest)"),
    ],
)
def test_files_that_cannot_be_used_are_refused_before_a_cell_runs(tmp_path, flag, text, said):
    path = tmp_path / "cells.txt"
    if text is not None:
        path.write_text(text)
    done = run("--backend", "a", flag, str(path), names=("hangs",))
    assert done.exit_code == 2
    assert said in done.stderr


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--filter", "a)"], "ConfigError: --filter must be an expression with and, or, or the"),
        (["--json", "/"], "ConfigError: --json must be a file that can be written, got '/'"),
        (["--device", "tpu"], "'tpu' is not one of 'auto', 'cpu', 'cuda'"),
        (["--workers", "many"], "'many' is not a valid integer"),
        (["--unheard-of"], "No such option"),
    ],
)
def test_bad_arguments_are_code_2(words, text):
    done = run(*words, names=("hangs",))
    assert done.exit_code == 2
    assert text in done.stderr


def test_help_shows_every_flag_and_the_examples():
    text = run("--help").stdout
    assert {flag.flag for flag in FLAGS} <= set(re.findall(r"--[a-z-]+", text))
    assert check.epilog
    examples = re.findall(r"^  paceline check(.+)$", check.epilog, re.MULTILINE)
    assert len(examples) > 1
    assert not [example for example in examples if example not in text]
