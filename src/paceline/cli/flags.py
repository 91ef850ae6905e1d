"""Command-line flags made from the engine's options, so that no flag is written twice."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from typing import Any, TypeVar

import click

from paceline.cli.verb import GroupedOption
from paceline.core.option_spec import OptionSpec, spec_of
from paceline.core.options import EngineOptions
from paceline.core.parallel import PARALLEL_FLAGS, Parallel
from paceline.plan.arguments import PARALLEL_HELP, help_of, is_read_from_text

Command = TypeVar("Command", bound=Callable[..., object])


def engine_flags(command: Command) -> Command:
    """Add every engine option to a command, and the model by position; it receives them through
    `engine.arguments.asked_arguments`.
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


def log_flags(command: Command) -> Command:
    """Add --verbose and --quiet; a command passes them to `log_to_stderr`."""
    command = click.option(
        "--quiet", "-q", is_flag=True, help="Say nothing on stderr but errors; no progress."
    )(command)
    return click.option(
        "--verbose", "-v", is_flag=True, help="Tables of every option and of the memory at start."
    )(command)


def log_to_stderr(values: Mapping[str, Any]) -> None:
    """Show the engine's choices and events on stderr, as plain lines, as far as `log_flags` say."""
    if values["verbose"] and values["quiet"]:
        raise click.UsageError("--verbose and --quiet exclude each other: drop one")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("paceline")
    logger.handlers = [handler]
    level = logging.DEBUG if values["verbose"] else logging.INFO
    logger.setLevel(logging.ERROR if values["quiet"] else level)


def _flag(option: Field[Any]) -> Callable[[Command], Command]:
    spec = spec_of(option)
    settings: dict[str, Any] = {"type": spec.kind}
    declarations = list(spec.flags)
    if spec.kind is bool:
        settings = {} if spec.off_flags else {"is_flag": True}
        declarations = _switches(spec)
    elif spec.kind is tuple:
        settings = {"type": str, "multiple": True}
    elif is_read_from_text(spec):
        settings = {"type": str, "metavar": "WORD" if spec.choices else "SIZE"}
    return click.option(
        *declarations,
        option.name,
        cls=GroupedOption,
        group=spec.group,
        default=None,
        help=help_of(spec, option.default),
        **settings,
    )


def _switches(spec: OptionSpec) -> list[str]:
    if not spec.off_flags:
        return list(spec.flags)
    on, off = " / ".join([spec.flags[0], spec.off_flags[0]]), spec.off_flags[1:]
    return [on, *(f" /{flag}" for flag in off)]


def _refuse_parallel(
    ctx: click.Context, parameter: click.Parameter, value: int | None
) -> int | None:
    if value is not None:
        Parallel(rank=0, size=value)
    return value
