"""Calls as Qwen3-Coder and Qwen3.5 write them:

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

Values are read as by `qwen3coder_tool_parser.py` in the repository of Qwen3-Coder: "null" is none,
a boolean is true or anything else, numbers without a fraction are whole, and what is of another
type than the schema's is a text.  The outer marks may be missing.
"""

import re
from dataclasses import replace
from typing import Any

from paceline.server.tools.calls import NAME, S
from paceline.server.tools.feed import Feed, Kind, Reads, Types
from paceline.server.tools.forms import ToolFormat
from paceline.server.tools.xml_calls import KEY, STRING, Elements, read_literal, xml_call

_OPEN, _CLOSE, _FUNCTION = "<tool_call>", "</tool_call>", "<function="


def _value(text: str, kind: str) -> Any:
    """Raises ValueError for no number."""
    if text.lower() == "null":
        return None
    if kind == STRING:
        return text
    if kind == "integer":
        return int(text)
    if kind == "number":
        number = float(text)
        return int(number) if number.is_integer() else number
    if kind == "boolean":
        return text.lower() == "true"
    return read_literal(text)


_WITHIN = Elements(
    head=re.compile(rf"{S}{_FUNCTION}{NAME}>"),
    key=re.compile(f"<parameter={KEY}>"),
    opens="<parameter=",
    shuts="</parameter>",
    on_lines=True,
    end=rf"{S}</function>",
    close=_CLOSE,
    before_value="<parameter=%s>\n",
    after_value="\n</parameter>\n",
    value_of=_value,
    reads_null=True,
)


_BARE = replace(_WITHIN, head=re.compile(rf"{NAME}>"), close="")


def _read(feed: Feed, types: Types) -> Reads:
    while opened := (yield from feed.until(Kind.CONTENT, _OPEN, _FUNCTION)):
        is_bare = opened.endswith(_FUNCTION)
        if not (yield from xml_call(feed, _BARE if is_bare else _WITHIN, types, opened)):
            continue
        yield from feed.skip_blanks()
        if is_bare and (yield from feed.begins_with(_CLOSE)):
            feed.take(len(_CLOSE))
            yield from feed.skip_blanks()


QWEN3_CODER = ToolFormat(
    name="qwen3_coder",
    read=_read,
    is_of=lambda template: _OPEN in template and _FUNCTION in template,
    before=f"{_OPEN}\n{_FUNCTION}%s>\n",
    after=f"</function>\n{_CLOSE}",
    between="\n",
    elements=_WITHIN,
)
