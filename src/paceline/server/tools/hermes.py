"""Calls as Hermes and Qwen write them: <tool_call>{"name": ..., "arguments": {...}}</tool_call>"""

from paceline.server.tools.calls import JSON_HEAD, S, Shape, call
from paceline.server.tools.feed import Feed, Kind, Reads, Types
from paceline.server.tools.forms import ToolFormat

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_SHAPE = Shape(JSON_HEAD, shut=rf"{S}\}}", close=_CLOSE, is_object=True)


def _read(feed: Feed, types: Types) -> Reads:
    while opened := (yield from feed.until(Kind.CONTENT, _OPEN)):
        if (yield from call(feed, _SHAPE, opened)):
            yield from feed.skip_blanks()


def _is_of(template: str) -> bool:
    """qwen3_coder and glm write something else between the same marks."""
    return _OPEN in template and "<function=" not in template and "<arg_key>" not in template


HERMES = ToolFormat(
    name="hermes",
    read=_read,
    is_of=_is_of,
    before='<tool_call>\n{"name": "%s", "arguments": ',
    after="}\n</tool_call>",
    between="\n",
)
