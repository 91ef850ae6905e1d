"""Flags that every verb with an engine has: what they refuse, what their help says and costs."""

import resource
import subprocess
import sys

import pytest
from click.testing import CliRunner

from paceline.cli.app import app

VERBS = [["generate"], ["chat"], ["bench", "latency"], ["explain"], ["env"], ["prove"]]


def run(*words):
    return CliRunner().invoke(app, ["bench", "latency", *words])


def test_a_model_given_twice_is_refused():
    done = run("a", "--model", "b")
    assert "model must be given once, got 'a' by position and 'b' by --model" in done.stderr


@pytest.mark.parametrize("typed", ["--max-num 4", "--batch 1", "--atten torch"])
def test_a_flag_cut_short_is_refused(typed):
    """It would change its meaning the day a second flag begins alike."""
    done = run(*typed.split())
    assert done.exit_code == 2
    assert "No such option" in done.stderr


def test_help_shows_choices_units_and_defaults():
    text = " ".join(run("--help").stdout.split())
    assert "One of auto, bfloat16, float16, float32; also bf16, half, fp16, float, fp32." in text
    assert "One of auto, dummy. [default: auto]" in text
    assert "[tokens] [default: chosen by the engine]" in text
    assert "-tp" in text
    assert "[tokens] [default: not forced]" in text
    assert "[default: the bundled head, with the bundled model]" in text


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_help_of_a_verb_takes_under_half_a_second(verb):
    """One run of three, in processes of their own, and of the processor: load is not its fault."""
    seconds = []
    while len(seconds) < 3 and min(seconds, default=1.0) >= 0.5:
        before = children_s()
        command = [sys.executable, "-m", "paceline", *verb, "--help"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        seconds.append(children_s() - before)
        assert "Usage: paceline" in done.stdout
    assert min(seconds) < 0.5, seconds


def children_s():
    """CPU seconds of the processes that this one started and has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
