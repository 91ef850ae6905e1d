"""Fields of the OpenAI API this server knows and does not serve.

Each may be sent with null or with the value that asks for nothing; any other value is refused by
name, never ignored.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic_core import PydanticCustomError

from paceline.core.errors import message


class Refusal(NamedTuple):
    """What a field may hold beside null, and what to do without it."""

    allowed: tuple[object, ...]
    remedy: str


_NO_TOOLS = "this server calls no tools; describe them in a message instead"
_TEXT_ONLY = "this server reads and writes text"

CHAT_REFUSALS: Mapping[str, Refusal] = {
    "audio": Refusal((), _TEXT_ONLY),
    "function_call": Refusal(("none",), _NO_TOOLS),
    "functions": Refusal(([],), _NO_TOOLS),
    "modalities": Refusal((["text"],), _TEXT_ONLY),
    "moderation": Refusal((), "nothing is moderated here"),
    "parallel_tool_calls": Refusal((True, False), _NO_TOOLS),
    "prediction": Refusal((), "leave it out; the answer is the same"),
    "prompt_cache_options": Refusal((), "prefixes are shared without being asked"),
    "prompt_cache_retention": Refusal(("in_memory",), "prefixes are kept in memory"),
    "reasoning_effort": Refusal(("none",), "ask for it in a message"),
    "response_format": Refusal(({"type": "text"},), "the answer is free text"),
    "service_tier": Refusal(("auto", "default"), "there is one tier"),
    "store": Refusal((False,), "nothing is stored here"),
    "tool_choice": Refusal(("none", "auto"), _NO_TOOLS),
    "tools": Refusal(([],), _NO_TOOLS),
    "verbosity": Refusal(("medium",), "ask for it in a message"),
    "web_search_options": Refusal((), "this server searches nothing"),
}
COMPLETION_REFUSALS: Mapping[str, Refusal] = {
    "best_of": Refusal((1,), "ask for n completions and choose among them"),
    "suffix": Refusal(("",), "this server continues a text, it fills no gap"),
}
MESSAGE_REFUSALS: Mapping[str, Refusal] = {
    "annotations": Refusal(([],), _TEXT_ONLY),
    "audio": Refusal((), _TEXT_ONLY),
    "function_call": Refusal((), _NO_TOOLS),
    "refusal": Refusal(("",), "send it as content"),
    "tool_call_id": Refusal((), _NO_TOOLS),
    "tool_calls": Refusal(([],), _NO_TOOLS),
}


def without_refused(body: object, refusals: Mapping[str, Refusal]) -> object:
    """`body` without the known fields that ask for nothing.

    Raises PydanticCustomError, of type "refused", for one that asks for something.
    """
    if not isinstance(body, Mapping):
        return body
    for name in sorted(body.keys() & refusals.keys()):
        allowed, remedy = refusals[name]
        if not _is_one_of(body[name], (None, *allowed)):
            expected = " or ".join(_as_json(value) for value in (None, *allowed))
            raise PydanticCustomError(
                "refused",
                "{text}",  # the message is not a format of the client's words
                {
                    "param": name,
                    "text": message(
                        name, expected=expected, got=_as_json(body[name]), remedy=remedy
                    ),
                },
            )
    return {name: value for name, value in body.items() if name not in refusals}


def _is_one_of(value: object, allowed: tuple[object, ...]) -> bool:
    """Equality that tells 1 from True."""
    return any(type(value) is type(each) and value == each for each in allowed)


def _as_json(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
