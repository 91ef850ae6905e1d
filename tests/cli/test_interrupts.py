"""Ctrl-C ends a command with what it has, and with 130."""

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest
from click.testing import CliRunner
from fake_engine import FakeEngine

from paceline.cli.app import app
from paceline.cli.console import has_colour

SCHEMAS = Path(__file__).parents[2] / "docs" / "schemas"


class Interrupted(FakeEngine):
    """Ctrl-C comes with the second snapshot of the first stream."""

    def _stream(self, params):
        for count, snapshot in enumerate(super()._stream(params)):
            if count == 1 and len(self.prompts) == 1:
                os.kill(os.getpid(), signal.SIGINT)
            yield snapshot


def run(*words, engine):
    return CliRunner().invoke(app, list(words), obj=engine)


def test_generate_shows_what_there_is():
    engine = Interrupted()
    done = run("generate", "--prompt", "x", engine=engine)
    assert done.exit_code == 130
    assert done.stdout == "one two \n"
    assert done.stderr.endswith("stopped\n")
    assert engine.closed


def test_the_document_says_how_it_ended():
    done = run("generate", "--prompt", "x", "--json", engine=Interrupted())
    assert done.exit_code == 130
    document = json.loads(done.stdout)
    assert (document["text"], document["finish_reason"]) == ("one two ", "abort")


@pytest.mark.parametrize("words", [["generate", "--prompt", "x"], ["chat"], ["bench", "latency"]])
def test_an_interrupt_at_the_start_says_so(words):
    def interrupted(**asked):
        raise KeyboardInterrupt

    done = run(*words, engine=interrupted)
    assert done.exit_code == 130
    assert done.stderr.endswith("stopped\n")


@pytest.mark.parametrize("flag", ["--quiet", "-q"])
def test_quiet_says_nothing_but_errors(flag):
    assert run("generate", "--prompt", "x", flag, engine=FakeEngine()).stderr == ""
    failed = run("generate", "--prompt", "x", flag, engine=FakeEngine(finish_reason="error"))
    assert failed.stderr == "Error: logits held NaN\n"


class Tiring(FakeEngine):
    """Ctrl-C comes in a batch of two."""

    def generate(self, prompts, params, stream=False, use_tqdm=None):
        if len(prompts) == 2:
            raise KeyboardInterrupt
        return super().generate(prompts, params, stream, use_tqdm)


def test_a_benchmark_tells_of_the_sizes_it_has_timed():
    engine = Tiring()
    words = ["--batch-size", "1,2", "--input-len", "5", "--output-len", "4"]
    done = run("bench", "latency", *words, engine=engine)
    assert done.exit_code == 130
    document = json.loads(done.stdout.splitlines()[-1])
    jsonschema.validate(document, json.loads((SCHEMAS / "bench_latency.json").read_text()))
    assert [row["batch_size"] for row in document["results"]] == [1]
    assert document["interrupted"]
    assert done.stderr.endswith("stopped\n")
    assert engine.closed


def test_nothing_timed_is_no_document():
    done = run("bench", "latency", "--batch-size", "2", "--output-len", "4", engine=Tiring())
    assert done.exit_code == 130
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("environment", "is_terminal", "wanted"),
    [
        ({}, True, True),
        ({"NO_COLOR": "1"}, True, False),
        ({"NO_COLOR": ""}, True, True),
        ({}, False, False),
    ],
)
def test_colour_is_for_terminals_that_want_it(monkeypatch, environment, is_terminal, wanted):
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert has_colour(SimpleNamespace(isatty=lambda: is_terminal)) == wanted
