"""The form of an answer, as it is typed: a schema or grammar in a file, an expression, choices."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from paceline.cli.prompts import read_text
from paceline.cli.verb import GroupedOption

GROUP = "Form of the answer"
Command = TypeVar("Command", bound=Callable[..., object])
_FILE = {"type": click.Path(path_type=Path, exists=True, dir_okay=False)}
# Keys of structured_outputs, and how each is typed.
_FORMS: dict[str, tuple[str, dict[str, Any], str]] = {
    "json": ("--json-schema", _FILE, "File with a JSON schema; the answer is JSON of it."),
    "json_object": ("--json-object", {"is_flag": True}, "The answer is a JSON object."),
    "regex": ("--regex", {}, "Regular expression of the whole answer."),
    "choice": ("--choice", {"multiple": True}, "The answer is one of these.  May be repeated."),
    "grammar": ("--grammar", _FILE, "File with a grammar of Lark or GBNF."),
}


def structure_flags(command: Command) -> Command:
    """Add a flag for each form; a command receives them through `asked_structure`."""
    for kind in reversed(_FORMS):
        flag, settings, told = _FORMS[kind]
        command = click.option(
            flag, f"form_{kind}", cls=GroupedOption, group=GROUP, help=told, **settings
        )(command)
    return command


def asked_structure(values: Mapping[str, Any]) -> dict[str, object]:
    """{"structured_outputs": what was typed}; empty where nothing was.  Raises UsageError."""
    typed = {kind: values[f"form_{kind}"] for kind in _FORMS if values[f"form_{kind}"]}
    if not typed:
        return {}
    if values["structured_outputs"] is not None:
        flags = " and ".join(["--structured-outputs", *(_FORMS[kind][0] for kind in typed)])
        raise click.UsageError(f"an answer has one form, got {flags}; keep one")
    return {
        "structured_outputs": {
            kind: read_text(said) if isinstance(said, Path) else said
            for kind, said in typed.items()
        }
    }
