"""Places in a request body: how they are written, and what a client put there.

Only the beginning of a body is searched, so that telling a fault costs the same for every body.
"""

import json
import re
from collections.abc import Callable
from typing import NamedTuple

ANY_KEY = "..."  # of a mapping: which one is not known
Place = tuple[str | int, ...]  # names of fields and indices of items, outermost first

_MAX_SHOWN = 80  # characters of a value in a message
_WINDOW = 1 << 16  # bytes of a body that are searched
_BLANKS = re.compile(r"[ \t\n\r]*")
_SCAN = json.JSONDecoder().raw_decode


class Found(NamedTuple):
    """A value in a body."""

    place: Place  # with the key where ANY_KEY was asked for
    text: str  # as the client wrote it, shortened


def written(place: Place) -> str:
    """messages[0].content"""
    words = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in place]
    return "".join(words).removeprefix(".")


def shortened(text: str) -> str:
    """Short enough for a message."""
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


def find(body: bytes, place: Place, is_meant: Callable[[object], bool]) -> Found | None:
    """The value at `place` of JSON that is right up to there; None where it lies too far from the
    beginning.  ANY_KEY stands for the first key whose value `is_meant`.
    """
    text = body[:_WINDOW].decode(errors="replace")
    found: list[str | int] = []
    try:
        at = _behind_blanks(text, 0)
        for part in place:
            key, at = _item(text, at, part, is_meant)
            found.append(key)
        return Found(tuple(found), shortened(_value(text, at, is_whole=len(body) <= _WINDOW)))
    except (ValueError, IndexError, RecursionError):
        return None


def _item(
    text: str, at: int, wanted: str | int, is_meant: Callable[[object], bool]
) -> tuple[str | int, int]:
    """(key or index, where its value begins) in the list or object that begins at `at`."""
    is_object, index = text[at] == "{", 0
    while True:
        at = _behind_blanks(text, at + 1)
        key: str | int = index
        if is_object:
            key, at = _SCAN(text, at)
            at = _behind_blanks(text, _behind_blanks(text, at) + 1)
        if key == wanted:
            return key, at
        value, end = _SCAN(text, at)
        if wanted == ANY_KEY and is_meant(value):
            return key, at
        at, index = _behind_blanks(text, end), index + 1


def _value(text: str, at: int, *, is_whole: bool) -> str:
    """As it is written.  Raises IndexError where the window ends before it begins."""
    try:
        end = _SCAN(text, at)[1]
    except (ValueError, RecursionError):
        end = len(text)
    if end == len(text) and not is_whole and end - at <= _MAX_SHOWN:
        raise IndexError("cut by the window")
    return text[at:end]


def _behind_blanks(text: str, at: int) -> int:
    blanks = _BLANKS.match(text, at)
    assert blanks is not None, "no blank is a match, too"
    return blanks.end()
