"""A grammar of answers that are calls: what `tool_choice` asks for when it names a function, or
wants one called."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.server.errors import ApiError
from paceline.server.tools.formats import TOOL_FORMATS
from paceline.server.tools.forms import Form
from paceline.server.tools.think import CLOSE
from paceline.server.tools.wire import Function, Tool
from paceline.server.tools.xml_calls import KEY, STRING, Elements, kind_of

# Blanks between the parts of arguments would have no end.
_SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_GUIDANCE = {"x-guidance": _SEPARATORS}
_OBJECT = {"type": "object", **_GUIDANCE}
# What is followed of schemas whose values are written as texts.
_OF_ALL = {"type", "title", "description", "default", "examples", "deprecated", "$schema", "$id"}
_SHARED = {"$defs", "definitions"}
_OF_ARGUMENTS = _OF_ALL | _SHARED | {"properties", "required", "additionalProperties"}
_OF_STRINGS = _OF_ALL | {"enum", "const", "anyOf", "oneOf"}


def calls_grammar(tools: Sequence[Tool], form: Form) -> str:
    """A grammar in Lark of one call or, unless the form allows only one, of several.

    Reasoning that the prompt has begun may go on first.  Raises ApiError, 400, for what is not
    followed of a schema where arguments are written as texts.
    """
    assert form.tools is not None, "a format with calls"
    about = TOOL_FORMATS[form.tools]
    more = "" if form.is_one_call else f" ({_text(about.between)} call)*"
    thought = "thought " if form.has_begun else ""
    lines = [
        f"start: {thought}{_text(about.opening)} call{more} {_text(about.closing)}",
        f"call: {' | '.join(f'call_{index}' for index in range(len(tools)))}",
    ]
    if thought:
        lines.append(_up_to("thought", CLOSE))
    if about.elements is not None:
        lines.append(_up_to("text", about.elements.shuts))
    for index, tool in enumerate(tools):
        before = about.before % tool.function.name
        lines.append(f"call_{index}: {_text(before)} arguments_{index} {_text(about.after)}")
        if about.elements is None:
            schema = json.dumps((tool.function.parameters or {}) | _OBJECT)
            lines.append(f"arguments_{index}: %json {schema}")
        else:
            lines += _arguments(f"arguments_{index}", tool.function, about.elements)
    return "\n".join(lines)


def _up_to(rule: str, end: str) -> str:
    return f"{rule}[suffix={_text(end)}]: /(?s:.*)/"


def _arguments(rule: str, function: Function, about: Elements) -> Iterator[str]:
    """Rules of elements, in the order of the schema's properties."""
    schema = function.parameters or {}
    properties, required = schema.get("properties", {}), schema.get("required", ())
    _require(function, schema, _OF_ARGUMENTS | (set() if properties else {"maxProperties"}))
    properties = {**{name: {} for name in required}, **properties}
    shared = {name: schema[name] for name in _SHARED & schema.keys()}
    names = [f"{rule}_{index}" for index in range(len(properties))]
    pairs = zip(names, properties, strict=True)
    parts = [name if key in required else f"{name}?" for name, key in pairs]
    yield f"{rule}: " + (" ".join(parts) or '""')
    for name, (key, value) in zip(names, properties.items(), strict=True):
        if re.fullmatch(KEY, key) is None:
            _refuse(function, "names of arguments without <, > and line ends", key)
        yield f"{name}: {_text(about.before_value % key)} {_value(function, value, shared, about)}"


def _value(function: Function, schema: Any, shared: Mapping[str, Any], about: Elements) -> str:
    line_end, end, behind = about.after_value.partition(about.shuts)
    end, behind = line_end + end, f"{_text(behind)}?"  # the reader needs nothing behind its end
    if kind_of(schema) != STRING:
        return f"%json {json.dumps({**shared, **schema, **_GUIDANCE})} {_text(end)} {behind}"
    found = schema if isinstance(schema, dict) else {}
    _require(function, found, _OF_STRINGS)
    for option in _listed(function, found, "anyOf") or _listed(function, found, "oneOf") or ():
        if not isinstance(option, dict):
            _refuse(function, "objects alone in anyOf and oneOf", option)
        _require(function, option, _OF_ALL)
    values = [found["const"]] if "const" in found else None
    values = _listed(function, found, "enum") or values
    if values is None:
        return f"text {behind}"
    words = ("null" if each is None else each for each in values)
    return f"({' | '.join(_text(f'{word}{end}') for word in words)}) {behind}"


def _listed(function: Function, schema: Mapping[str, Any], name: str) -> list[Any] | None:
    said = schema.get(name)
    if name in schema and not (isinstance(said, list) and said):
        _refuse(function, f"{name} as a list of at least one", said)
    return said


def _require(function: Function, schema: Mapping[str, Any], known: set[str]) -> None:
    others = sorted(schema.keys() - known)
    if others:
        _refuse(function, f"no other parts than {', '.join(sorted(known))}", others[0])


def _refuse(function: Function, expected: str, got: object) -> None:
    raise ApiError.about(
        f"parameters of {function.name!r}, which must be called,",
        expected=f"a schema with {expected}: this model writes arguments as texts",
        got=f"{got!r:.80}",
        remedy="leave it out, or send tool_choice 'auto'",
        param="tools",
    )


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
