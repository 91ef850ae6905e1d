"""`paceline debug replay`: what it prints, and its exit codes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from box_cases import boxed, trip_token, tripping
from click.testing import CliRunner, Result
from llm_cases import GREEDY, Checkpoint, make_llm, random_prompts

from children import PACELINE
from paceline.cli.app import app

PROMPTS = random_prompts((20, 9))


def run(*words: object) -> Result:
    return CliRunner().invoke(app, ["debug", "replay", *map(str, words)])


@pytest.fixture(scope="module")
def failed(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The black box of an engine that a planted fault ended."""
    folder = tmp_path_factory.mktemp("box")
    with make_llm(checkpoint) as plain:
        token = trip_token(plain, PROMPTS[0], at=6)
    options = {"logits_processors": ["planted:Raises"], "enforce_eager": True}
    with boxed(checkpoint, folder, **options) as llm, pytest.raises(ZeroDivisionError):
        llm.generate(PROMPTS, [tripping(token), GREEDY])
    [path] = folder.iterdir()
    return path


def test_a_failure_that_comes_again_is_said_so(failed: Path) -> None:
    done = run(failed, "--verbose")
    assert done.exit_code == 0, done.output
    recorded, text, *trace, replayed, difference, end = done.stdout.splitlines()
    steps = recorded.rpartition(" ")[2]
    assert recorded.startswith("recorded    20")
    assert recorded.endswith(f"Z: ZeroDivisionError in step {steps}")
    assert text == "            a planted fault"
    assert trace[-1].endswith(" apply")
    assert "planted.py:" in trace[-1]
    assert replayed.startswith(f"replayed    {steps} steps, ")
    assert replayed.endswith(" tokens compared, 0 tokens of the cache computed before")
    assert difference == "difference  none"
    assert end == f"reproduced  ZeroDivisionError in step {steps} of {steps}: a planted fault"
    assert f"step {steps} of {steps}: decode step" in done.stderr


def test_one_that_does_not_ends_with_1(failed: Path) -> None:
    done = run(failed, "--logits-processor", "planted:Trip", "--quiet")
    assert done.exit_code == 1
    assert done.stdout.splitlines()[-1].startswith("not so      all ")
    assert "planted.py" not in done.stdout
    assert done.stderr == ""


def test_what_cannot_be_run_ends_with_2(failed: Path, tmp_path: Path) -> None:
    (tmp_path / "other").write_text("[]")
    for words, text in (
        ((failed, "--page-size", "8"), "page_size must be as recorded"),
        ((tmp_path / "other",), "black box file 'other' must be what a black box wrote"),
        ((tmp_path / "none",), "black box file 'none' must be a file that can be read"),
    ):
        done = run(*words)
        assert done.exit_code == 2
        assert text in done.stderr


def test_another_version_is_told(failed: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.write_text(failed.read_text().replace('"tokenizers":"', '"tokenizers":"0.'))
    done = run(old)
    assert done.exit_code == 0
    assert "tokenizers: recorded 0." in done.stderr


@pytest.mark.parametrize("kind", ["Stuck", "ZeroDivisionError"])
def test_a_step_that_hangs_is_left(failed: Path, tmp_path: Path, kind: str) -> None:
    """It was recorded as one that hangs, or is another failure now."""
    hung = tmp_path / "hung"
    hung.write_text(failed.read_text().replace('"kind":"ZeroDivisionError"', f'"kind":"{kind}"'))
    words = ["--logits-processor", "planted:Hangs", "--stuck-seconds", "1"]
    done = subprocess.run(
        [*PACELINE, "debug", "replay", str(hung), *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)])},
    )
    verdict, code = ("reproduced", 0) if kind == "Stuck" else ("not so    ", 1)
    assert done.stdout.splitlines()[-1] == f"{verdict}  the step did not end within 1 s"
    assert done.returncode == code


def test_its_help_teaches() -> None:
    done = run("--help")
    for text in ("--enforce-eager", "token ids", "git bisect", "Exit code 0", "--device"):
        assert text in done.stdout
