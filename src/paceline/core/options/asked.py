"""From what a caller typed or passed, under the names and in the words of people, to EngineOptions.
No torch."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import Field, fields
from fractions import Fraction
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.near import did_you_mean
from paceline.core.options.engine_options import EngineOptions
from paceline.core.options.spec import OptionSpec, spec_of

SIZES = ("tokens", "bytes")  # units of numbers that may be written as 32k or 4GiB
_SIZE = re.compile(r"(\d+(?:\.\d+)?) *([kmgt]?)(i?b)?")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def engine_options(asked: Mapping[str, object]) -> EngineOptions:
    """Build options from what was asked, under any name; the word 'auto' leaves an undecided field
    undecided.  Raises ConfigError.
    """
    is_open = {option.name: option.default is None for option in fields(EngineOptions)}
    values: dict[str, Any] = named(asked)
    return EngineOptions(**{n: v for n, v in values.items() if not (v == "auto" and is_open[n])})


def named(asked: Mapping[str, object]) -> dict[str, object]:
    """What was asked by field name: other names and words are read, sizes are counted.

    Every flag is a name in Python too, with underscores.  Raises ConfigError for an unknown name,
    with the nearest known one, and for an option that two names give.
    """
    options = fields(EngineOptions)
    places = _places(options)
    found: dict[str, object] = {}
    said: dict[str, str] = {}  # field -> the name that was used
    for name, value in asked.items():
        if name not in places:
            names = sorted(option.name for option in options)
            remedy = did_you_mean(name, places, otherwise="see paceline generate --help")
            raise _error("engine option", f"one of {names}", name, remedy)
        option, is_opposite = places[name]
        if option.name in found:
            other = said[option.name] if name == option.name else name
            raise _error(option.name, "given once", f"also as {other}", "keep one of the two")
        said[option.name] = name
        found[option.name] = not value if is_opposite and value in (True, False) else value
    known = {option.name: spec_of(option) for option in options}
    return {name: read_value(name, known[name], value) for name, value in found.items()}


def read_value(name: str, spec: OptionSpec, value: object) -> object:
    """A value in the engine's words: a choice for another word or case of it, a number for a size,
    text for a path, a class or a torch dtype, a tuple for a list.  What is none of these stays as
    it is.
    """
    if spec.kind is tuple and isinstance(value, list):
        return tuple(value)
    if spec.kind is str and isinstance(value, os.PathLike):
        return os.fspath(value)
    if spec.kind is str and spec.choices is None and isinstance(value, type):
        return f"{value.__module__}:{value.__qualname__}"
    if spec.choices is not None:
        word = str(value).removeprefix("torch.") if type(value).__name__ == "dtype" else value
        words = {choice.lower(): choice for choice in spec.choices} | dict(spec.aliases)
        return words.get(word.lower(), word) if isinstance(word, str) else word
    if spec.kind is int and spec.unit in SIZES and isinstance(value, str):
        return value if value == "auto" else read_size(name, spec.unit, value)
    return value


def read_size(name: str, unit: str, text: str) -> int:
    """A number of tokens or bytes: 4096, 32k, 1.5g, 4GiB.

    k, m, g and t are powers of 1024, whatever their case, and of 1000 before a lone B (4GB).
    Raises ConfigError.
    """
    match = _SIZE.fullmatch(text.strip().lower())
    number, prefix, tail = match.groups(default="") if match else ("", "", "")
    is_bytes = unit == "bytes"
    if not number or (tail and not is_bytes) or (tail == "ib" and not prefix):
        form = "500000000, 4GiB or 1.5g" if is_bytes else "4096 or 32k"
        wanted = f"a number of {unit} such as {form}"
        raise _error(name, wanted, repr(text), "write one of these forms")
    size = Fraction(number) * (1000 if tail == "b" else 1024) ** _POWERS[prefix]
    if size.denominator != 1:
        raise _error(name, f"a whole number of {unit}", repr(text), "round it")
    return int(size)


def _places(options: Sequence[Field[Any]]) -> dict[str, tuple[Field[Any], bool]]:
    """{name: (field, whether the name means its opposite)}."""
    places = {option.name: (option, False) for option in options}
    for option in options:
        spec = spec_of(option)
        for flags, is_opposite in ((spec.flags, False), (spec.off_flags, True)):
            for flag in flags:
                name = flag.lstrip("-").replace("-", "_")
                places.setdefault(name, (option, is_opposite))
    return places


def _error(name: str, expected: str, got: str, remedy: str) -> ConfigError:
    return ConfigError.about(name, expected=expected, got=got, remedy=remedy)
