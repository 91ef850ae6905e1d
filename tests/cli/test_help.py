"""What help shows: groups, and examples that can be typed."""

import shlex

import click
import pytest
from click.testing import CliRunner

from paceline.cli.app import VERBS, app
from paceline.cli.verb import Verb


def commands():
    """(words, command) of every verb and of what is below it."""
    context = click.Context(app)
    for name in VERBS:
        command = app.get_command(context, name)
        if isinstance(command, click.Group):
            yield from ((f"{name} {below}", each) for below, each in command.commands.items())
        else:
            yield name, command


COMMANDS = dict(commands())


def help_of(words):
    done = CliRunner().invoke(app, [*words.split(), "--help"], terminal_width=100)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize("words", COMMANDS)
def test_every_verb_gives_examples_that_it_understands(words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "start.py").touch()
    assert isinstance(COMMANDS[words], Verb)
    lines = [line.strip() for line in help_of(words).splitlines()]
    typed = [line.partition("  ")[0] for line in lines if "paceline " + words in line]
    examples = [line.rpartition("| ")[2] for line in typed if not line.startswith("Usage")]
    assert examples
    for line in examples:
        after = shlex.split(line[line.index("paceline ") :])[1 + len(words.split()) :]
        with COMMANDS[words].make_context(words, after, resilient_parsing=False):
            pass


@pytest.mark.parametrize("words", ["generate", "explain", "serve"])
def test_engine_options_come_in_groups(words):
    text = help_of(words)
    titles = [line[:-1] for line in text.splitlines() if line.endswith(":") and line[0] != " "]
    groups = ["Model", "Memory", "Requests and steps", "Attention and graphs", "Speculation"]
    assert titles[0] == "Options"
    assert [title for title in titles if title in groups] == groups
    assert ("Sampling" in titles) == (words == "generate")
    speculation = text.partition("Speculation:")[2]
    assert "--speculative-num-steps" in speculation
    assert "--dtype" not in speculation


def test_the_version_is_that_of_the_package():
    from importlib.metadata import version

    assert CliRunner().invoke(app, ["--version"]).stdout == f"paceline {version('paceline')}\n"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("generat", "No such command 'generat'; did you mean generate?"),
        ("Serve", "No such command 'Serve'; did you mean serve?"),
        ("xyzzy", "No such command 'xyzzy'; there are bench, chat, check, debug, env, explain"),
        ("bench latncy", "No such command 'latncy'; did you mean latency?"),
        ("debug fix", "No such command 'fix'; did you mean fixes?"),
        ("generate --promt x", "--prompt"),
        ("explain Llama-3.1-8B", "got 'Llama-3.1-8B'; did you mean llama-3.1-8b?"),
        ("explain Bundled", "got 'Bundled'; did you mean bundled?"),
        ("explain qwen3", "did you mean qwen3-30b-a3b or qwen3-8b or qwen3-embedding-0.6b?"),
        ("explain --gpu a100", "got a100; did you mean a100-40gb or a100-80gb?"),
        ("explain --dtype bfloat", "did you mean bfloat16?"),
        ("explain --attention-backend tritn", "got 'tritn'; did you mean triton?"),
        ("explain --tp 2 --gpu h200", "must be one of 1, got 2: there are 3 heads; choose one"),
        ("explain --max-model-len 4GiB", "must be a number of tokens such as 4096 or 32k"),
    ],
)
def test_near_misses_get_a_suggestion(words, text):
    done = CliRunner().invoke(app, words.split())
    assert done.exit_code == 2
    assert text in " ".join(done.stderr.split())
