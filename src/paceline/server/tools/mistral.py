"""Calls as Mistral writes them: [TOOL_CALLS] before a list of {"name": ..., "arguments": {...}},
or before each name[ARGS]{...}."""

import re
import secrets
import string
from collections.abc import Generator

from paceline.server.tools.calls import JSON_HEAD, NAME, S, Shape, call
from paceline.server.tools.feed import Feed, Kind, Piece, Reads, Types
from paceline.server.tools.forms import ToolFormat

_OPEN = "[TOOL_CALLS]"
_ID = rf'(?:{S},{S}"id"{S}:{S}"[^"]{{0,64}}")?'
_LISTED = Shape(JSON_HEAD, shut=rf"{_ID}{S}\}}", is_object=True)
_HEAD = re.compile(rf"{S}{NAME}(?:\[CALL_ID\]\w{{1,64}})?(?:\[ARGS\])?{S}(?=\{{)")
_NAMED = Shape(_HEAD, shut="")


def _read(feed: Feed, types: Types) -> Reads:
    while opened := (yield from feed.until(Kind.CONTENT, _OPEN)):
        opened += yield from feed.skip_blanks()
        if not (yield from feed.begins_with("[")):
            if (yield from call(feed, _NAMED, opened)):
                yield from feed.skip_blanks()
            continue
        yield from _list(feed, opened + feed.take(1))


def _list(feed: Feed, opened: str) -> Generator[Piece | None, None, None]:
    while (yield from call(feed, _LISTED, opened)):
        opened = yield from feed.skip_blanks()
        mark = yield from feed.begins_with(",", "]")
        opened += feed.take(len(mark))
        if mark != ",":
            feed.text = ("" if mark else opened.lstrip()) + feed.text
            yield from feed.skip_blanks()
            return


def _new_id() -> str:
    """The templates take no other."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


MISTRAL = ToolFormat(
    name="mistral",
    read=_read,
    is_of=lambda template: _OPEN in template,
    before='{"name": "%s", "arguments": ',
    after="}",
    between=", ",
    opening="[TOOL_CALLS][",
    closing="]",
    shows_special_tokens=True,
    new_id=_new_id,
)
