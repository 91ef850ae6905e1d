"""The prompts of `generate`: typed, read from stdin, or from files."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., object])
STDIN = "-"


def prompt_flags(command: Command) -> Command:
    """Add --prompt, --prompt-file and --chat; a command receives them through `read_prompts`."""
    command = click.option(
        "--chat", "as_chat", is_flag=True, help="Each prompt is a user's message to the chat model."
    )(command)
    command = click.option(
        "--prompt-file",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        multiple=True,
        help="File that is one prompt, less the newline at its end.  May be repeated.",
    )(command)
    return click.option(
        "--prompt",
        multiple=True,
        help="Text to continue; - reads it from stdin, less the newline at its end.  May be "
        "repeated: prompts run together and are answered in order, those of files last.",
    )(command)


def read_prompts(values: Mapping[str, Any]) -> list[str]:
    """The texts, in order.  Raises UsageError when there is none, or stdin is named twice."""
    typed, files = values["prompt"], values["prompt_file"]
    if not typed and not files:
        raise click.UsageError(
            "nothing to continue: give --prompt TEXT, --prompt - or --prompt-file"
        )
    if typed.count(STDIN) > 1:
        raise click.UsageError("--prompt - reads stdin to its end: give it once")
    texts = [_from_stdin() if text == STDIN else text for text in typed]
    return [*texts, *map(read_text, files)]


def _from_stdin() -> str:
    return _decoded(sys.stdin.buffer.read(), "stdin")


def read_text(path: Path) -> str:
    """A file less the newline at its end.  Raises UsageError for what is not UTF-8."""
    return _decoded(path.read_bytes(), str(path))


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{name} must be UTF-8 text, got {error}; convert it") from error
