"""The command line without click agrees with the one with it."""

import argparse
import resource
import subprocess
import sys

import pytest
from test_verbs import ALIASES, TWICE

from paceline.bench import latency as bench_latency
from paceline.core.errors import ConfigError
from paceline.plan.arguments import add_engine_arguments, asked_arguments

VERBS = [["generate"], ["chat"], ["bench", "latency"], ["explain"], ["env"], ["prove"]]


def parse(*words):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_engine_arguments(parser)
    return asked_arguments(vars(parser.parse_args(words)))


@pytest.mark.parametrize(("typed", "asked"), ALIASES, ids=[typed for typed, _ in ALIASES])
def test_the_aliases_are_those_of_the_command(typed, asked):
    assert parse(*typed.split()) == asked


@pytest.mark.parametrize("flag", ["-tp", "--tp", "--tp-size", "--tp_size"])
def test_more_than_one_gpu_is_refused(flag):
    with pytest.raises(ConfigError, match="parallel must be rank 0 of size 1"):
        parse(flag, "2")


def test_a_model_given_twice_is_refused():
    with pytest.raises(ConfigError, match="model must be given once, got 'a' by position and 'b'"):
        parse("a", "--model", "b")


@pytest.mark.parametrize("typed", ["--max-num 4", "--batch 1", "--atten torch"])
def test_a_flag_cut_short_is_refused(typed, capsys):
    """It would change its meaning the day a second flag begins alike."""
    with pytest.raises(SystemExit):
        bench_latency.main(typed.split())
    assert "unrecognized arguments" in capsys.readouterr().err


@pytest.mark.parametrize("typed", TWICE)
def test_an_option_given_twice_is_refused(typed, capsys):
    with pytest.raises(SystemExit):
        bench_latency.main(typed.split())
    assert "may be given once" in capsys.readouterr().err


def test_help_shows_choices_units_and_defaults(capsys):
    with pytest.raises(SystemExit):
        bench_latency.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
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
