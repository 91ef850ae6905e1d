"""Command-line flags made from the engine's options, so that no flag is written twice."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from typing import Any, TypeVar

import click

from paceline.core.options import EngineOptions, OptionSpec, spec_of
from paceline.core.parallel import Parallel

Command = TypeVar("Command", bound=Callable[..., object])


def engine_flags(command: Command) -> Command:
    """Add every engine option to a command; it receives them through `asked_options`."""
    for option in reversed(fields(EngineOptions)):
        command = _flag(option)(command)
    return click.option(
        "--tensor-parallel-size",
        "--tp-size",
        "--tp",
        type=int,
        expose_value=False,
        callback=_refuse_parallel,
        help="GPUs that share one model; only 1 is served.",
    )(command)


def sampling_flags(command: Command) -> Command:
    """Add the sampling flags; a command receives them by their SamplingParams names."""
    for decorate in (
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
            default=128,
            show_default=True,
            help="Longest output.  [tokens]",
        ),
    ):
        command = decorate(command)
    return command


def asked_options(values: Mapping[str, object]) -> dict[str, object]:
    """The engine options that were typed, by field name."""
    names = (option.name for option in fields(EngineOptions))
    return {name: values[name] for name in names if values.get(name) is not None}


def log_to_stderr() -> None:
    """Show the engine's choices and events on stderr, as plain lines."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("paceline")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)


def _flag(option: Field[Any]) -> Callable[[Command], Command]:
    spec = spec_of(option)
    default = "chosen by the engine" if option.default is None else option.default
    unit = f" [{spec.unit}]" if spec.unit else ""
    help_text = f"{spec.help}{unit}  [default: {default}]"
    if spec.kind is bool:
        return _bool_flag(option.name, spec, help_text)
    return click.option(
        *spec.flags,
        option.name,
        type=_click_type(option, spec),
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
    if spec.choices is None:
        return spec.kind
    open_word = ("auto",) if option.default is None and "auto" not in spec.choices else ()
    return click.Choice([*open_word, *spec.choices])


def _refuse_parallel(
    ctx: click.Context, parameter: click.Parameter, value: int | None
) -> int | None:
    if value is not None:
        Parallel(rank=0, size=value)
    return value
