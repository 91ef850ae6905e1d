"""gpt-oss's harmony: messages on channels.  `analysis` is reasoning, `final` and what `commentary`
says to nobody are content, and what is said to functions.NAME is a call.

    <|channel|>analysis<|message|>Paris, then.<|end|><|start|>assistant<|channel|>commentary
    to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>
"""

import re
from collections.abc import Generator

from paceline.server.tools.calls import NAME, Shape, call
from paceline.server.tools.feed import Feed, Kind, Piece, Reads, Types
from paceline.server.tools.forms import ToolFormat

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_MOST_HEADER = 512  # characters
_RECIPIENT = re.compile(rf"to=functions\.{NAME}")
_ARGUMENTS = re.compile(
    rf"(?s:.{{0,{_MOST_HEADER}}}?)to=functions\.{NAME}(?s:.{{0,256}}?)"
    r"<\|message\|>\s{0,64}(?=\{)"
)
_SHAPE = Shape(_ARGUMENTS, shut="", close="<|call|>")


def read_harmony(feed: Feed, *, has_tools: bool) -> Reads:
    """has_tools: what is said to a function is a call; else it is content."""
    while True:
        blanks = yield from feed.skip_blanks()
        begin = yield from feed.begins_with(_START, _CHANNEL)
        if not begin:  # as other models write, up to where a message begins
            feed.text = blanks + feed.text
            begin = yield from feed.until(Kind.CONTENT, _START, _CHANNEL)
            if not begin:
                return
            feed.text = begin.lstrip() + feed.text
            continue
        header = yield from _header(feed)
        if header is None:
            yield Piece(Kind.CONTENT, feed.take(len(begin)))
        elif has_tools and _RECIPIENT.search(header):
            yield from call(feed, _SHAPE, feed.take(len(begin)))
        else:
            feed.take(len(header) + len(_MESSAGE))
            is_thought = f"{_CHANNEL}analysis" in header
            kind = Kind.REASONING if is_thought else Kind.CONTENT
            end = (yield from feed.until(kind, *_ENDS, _START, _CHANNEL)).lstrip()
            feed.text = (end if end in (_START, _CHANNEL) else "") + feed.text


def _header(feed: Feed) -> Generator[None, None, str | None]:
    """What stands before <|message|>, which is not cut; None where that does not come."""
    while (at := feed.text.find(_MESSAGE)) < 0 or at > _MOST_HEADER:
        if len(feed.text) > _MOST_HEADER + len(_MESSAGE) or not (yield from feed.more()):
            return None
    return feed.text[:at]


def _read(feed: Feed, types: Types) -> Reads:
    yield from read_harmony(feed, has_tools=True)


HARMONY = ToolFormat(
    name="harmony",
    read=_read,
    is_of=lambda template: _CHANNEL in template,
    before="<|channel|>commentary to=functions.%s <|constrain|>json<|message|>",
    after="<|call|>",
    shows_special_tokens=True,
)
