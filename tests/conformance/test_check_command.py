"""`paceline check` under click, and that both command lines have the same flags."""

import json
import re

import pytest
from click.testing import CliRunner
from fake_harness import HARNESS, suite_of

from paceline.cli.app import app
from paceline.conformance.check import main
from paceline.conformance.check_flags import EPILOG, FLAGS


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


def test_both_helps_show_every_flag_and_the_examples(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    for text in (capsys.readouterr().out, run("--help").stdout):
        assert {flag.flag for flag in FLAGS} <= set(re.findall(r"--[a-z]+", text))
        for example in re.findall(r"^  paceline check(.+)$", EPILOG, re.MULTILINE):
            assert example in text
