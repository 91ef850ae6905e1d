"""Calls: the part that all formats share.

A call has a head with its name, arguments that are a JSON object and are told as they come, and an
end.  Where the whole is an object, too, the name may also stand behind the arguments.
"""

import json
import re
from collections.abc import Generator
from typing import Any, NamedTuple

from paceline.server.tools.feed import Feed, Kind, Piece

NAME = r"(?P<name>[\w.:/-]{1,128})"  # of a function; no marker of a format fits
S = r"\s{0,64}"  # white space: with more of it no call is one
JSON_HEAD = re.compile(
    rf'{S}\{{{S}"name"{S}:{S}"{NAME}"{S},{S}"(?:arguments|parameters)"{S}:{S}(?=\{{)'
)

MOST_HEAD = 2048  # characters; no head and no end is longer
_MOST_OBJECT = 1 << 16  # characters of a call whose name is not its first member
_STRUCTURE = re.compile(r'["\\{}\[\]]')
_OBJECT = re.compile(r"\s*\{")

CallReads = Generator[Piece | None, None, bool]  # returns whether it was a call


class Shape(NamedTuple):
    """How a format writes a call."""

    head: re.Pattern[str]  # up to the arguments
    shut: str  # pattern of what stands directly behind them
    close: str = ""  # what ends the call behind that; it may be missing where the text ends
    is_object: bool = False  # head, arguments and `shut` are a JSON object


class Nesting:
    """Finds the end of a JSON object that comes in parts."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_text = False
        self._escaped = -1  # the place of a character behind a backslash
        self._num_seen = 0

    def end_in(self, part: str) -> int | None:
        """The index behind the object's end in its next part; None while it goes on."""
        for found in _STRUCTURE.finditer(part):
            sign, at = found[0], self._num_seen + found.start()
            if at == self._escaped:
                continue
            if sign == '"':
                self._is_text = not self._is_text
            elif sign == "\\":
                self._escaped = at + 1
            elif not self._is_text:
                self._depth += 1 if sign in "{[" else -1
                if self._depth <= 0:
                    return found.end()
        self._num_seen += len(part)
        return None


def call(feed: Feed, shape: Shape, opened: str) -> CallReads:
    """Tell the call that the text goes on with.

    opened: what was cut before it, which is content when no call follows.  Returns whether one did.
    """
    nesting, num_seen = Nesting(), 0
    while (found := shape.head.match(feed.text)) is None:
        most = MOST_HEAD
        if shape.is_object and feed.text.strip():
            most = _MOST_OBJECT if _OBJECT.match(feed.text) else 0
            end = nesting.end_in(feed.text[num_seen:]) if most else None
            if end is not None and num_seen + end <= most:
                return (yield from _whole_call(feed, num_seen + end, shape, opened))
            num_seen = len(feed.text)
        if len(feed.text) > most or not (yield from feed.more()):
            yield Piece(Kind.CONTENT, opened)
            return False
    yield Piece(Kind.NAME, found["name"])
    head = feed.take(found.end())
    arguments = yield from _arguments(feed)
    end = yield from end_of_call(feed, shape.shut, shape.close)
    behind = feed.take(end or 0)
    if end is None or _as_object(arguments) is None:
        yield Piece(Kind.BROKEN, opened + head + arguments + behind)
        return False
    yield Piece(Kind.CALLED)
    return True


def _arguments(feed: Feed) -> Generator[Piece | None, None, str]:
    """Tell an object as it comes.  Returns what was told."""
    nesting, told = Nesting(), []
    while True:
        end = nesting.end_in(feed.text)
        part = feed.take(len(feed.text) if end is None else end)
        if part:
            told.append(part)
            yield Piece(Kind.ARGUMENTS, part)
        if end is not None or not (yield from feed.more()):
            return "".join(told)


def end_of_call(feed: Feed, shut: str, close: str) -> Generator[None, None, int | None]:
    """The length of a call's end; None where something else follows."""
    whole = re.compile(rf"{shut}{S}{re.escape(close)}" if close else shut)
    while (found := whole.match(feed.text)) is None:
        if len(feed.text) > MOST_HEAD or not (yield from feed.more()):
            is_cut = feed.is_whole and re.fullmatch(shut + S, feed.text)
            return len(feed.text) if is_cut else None
    return found.end()


def _whole_call(feed: Feed, length: int, shape: Shape, opened: str) -> CallReads:
    """Tell a call that came as one object, of so many characters."""
    said = _as_object(feed.text[:length]) or {}
    name, arguments = said.get("name"), said.get("arguments", said.get("parameters", {}))
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    is_name = isinstance(name, str) and re.fullmatch(NAME, name)
    if not is_name or _as_object(text) is None:
        yield Piece(Kind.CONTENT, opened)
        return False
    written = opened + feed.take(length)
    end = yield from end_of_call(feed, "", shape.close)
    yield Piece(Kind.NAME, str(name))
    yield Piece(Kind.ARGUMENTS, text)
    if end is None:
        yield Piece(Kind.BROKEN, written)
        return False
    feed.take(end)
    yield Piece(Kind.CALLED)
    return True


def _as_object(text: str) -> dict[str, Any] | None:
    """None, too, for what no answer can hold: NaN, a number without end, half a surrogate pair."""
    try:
        found = json.loads(text)
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
