"""A grammar of answers that are calls: what `tool_choice` asks for when it names a function, or
wants one called."""

import json
from collections.abc import Sequence

from paceline.server.tools.formats import TOOL_FORMATS
from paceline.server.tools.forms import Form
from paceline.server.tools.think import CLOSE
from paceline.server.tools.wire import Tool

# Blanks between the parts of arguments would have no end.
_SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_OBJECT = {"type": "object", "x-guidance": _SEPARATORS}


def calls_grammar(tools: Sequence[Tool], form: Form) -> str:
    """A grammar in Lark of one call or, unless the form allows only one, of several.

    Reasoning that the prompt has begun may go on first.
    """
    assert form.tools is not None, "a format with calls"
    about = TOOL_FORMATS[form.tools]
    more = "" if form.is_one_call else f" ({_text(about.between)} call)*"
    thought = "thought " if form.has_begun else ""
    lines = [
        f"start: {thought}{_text(about.opening)} call{more} {_text(about.closing)}",
        f"call: {' | '.join(f'call_{index}' for index in range(len(tools)))}",
    ]
    if thought:
        lines.append(f"thought[suffix={json.dumps(CLOSE)}]: /(?s:.*)/")
    for index, tool in enumerate(tools):
        before = about.before % tool.function.name
        schema = json.dumps(_OBJECT | (tool.function.parameters or {}))
        lines.append(f"call_{index}: {_text(before)} arguments_{index} {_text(about.after)}")
        lines.append(f"arguments_{index}: %json {schema}")
    return "\n".join(lines)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
