"""Engine options for argparse, for programs that run where click is not installed.

Everything else that is typed before an engine is built is here too, so that the command line and
these programs agree: the positional model, and the parallel size of which only 1 is served.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from paceline.core.errors import ConfigError, message
from paceline.core.option_spec import OptionSpec, spec_of
from paceline.core.options import EngineOptions
from paceline.core.parallel import Parallel

PARALLEL_FLAGS = ("--tensor-parallel-size", "--tp-size", "--tp", "-tp")
PARALLEL_HELP = "GPUs that share one model; only 1 is served."


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` every engine option; one that is not typed leaves no attribute."""
    parser.add_argument(
        "model_argument", nargs="?", metavar="MODEL", default=None, help="As --model."
    )
    for option in fields(EngineOptions):
        spec = spec_of(option)
        common: dict[str, Any] = {"dest": option.name, "default": argparse.SUPPRESS}
        if spec.kind is bool:
            common["nargs"] = 0
            add_flag(parser, *spec.flags, const=True, help=spec.help, **common)
            if spec.off_flags:
                help_text = f"The opposite of {spec.flags[0]}."
                add_flag(parser, *spec.off_flags, const=False, help=help_text, **common)
        elif spec.kind is tuple:
            add_flag(
                parser,
                *spec.flags,
                action="append",
                metavar="PKG.MOD:CLASS",
                help=help_of(spec, None),
                **common,
            )
        else:
            metavar = spec.unit or spec.kind.__name__
            help_text = help_of(spec, option.default)
            add_flag(
                parser,
                *spec.flags,
                type=spec.kind,
                metavar=metavar.upper(),
                help=help_text.replace("%", "%%"),
                **common,
            )
    add_flag(
        parser,
        *PARALLEL_FLAGS,
        dest="parallel",
        type=int,
        default=argparse.SUPPRESS,
        help=PARALLEL_HELP,
    )


class StoreOnce(argparse.Action):
    """Stores a value, or with nargs=0 its constant; a second one of the same name is an error."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        seen = vars(namespace).setdefault("_seen", set())
        if self.dest in seen:
            parser.error(f"{option_string} may be given once; keep one")
        seen.add(self.dest)
        setattr(namespace, self.dest, self.const if self.nargs == 0 else values)


def add_flag(parser: argparse.ArgumentParser, *flags: str, **settings: Any) -> None:
    """A flag in both spellings: an underscore equals a dash.  It is given once, unless its action
    collects.
    """
    settings.setdefault("action", StoreOnce)
    spelled = [
        f"--{flag.removeprefix('--').replace('-', '_')}" for flag in flags if flag.startswith("--")
    ]
    parser.add_argument(*dict.fromkeys([*flags, *spelled]), **settings)


def asked_arguments(values: Mapping[str, Any]) -> dict[str, object]:
    """The engine options that were typed, by field name.  Raises ConfigError."""
    if "parallel" in values:
        Parallel(rank=0, size=values["parallel"])
    asked = {o.name: values[o.name] for o in fields(EngineOptions) if o.name in values}
    return asked | asked_model(values["model_argument"], asked.get("model"))


def asked_model(positional: object, flag: object) -> dict[str, object]:
    """The model, given by position or by flag.  Raises ConfigError when given twice."""
    if positional is not None and flag is not None:
        raise ConfigError(
            message(
                "model",
                expected="given once",
                got=f"{positional!r} by position and {flag!r} by --model",
                remedy="keep one of the two",
            )
        )
    model = positional if flag is None else flag
    return {} if model is None else {"model": model}


def help_of(spec: OptionSpec, default: object) -> str:
    """Help text with choices, unit and default."""
    shown = spec.left_out if default is None else default
    choices = f" One of {', '.join(choices_of(spec, default))}." if spec.choices else ""
    unit = f" [{spec.unit}]" if spec.unit else ""
    return f"{spec.help}{choices}{unit}  [default: {shown}]"


def choices_of(spec: OptionSpec, default: object) -> tuple[str, ...]:
    """The words an option takes; 'auto' leaves an undecided one to the engine."""
    assert spec.choices is not None
    open_word = ("auto",) if default is None and "auto" not in spec.choices else ()
    return (*open_word, *spec.choices, *(word for word, _ in spec.aliases))
