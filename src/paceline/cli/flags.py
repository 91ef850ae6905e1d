"""Command-line flags made from the engine's options, so that no flag is written twice."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from typing import Any, TypeVar

import click

from paceline.core.option_spec import OptionSpec, spec_of
from paceline.core.options import EngineOptions
from paceline.core.parallel import Parallel
from paceline.engine.arguments import (
    PARALLEL_FLAGS,
    PARALLEL_HELP,
    asked_model,
    choices_of,
    help_of,
)

Command = TypeVar("Command", bound=Callable[..., object])


def engine_flags(command: Command) -> Command:
    """Add every engine option to a command, and the model by position; it receives them through
    `asked_options`.
    """
    for option in reversed(fields(EngineOptions)):
        command = _flag(option)(command)
    command = click.argument("model_argument", metavar="[MODEL]", required=False)(command)
    return click.option(
        *PARALLEL_FLAGS,
        type=int,
        expose_value=False,
        callback=_refuse_parallel,
        help=PARALLEL_HELP,
    )(command)


def sampling_flags(*, max_tokens: int | None) -> Callable[[Command], Command]:
    """The sampling flags; a command receives them by their SamplingParams names.

    `max_tokens` is the default; None means the rest of the context.
    """

    def add(command: Command) -> Command:
        for decorate in _sampling_options(max_tokens):
            command = decorate(command)
        return command

    return add


def _sampling_options(max_tokens: int | None) -> tuple[Callable[[Command], Command], ...]:
    rest = "" if max_tokens is not None else "  [default: the rest of the context]"
    return (
        click.option("--top-p", type=float, default=1.0, show_default=True, help="Nucleus mass."),
        click.option("--top-k", type=int, default=None, help="Most likely tokens kept."),
        click.option(
            "--temperature",
            type=float,
            default=0.0,
            show_default=True,
            help="0 takes the most likely token.",
        ),
        click.option(
            "--max-tokens",
            "--max-new-tokens",
            type=int,
            default=max_tokens,
            show_default=max_tokens is not None,
            help=f"Longest output.  [tokens]{rest}",
        ),
    )


def asked_options(values: Mapping[str, object]) -> dict[str, object]:
    """The engine options that were typed, by field name.  Raises ConfigError."""
    names = (option.name for option in fields(EngineOptions))
    asked = {name: values[name] for name in names if values.get(name) not in (None, ())}
    return asked | asked_model(values["model_argument"], asked.get("model"))


def log_to_stderr() -> None:
    """Show the engine's choices and events on stderr, as plain lines."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("paceline")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)


def _flag(option: Field[Any]) -> Callable[[Command], Command]:
    spec = spec_of(option)
    help_text = help_of(spec, option.default)
    if spec.kind is bool:
        return _bool_flag(option.name, spec, help_text)
    return click.option(
        *spec.flags,
        option.name,
        type=_click_type(option, spec),
        multiple=spec.kind is tuple,
        default=None,
        help=help_text,
    )


def _bool_flag(name: str, spec: OptionSpec, help_text: str) -> Callable[[Command], Command]:
    if not spec.off_flags:
        return click.option(*spec.flags, name, is_flag=True, default=None, help=help_text)
    on, off = " / ".join([spec.flags[0], spec.off_flags[0]]), spec.off_flags[1:]
    declarations = [on, *(f" /{flag}" for flag in off)]
    return click.option(*declarations, name, default=None, help=help_text)


def _click_type(option: Field[Any], spec: OptionSpec) -> Any:
    if spec.kind is tuple:
        return str
    return spec.kind if spec.choices is None else click.Choice(choices_of(spec, option.default))


def _refuse_parallel(
    ctx: click.Context, parameter: click.Parameter, value: int | None
) -> int | None:
    if value is not None:
        Parallel(rank=0, size=value)
    return value
