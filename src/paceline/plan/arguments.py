"""Engine options for argparse, for programs that run where click is not installed.

Everything else that is typed before an engine is built is here too, so that the command line and
these programs agree: the positional model, and the parallel size of which only 1 is served.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from paceline.core.asked import SIZES
from paceline.core.errors import ConfigError, PacelineError, message
from paceline.core.option_spec import OptionSpec, spec_of
from paceline.core.options import EngineOptions, engine_options, named
from paceline.core.parallel import PARALLEL_FLAGS, Parallel
from paceline.core.progress import INTERRUPTED

PARALLEL_HELP = "GPUs that share one model; only 1 is served."


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A flag of a bench, for both command lines, named after the field or argument it sets."""

    name: str
    kind: type
    default: object
    help: str
    choices: tuple[str, ...] | None = None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` every engine option; one that is not typed leaves no attribute."""
    parser.add_argument(
        "model_argument", nargs="?", metavar="MODEL", default=None, help="As --model."
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in fields(EngineOptions):
        spec = spec_of(option)
        group = groups.get(spec.group) or parser.add_argument_group(spec.group)
        groups[spec.group] = group
        common: dict[str, Any] = {"dest": option.name, "default": argparse.SUPPRESS}
        if spec.kind is bool:
            common["nargs"] = 0
            add_flag(group, *spec.flags, const=True, help=spec.help, **common)
            if spec.off_flags:
                help_text = f"The opposite of {spec.flags[0]}."
                add_flag(group, *spec.off_flags, const=False, help=help_text, **common)
        elif spec.kind is tuple:
            add_flag(
                group,
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
                group,
                *spec.flags,
                type=str if is_read_from_text(spec) else spec.kind,
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


def add_flag(parser: argparse._ActionsContainer, *flags: str, **settings: Any) -> None:
    """A flag in both spellings: an underscore equals a dash.  It is given once, unless its action
    collects.
    """
    settings.setdefault("action", StoreOnce)
    spelled = [
        f"--{flag.removeprefix('--').replace('-', '_')}" for flag in flags if flag.startswith("--")
    ]
    parser.add_argument(*dict.fromkeys([*flags, *spelled]), **settings)


def add_flags(parser: argparse._ActionsContainer, flags: Sequence[Flag]) -> None:
    """Give `parser` a bench's flags."""
    for flag in flags:
        add_flag(
            parser,
            flag.flag,
            type=flag.kind,
            default=flag.default,
            choices=flag.choices,
            help=flag.help,
        )


def bench_main(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    run: Callable[[dict[str, Any]], Mapping[str, Any]],
    table: Callable[[Mapping[str, Any]], str],
    *,
    engine: bool = True,
) -> int:
    """A bench's command line without click; its exit status.

    Prints a table and then the JSON document as last line.  run: of what was parsed; engine: the
    bench takes the engine's options.
    """
    parser.add_argument("--json", action="store_true", help="Print the JSON line only.")
    if engine:
        add_engine_arguments(parser)
    values = vars(parser.parse_args(argv))
    try:
        document = run(values)
    except PacelineError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    if not values["json"]:
        print(table(document))
    print(json.dumps(document))
    return INTERRUPTED if "interrupted" in document else 0


def bench_parser(name: str, summary: str) -> argparse.ArgumentParser:
    """Of `python -m paceline.bench.<name>`, without a flag yet."""
    return argparse.ArgumentParser(
        prog=f"python -m paceline.bench.{name}",
        description=summary,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )


def asked_arguments(values: Mapping[str, Any]) -> dict[str, object]:
    """The engine options that were typed, by field name and in the engine's words.

    values: what was parsed, by argparse or click.  Raises ConfigError, before an engine is built.
    """
    if "parallel" in values:
        Parallel(rank=0, size=values["parallel"])
    names = (option.name for option in fields(EngineOptions))
    typed = {name: values[name] for name in names if values.get(name) not in (None, ())}
    asked = named(typed | asked_model(values["model_argument"], typed.get("model")))
    engine_options(asked)
    return asked


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
    choices = f" One of {_words(spec, default)}." if spec.choices else ""
    unit = f" [{spec.unit}]" if spec.unit else ""
    return f"{spec.help}{choices}{unit}  [default: {shown}]"


def is_read_from_text(spec: OptionSpec) -> bool:
    """Whether `core.asked` makes the value from the word that was typed."""
    return spec.choices is not None or (spec.kind is int and spec.unit in SIZES)


def _words(spec: OptionSpec, default: object) -> str:
    """The words an option takes; 'auto' leaves an undecided one to the engine."""
    assert spec.choices is not None
    open_word = ("auto",) if default is None and "auto" not in spec.choices else ()
    also = ", ".join(word for word, _ in spec.aliases)
    return ", ".join((*open_word, *spec.choices)) + (f"; also {also}" if also else "")
