"""Command-line flags made from the engine's options, so that no flag is written twice."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields
from typing import Any, TypeVar

import click

from paceline.cli.verb import GroupedOption
from paceline.core.errors import ConfigError
from paceline.core.options.asked import SIZES, engine_options, named
from paceline.core.options.engine_options import EngineOptions
from paceline.core.options.spec import Flag, OptionSpec, spec_of

Command = TypeVar("Command", bound=Callable[..., object])


def engine_flags(command: Command) -> Command:
    """Add every engine option to a command, and the model by position; it receives them through
    `asked_arguments`.
    """
    for option in reversed(fields(EngineOptions)):
        command = _flag(option)(command)
    return click.argument("model_argument", metavar="[MODEL]", required=False)(command)


def asked_arguments(values: Mapping[str, Any]) -> dict[str, object]:
    """The engine options that were typed, by field name and in the engine's words.

    values: what was parsed.  Raises ConfigError, before an engine is built.
    """
    names = (option.name for option in fields(EngineOptions))
    typed = {name: values[name] for name in names if values.get(name) not in (None, ())}
    asked = named(typed | _asked_model(values["model_argument"], typed.get("model")))
    engine_options(asked)
    return asked


def _asked_model(positional: object, flag: object) -> dict[str, object]:
    """The model, given by position or by flag.  Raises ConfigError when given twice."""
    if positional is not None and flag is not None:
        raise ConfigError.about(
            "model",
            expected="given once",
            got=f"{positional!r} by position and {flag!r} by --model",
            remedy="keep one of the two",
        )
    model = positional if flag is None else flag
    return {} if model is None else {"model": model}


def data_flags(flags: Sequence[Flag]) -> Callable[[Command], Command]:
    """Add flags that are given as data."""

    def add(command: Command) -> Command:
        for flag in reversed(flags):
            command = _data_flag(flag)(command)
        return command

    return add


def log_flags(command: Command) -> Command:
    """Add --verbose and --quiet; a command passes them to `log_to_stderr`."""
    command = click.option(
        "--quiet", "-q", is_flag=True, help="Say nothing on stderr but errors; no progress."
    )(command)
    return click.option(
        "--verbose", "-v", is_flag=True, help="Tables of every option and of the memory at start."
    )(command)


def log_to_stderr(
    values: Mapping[str, Any], stream: Any = None, *, others: Sequence[str] = ()
) -> None:
    """Show the engine's choices and events on stderr, as plain lines, as far as `log_flags` say.

    stream: in its place; others: loggers of other packages, whose warnings are shown too.
    """
    if values["verbose"] and values["quiet"]:
        raise click.UsageError("--verbose and --quiet exclude each other: drop one")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("paceline")
    logger.handlers = [handler]
    level = logging.DEBUG if values["verbose"] else logging.INFO
    logger.setLevel(logging.ERROR if values["quiet"] else level)
    for name in others:
        logging.getLogger(name).handlers = [handler]


def _data_flag(flag: Flag) -> Callable[[Command], Command]:
    if flag.kind is bool:
        return click.option(flag.flag, is_flag=True, help=flag.help)
    return click.option(
        flag.flag,
        type=flag.kind if flag.choices is None else click.Choice(flag.choices),
        default=flag.default,
        show_default=flag.default is not None,
        metavar=flag.metavar,
        multiple=flag.is_repeated,
        help=flag.help,
    )


def _flag(option: Field[Any]) -> Callable[[Command], Command]:
    spec = spec_of(option)
    settings: dict[str, Any] = {"type": spec.kind}
    declarations = list(spec.flags)
    if spec.kind is bool:
        settings = {} if spec.off_flags else {"is_flag": True}
        declarations = _switches(spec)
    elif spec.kind is tuple:
        settings = {"type": str, "multiple": True}
    elif _is_read_from_text(spec):
        settings = {"type": str, "metavar": "WORD" if spec.choices else "SIZE"}
    return click.option(
        *declarations,
        option.name,
        cls=GroupedOption,
        group=spec.group,
        default=None,
        help=_help_of(spec, option.default),
        **settings,
    )


def _switches(spec: OptionSpec) -> list[str]:
    if not spec.off_flags:
        return list(spec.flags)
    on, off = " / ".join([spec.flags[0], spec.off_flags[0]]), spec.off_flags[1:]
    return [on, *(f" /{flag}" for flag in off)]


def _help_of(spec: OptionSpec, default: object) -> str:
    """Help text with choices, unit and default."""
    shown = spec.left_out if default is None else default
    choices = f" One of {_words(spec, default)}." if spec.choices else ""
    unit = f" [{spec.unit}]" if spec.unit else ""
    return f"{spec.help}{choices}{unit}  [default: {shown}]"


def _is_read_from_text(spec: OptionSpec) -> bool:
    """Whether `core.options.asked` makes the value from the word that was typed."""
    return spec.choices is not None or (spec.kind is int and spec.unit in SIZES)


def _words(spec: OptionSpec, default: object) -> str:
    """The words an option takes; 'auto' leaves an undecided one to the engine."""
    assert spec.choices is not None
    open_word = ("auto",) if default is None and "auto" not in spec.choices else ()
    also = ", ".join(word for word, _ in spec.aliases)
    return ", ".join((*open_word, *spec.choices)) + (f"; also {also}" if also else "")
