"""Calls as Llama 3 writes them: an answer that is {"name": ..., "parameters": {...}}, or several
with semicolons between, behind <|python_tag|> or not."""

from paceline.server.tools.calls import JSON_HEAD, S, Shape, call
from paceline.server.tools.feed import Feed, Kind, Reads, Types
from paceline.server.tools.forms import ToolFormat

_TAG = "<|python_tag|>"
_SHAPE = Shape(JSON_HEAD, shut=rf"{S}\}}", is_object=True)


def _read(feed: Feed, types: Types) -> Reads:
    opened = yield from feed.skip_blanks()
    if (yield from feed.begins_with("{")):
        yield from _calls(feed, opened)
    else:
        feed.text = opened + feed.text
    while opened := (yield from feed.until(Kind.CONTENT, _TAG)):
        yield from _calls(feed, opened)


def _calls(feed: Feed, opened: str) -> Reads:
    while (yield from call(feed, _SHAPE, opened)):
        opened = yield from feed.skip_blanks()
        if (yield from feed.begins_with(";")):
            opened += feed.take(1)
            opened += yield from feed.skip_blanks()
        if not (yield from feed.begins_with("{")):
            feed.text = opened.lstrip() + feed.text
            return


def _is_of(template: str) -> bool:
    return _TAG in template or '"parameters": dictionary of argument name' in template


LLAMA = ToolFormat(
    name="llama3_json",
    read=_read,
    is_of=_is_of,
    before='{"name": "%s", "parameters": ',
    after="}",
    between="; ",
    shows_special_tokens=True,
)
