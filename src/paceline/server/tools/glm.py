"""Calls as GLM-4.5 and later write them:

    <tool_call>get_weather
    <arg_key>city</arg_key>
    <arg_value>Paris</arg_value>
    </tool_call>

GLM-4.7 writes no line ends.  What is not a string by its schema is JSON, else what Python writes,
else a text: `glm4_moe_tool_parser.py` of vLLM, which the model's card names, reads it so.
"""

import re
from typing import Any

from paceline.server.tools.calls import NAME, S
from paceline.server.tools.feed import Feed, Kind, Reads, Types
from paceline.server.tools.forms import ToolFormat
from paceline.server.tools.xml_calls import KEY, STRING, Elements, read_literal, xml_call

_OPEN, _CLOSE, _KEY = "<tool_call>", "</tool_call>", "<arg_key>"


def _value(text: str, kind: str) -> Any:
    return text if kind == STRING else read_literal(text)


_WITHIN = Elements(
    head=re.compile(rf"{S}{NAME}{S}(?={_KEY}|{_CLOSE})"),
    key=re.compile(rf"{_KEY}{KEY}</arg_key>{S}<arg_value>"),
    opens=_KEY,
    shuts="</arg_value>",
    end=_CLOSE,
    before_value=f"{_KEY}%s</arg_key>\n<arg_value>",
    after_value="</arg_value>\n",
    value_of=_value,
)


def _read(feed: Feed, types: Types) -> Reads:
    while opened := (yield from feed.until(Kind.CONTENT, _OPEN)):
        if (yield from xml_call(feed, _WITHIN, types, opened)):
            yield from feed.skip_blanks()


GLM = ToolFormat(
    name="glm",
    read=_read,
    is_of=lambda template: _OPEN in template and _KEY in template,
    before=f"{_OPEN}%s\n",
    after=_CLOSE,
    between="\n",
    elements=_WITHIN,
)
