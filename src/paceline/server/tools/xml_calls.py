"""Calls whose arguments are elements: a name and a text each, which the function's schema makes a
value.  They are told as JSON, a text as it comes.
"""

import ast
import json
import re
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.server.tools.calls import MOST_HEAD, CallReads, end_of_call
from paceline.server.tools.feed import Feed, Kind, Piece, Types
from paceline.text.detokenize import begun_length

STRING, JSON = "string", "json"  # kinds of values, beside the other types of JSON schemas
KEY = r"(?P<key>[^<>\n]{1,128})"  # of an argument


@dataclass(frozen=True, slots=True, kw_only=True)
class Elements:
    """How a format writes arguments."""

    head: re.Pattern[str]  # of a call, up to the first of them
    key: re.Pattern[str]  # up to the value
    opens: str  # what every one begins with
    shuts: str  # what ends a value
    on_lines: bool = False  # a line end on both sides of it belongs to the format
    end: str  # pattern of a call's end
    close: str = ""  # behind that; it may be missing where the text ends
    before_value: str  # as models are taught it, with the argument's name
    after_value: str
    value_of: Callable[[str, str], Any]  # (its text, its kind), as their makers' parser has it
    reads_null: bool = False  # a string "null" is none


def kind_of(schema: object) -> str:
    """Of a value, by its JSON schema; null beside one other type is no kind of its own."""
    if not isinstance(schema, dict) or not schema:
        return STRING
    options = schema.get("anyOf", schema.get("oneOf"))
    found: set[str]
    if isinstance(options, list) and "type" not in schema:
        found = {kind_of(option) for option in options}
    elif "type" in schema:
        said = schema["type"]
        found = {str(each) for each in (said if isinstance(said, list) else [said])}
    else:
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        texts = isinstance(values, list) and all(isinstance(each, str) for each in values)
        return STRING if texts or not {"enum", "const", "$ref", "allOf"} & schema.keys() else JSON
    others = found - {"null"} or found
    return others.pop() if len(others) == 1 else JSON


def kinds_of(parameters: Mapping[str, Any] | None) -> dict[str, str]:
    """Of a function's arguments."""
    return {name: kind_of(each) for name, each in (parameters or {}).get("properties", {}).items()}


def read_literal(text: str) -> Any:
    """JSON, else what Python writes; else the text itself."""
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return text


def xml_call(feed: Feed, about: Elements, types: Types, opened: str) -> CallReads:
    """As `calls.call`."""
    while (found := about.head.match(feed.text)) is None:
        if len(feed.text) > MOST_HEAD or not (yield from feed.more()):
            yield Piece(Kind.CONTENT, opened)
            return False
    yield Piece(Kind.NAME, found["name"])
    yield Piece(Kind.ARGUMENTS, "{")
    kinds, written, separator = types.get(found["name"], {}), [opened, feed.take(found.end())], ""
    while True:
        written.append((yield from feed.skip_blanks()))
        if not (yield from feed.begins_with(about.opens)):
            break
        is_whole = yield from _argument(feed, about, kinds, separator, written)
        if not is_whole:
            yield Piece(Kind.BROKEN, "".join(written))
            return False
        separator = ", "
    end = yield from end_of_call(feed, about.end, about.close)
    written.append(feed.take(end or 0))
    if end is None:
        yield Piece(Kind.BROKEN, "".join(written))
        return False
    yield Piece(Kind.ARGUMENTS, "}")
    yield Piece(Kind.CALLED)
    return True


def _argument(
    feed: Feed, about: Elements, kinds: Mapping[str, str], separator: str, written: list[str]
) -> CallReads:
    """Tell one.  written: gets what was cut."""
    while (found := about.key.match(feed.text)) is None:
        if len(feed.text) > MOST_HEAD or not (yield from feed.more()):
            return False
    written.append(feed.take(found.end()))
    yield Piece(Kind.ARGUMENTS, f"{separator}{json.dumps(found['key'], ensure_ascii=False)}: ")
    if about.on_lines and (yield from feed.begins_with("\n")):
        written.append(feed.take(1))
    kind = kinds.get(found["key"], STRING)
    if kind == STRING:
        return (yield from _text(feed, about, written))
    parts = list[str]()
    while (part := (yield from _part(feed, about))) is not None:
        parts.append(part)
        if feed.text.startswith(_ends(about)):
            written += [*parts, _cut_end(feed, about)]
            yield Piece(Kind.ARGUMENTS, _as_json(about, "".join(parts), kind))
            return True
    written += parts
    return False


def _text(feed: Feed, about: Elements, written: list[str]) -> CallReads:
    """Tell a string as it comes."""
    told, held = False, ""
    while (part := (yield from _part(feed, about))) is not None:
        written.append(part)
        held += part
        is_end = feed.text.startswith(_ends(about))
        if about.reads_null and not told:
            if is_end and held.lower() == "null":
                yield Piece(Kind.ARGUMENTS, "null")
                written.append(_cut_end(feed, about))
                return True
            if not is_end and "null".startswith(held.lower()):
                continue
        quoted = json.dumps(held, ensure_ascii=False)[1:-1]
        text = ("" if told else '"') + quoted + ('"' if is_end else "")
        told, held = True, ""
        if text:
            yield Piece(Kind.ARGUMENTS, text)
        if is_end:
            written.append(_cut_end(feed, about))
            return True
    return False


def _ends(about: Elements) -> tuple[str, ...]:
    return (about.shuts, f"\n{about.shuts}") if about.on_lines else (about.shuts,)


def _cut_end(feed: Feed, about: Elements) -> str:
    return feed.take(feed.text.index(about.shuts) + len(about.shuts))


def _part(feed: Feed, about: Elements) -> Generator[None, None, str | None]:
    """Cut what has come of a value; its end, if that has come, is next.  None: the text has ended
    within it."""
    ends = _ends(about)
    while True:
        found = [at for end in ends if (at := feed.text.find(end)) >= 0]
        if found:
            return feed.take(min(found))
        length = len(feed.text) - begun_length(feed.text, ends)
        if length:
            return feed.take(length)
        if not (yield from feed.more()):
            return None


def _as_json(about: Elements, text: str, kind: str) -> str:
    """Of a value; the text itself where it is none that an answer can hold."""
    try:
        found = json.dumps(about.value_of(text, kind), ensure_ascii=False, allow_nan=False)
        found.encode()
    except (TypeError, ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return found
