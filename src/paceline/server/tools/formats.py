"""The formats by name, and which of them a model writes: its chat template says so."""

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from paceline.core.errors import ConfigError
from paceline.server.tools.deepseek import DEEPSEEK
from paceline.server.tools.feed import Feed, Parser, Reads, Types, content_only
from paceline.server.tools.forms import Form, ToolFormat
from paceline.server.tools.glm import GLM
from paceline.server.tools.harmony import HARMONY, read_harmony
from paceline.server.tools.hermes import HERMES
from paceline.server.tools.llama import LLAMA
from paceline.server.tools.mistral import MISTRAL
from paceline.server.tools.qwen3_coder import QWEN3_CODER
from paceline.server.tools.think import CLOSE, think
from paceline.text.tokenizer import Tokenizer

AUTO, NONE = "auto", "none"
THINK = "think"
TOOL_FORMATS: dict[str, ToolFormat] = {
    each.name: each for each in (HERMES, QWEN3_CODER, GLM, LLAMA, MISTRAL, DEEPSEEK, HARMONY)
}
REASONING_FORMATS = (THINK, HARMONY.name)


class Formats(Struct, frozen=True, kw_only=True):
    """How a model writes calls and reasoning; None: not that anybody knows."""

    tools: str | None = None
    reasoning: str | None = None

    def describe(self) -> dict[str, Any]:
        """As /v1/models and the log show them."""
        return {"tool_call_parser": self.tools, "reasoning_parser": self.reasoning}

    def line(self) -> str:
        """For whoever started the server; empty where the model writes neither."""
        if self == UNKNOWN:
            return ""
        return f"\n  tool calls are read as {self.tools}, reasoning as {self.reasoning}"


UNKNOWN = Formats()


def _require_known(flag: str, name: str, known: tuple[str, ...]) -> None:
    known = (AUTO, NONE, *known)
    if name not in known:
        expected = f"one of {', '.join(known)}"
        remedy = "leave it out to go by the chat template"
        raise ConfigError.about(flag, expected=expected, got=repr(name), remedy=remedy)


class Parsers(Struct, frozen=True, kw_only=True):
    """What was asked for: a format's name, "auto" or "none"."""

    tools: str = AUTO
    reasoning: str = AUTO

    def __post_init__(self) -> None:
        """Raises ConfigError for a name that is none."""
        _require_known("--tool-call-parser", self.tools, tuple(TOOL_FORMATS))
        _require_known("--reasoning-parser", self.reasoning, REASONING_FORMATS)

    def formats(self, tokenizer: Tokenizer | None) -> Formats:
        """Those asked for by name, else what the chat template asks of the model.

        Raises ConfigError for calls of tools that the template shows to nobody.
        """
        template, reads = "", frozenset[str]()
        if tokenizer is not None and tokenizer.has_chat_template:
            found = tokenizer.require_chat_template()
            template, reads = found.source, found.reads
        tools, reasoning = self.tools, self.reasoning
        if tools == AUTO:
            known = [each.name for each in TOOL_FORMATS.values() if each.is_of(template)]
            tools = known[0] if known and "tools" in reads else NONE
        elif tools != NONE and "tools" not in reads:
            raise ConfigError.about(
                "--tool-call-parser",
                expected="given with a chat template that shows tools to the model",
                got=f"{tools!r} with one that does not" if template else f"{tools!r} without",
                remedy="leave it out, or change the template in the model's folder",
            )
        if HARMONY.name in (tools, reasoning) or (reasoning == AUTO and HARMONY.is_of(template)):
            reasoning = _harmony_too(reasoning, tools)
        elif reasoning == AUTO:
            reasoning = THINK if CLOSE in template else NONE
        return Formats(
            tools=None if tools == NONE else tools,
            reasoning=None if reasoning == NONE else reasoning,
        )


BY_TEMPLATE = Parsers()


def _harmony_too(reasoning: str, tools: str) -> str:
    """Harmony writes calls and reasoning as one.  Raises ConfigError for half of it."""
    if reasoning not in (AUTO, HARMONY.name) or tools not in (NONE, HARMONY.name):
        raise ConfigError.about(
            "--tool-call-parser and --reasoning-parser",
            expected="both harmony, or none of them",
            got=f"{tools} and {reasoning}",
            remedy="leave them out to go by the chat template",
        )
    return HARMONY.name


def parser_of(form: Form) -> Parser:
    """Of one answer."""
    if form.reasoning == HARMONY.name:
        return Parser(lambda feed: read_harmony(feed, has_tools=form.tools is not None))
    read: Callable[[Feed, Types], Reads] = content_only
    if form.tools is not None:
        read = TOOL_FORMATS[form.tools].read

    def reads(feed: Feed) -> Reads:
        if form.reasoning == THINK:
            yield from think(feed, has_begun=form.has_begun)
        yield from read(feed, form.types)

    return Parser(reads)


def shows_special_tokens(form: Form) -> bool:
    """Whether the text must come with its special tokens to be read."""
    names = (form.tools, form.reasoning)
    return any(TOOL_FORMATS[name].shows_special_tokens for name in names if name in TOOL_FORMATS)
