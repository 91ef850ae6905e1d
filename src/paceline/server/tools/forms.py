"""ToolFormat: what is known of a format of calls.  Form: what is looked for in one answer."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from msgspec import Struct

from paceline.server.tools.feed import Feed, Reads, Types
from paceline.server.tools.xml_calls import Elements


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a family of models writes calls of tools."""

    name: str  # of --tool-call-parser
    read: Callable[[Feed, Types], Reads]
    is_of: Callable[[str], bool]  # whether a chat template asks for it
    before: str = ""  # of a call: what stands before its arguments, with its function's name
    after: str = ""  # them
    between: str = ""  # two calls
    opening: str = ""  # of all calls
    closing: str = ""
    elements: Elements | None = None  # how arguments are written that are no JSON object
    shows_special_tokens: bool = False  # some of its markers are special tokens
    arguments_as_text: bool = False  # how the templates read those of earlier calls
    new_id: Callable[[], str] = _call_id


class Form(Struct, frozen=True, kw_only=True):
    """What is looked for in an answer.  Plain data."""

    tools: str | None = None  # the format of calls
    reasoning: str | None = None  # the format of reasoning
    has_begun: bool = False  # the prompt ends within reasoning
    is_one_call: bool = False  # further ones are not told
    types: dict[str, dict[str, str]] = {}  # of arguments that are no JSON; Types

    @property
    def is_any(self) -> bool:
        """Whether an answer is more than its text."""
        return self.tools is not None or self.reasoning is not None


TEXT = Form()  # an answer of which nothing is known
