"""Calls as DeepSeek writes them, between marks of its own: V3 and R1 with the arguments in a block
of code, V3.1 as they are."""

import re
from collections.abc import Generator

from paceline.server.tools.calls import NAME, S, Shape, call
from paceline.server.tools.feed import Feed, Kind, Piece, Reads, Types
from paceline.server.tools.forms import ToolFormat

_OPEN, _CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_BEGIN, _SEP, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCE = "```"
_FENCED = Shape(
    re.compile(rf"{S}function{_SEP}{NAME}{S}{_FENCE}json{S}(?=\{{)"), rf"{S}{_FENCE}", _END
)
_BARE = Shape(re.compile(rf"{S}{NAME}{_SEP}{S}(?=\{{)"), "", _END)


def _read(feed: Feed, types: Types) -> Reads:
    while opened := (yield from feed.until(Kind.CONTENT, _OPEN)):
        yield from _calls(feed, opened)


def _calls(feed: Feed, opened: str) -> Generator[Piece | None, None, None]:
    while True:
        opened += yield from feed.skip_blanks()
        mark = yield from feed.begins_with(_BEGIN, _CLOSE)
        opened += feed.take(len(mark))
        if mark != _BEGIN:
            break
        is_fenced = yield from _is_fenced(feed)
        if not (yield from call(feed, _FENCED if is_fenced else _BARE, opened)):
            return
        opened = ""
    if opened.strip() == _CLOSE:
        yield from feed.skip_blanks()
    elif opened.strip():
        yield Piece(Kind.CONTENT, opened)


def _is_fenced(feed: Feed) -> Generator[None, None, bool]:
    """Whether a name follows the first mark: a tool may be called "function"."""
    lead = f"function{_SEP}"
    if not (yield from feed.begins_with(lead)):
        return False
    while not feed.text[len(lead) :].strip() and (yield from feed.more()):
        pass
    return not feed.text[len(lead) :].lstrip().startswith("{")


DEEPSEEK = ToolFormat(
    name="deepseek",
    read=_read,
    is_of=lambda template: _OPEN in template,
    before=f"{_BEGIN}function{_SEP}%s\n```json\n",
    after=f"\n```{_END}",
    between="\n",
    opening=_OPEN,
    closing=_CLOSE,
    shows_special_tokens=True,
    arguments_as_text=True,
)
