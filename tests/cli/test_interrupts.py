"""Ctrl-C ends a command with what it has, and with 130."""

import json
import os
import signal

import pytest
from click.testing import CliRunner
from fake_engine import FakeEngine

from paceline.cli.app import app


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
