"""Engine options for argparse, for programs that run where click is not installed."""

import argparse
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from paceline.core.options import EngineOptions, spec_of


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` every engine option; one that is not typed leaves no attribute."""
    for option in fields(EngineOptions):
        spec = spec_of(option)
        common: dict[str, Any] = {"dest": option.name, "default": argparse.SUPPRESS}
        on = _with_underscores(spec.flags)
        if spec.kind is bool:
            parser.add_argument(*on, action="store_true", help=spec.help, **common)
            if spec.off_flags:
                off = _with_underscores(spec.off_flags)
                parser.add_argument(*off, action="store_false", help="Turn it off.", **common)
        else:
            parser.add_argument(*on, type=spec.kind, help=spec.help, **common)


def asked_arguments(values: Mapping[str, object]) -> dict[str, object]:
    """The engine options that were typed, by field name."""
    return {o.name: values[o.name] for o in fields(EngineOptions) if o.name in values}


def _with_underscores(flags: tuple[str, ...]) -> list[str]:
    spelled = [f"--{flag.removeprefix('--').replace('-', '_')}" for flag in flags]
    return list(dict.fromkeys([*flags, *spelled]))
