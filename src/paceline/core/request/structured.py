"""StructuredOutputs: the form that an answer must have, as plain text.

    structured_outputs({"json": {"type": "object"}})      a schema, as an object or as its text
    structured_outputs({"choice": ["yes", "no"]})

Here only its form is looked at; text/structured.py makes a grammar of what it says.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from paceline.core.errors import RequestError
from paceline.core.near import did_you_mean

MAX_STRUCTURE_CHARS = 1 << 17  # of one text
MAX_CHOICES = 4096
_NAME = "structured_outputs"


class StructureKind(StrEnum):
    """What the text of a StructuredOutputs says; the value is its key in a mapping."""

    JSON = "json"  # a JSON schema
    JSON_OBJECT = "json_object"  # any JSON object: no text
    REGEX = "regex"  # a regular expression, of the whole answer
    CHOICE = "choice"  # a JSON list of texts, of which it is one
    GRAMMAR = "grammar"  # a grammar of Lark, or of GBNF


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """What an answer must be.  Immutable and hashable; two strings.  Raises RequestError for a text
    that is empty or too long."""

    kind: StructureKind
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind is not StructureKind.JSON_OBJECT and not self.text:
            raise _error(self.kind, "not empty", "an empty text", "leave it out for free text")
        if len(self.text) > MAX_STRUCTURE_CHARS:
            expected = f"at most {MAX_STRUCTURE_CHARS} characters"
            raise _error(self.kind, expected, len(self.text), "ask for a simpler form")


def structured_outputs(value: object) -> StructuredOutputs | None:
    """What {kind: value} means; None, or an object, is taken as it is.  Raises RequestError."""
    if value is None or isinstance(value, StructuredOutputs):
        return value
    kinds = [each.value for each in StructureKind]
    if not isinstance(value, Mapping):
        expected = f"a mapping with one of {', '.join(kinds)}"
        raise RequestError.about(
            _NAME, expected=expected, got=f"{value!r:.80}", remedy='pass {"json": schema}'
        )
    given = {name: said for name, said in value.items() if said is not None}
    if given.get(StructureKind.JSON_OBJECT) is False:
        del given[StructureKind.JSON_OBJECT]
    for name in given:
        if name not in kinds:
            remedy = did_you_mean(str(name), kinds, otherwise="remove it")
            raise RequestError.about(
                f"a key of {_NAME}", expected=f"one of {', '.join(kinds)}", got=name, remedy=remedy
            )
    if len(given) != 1:
        expected, got = f"one of {', '.join(kinds)}", ", ".join(sorted(given)) or "none"
        raise RequestError.about(_NAME, expected=expected, got=got, remedy="ask for one form")
    [(name, said)] = given.items()
    kind = StructureKind(name)
    return StructuredOutputs(kind=kind, text=_text_of(kind, said))


def _text_of(kind: StructureKind, said: Any) -> str:
    if kind is StructureKind.JSON_OBJECT:
        if said is not True:
            raise _error(kind, "True", f"{said!r:.80}", 'pass a schema as "json"')
        return ""
    if kind is StructureKind.CHOICE:
        return _choices(said)
    if isinstance(said, str):
        return said
    if kind is not StructureKind.JSON or not isinstance(said, Mapping | bool):
        expected = "a schema or its text" if kind is StructureKind.JSON else "a text"
        raise _error(kind, expected, f"{said!r:.80}", "pass str")
    try:
        return json.dumps(said)
    except (TypeError, ValueError, RecursionError) as error:
        raise _error(kind, "a schema that JSON can hold", str(error), "correct it") from error


def _choices(said: Any) -> str:
    """A text is taken as the JSON list it must be."""
    expected, remedy = f"a list of 1 to {MAX_CHOICES} texts", 'pass ["yes", "no"]'
    if isinstance(said, str):
        try:
            said = json.loads(said)
        except (ValueError, RecursionError) as error:
            raise _error(StructureKind.CHOICE, expected, str(error), remedy) from error
    is_list = isinstance(said, Sequence) and not isinstance(said, str | bytes)
    if not is_list or not 0 < len(said) <= MAX_CHOICES:
        got = len(said) if is_list else f"{said!r:.80}"
        raise _error(StructureKind.CHOICE, expected, got, remedy)
    for each in said:
        if not isinstance(each, str) or not each:
            raise _error(StructureKind.CHOICE, "of texts that are not empty", f"{each!r}", remedy)
    return json.dumps(list(said))


def _error(kind: StructureKind, expected: str, got: object, remedy: str) -> RequestError:
    return RequestError.about(f"{_NAME}.{kind}", expected=expected, got=got, remedy=remedy)
