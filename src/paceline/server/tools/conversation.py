"""Conversation: what a chat request says, as the model's template reads it, and as a prompt."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from paceline.server.bodies.places import written
from paceline.server.bodies.wire import ChatRequest
from paceline.server.errors import ApiError
from paceline.server.tools.formats import TOOL_FORMATS, Formats
from paceline.server.tools.forms import Form
from paceline.server.tools.grammar import calls_grammar
from paceline.server.tools.think import CLOSE, OPEN
from paceline.server.tools.wire import Message, Tool, ToolChoice
from paceline.server.tools.xml_calls import kinds_of
from paceline.text.chat_template import ChatTemplate
from paceline.text.tokenizer import Tokenizer

_HERE = "\ue000"  # behind a message that goes on: a character that is none
_OURS = frozenset({"messages", "tools", "add_generation_prompt", "reasoning_effort"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The text of a conversation, and what is looked for in the answer."""

    text: str
    form: Form
    grammar: str | None  # in Lark, of the answer: where a tool must be called


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What goes into the template."""

    messages: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any]
    continued: str | None  # the message that the answer goes on with
    form: Form
    forced: Sequence[Tool]  # of which one must be called
    is_formed: bool  # the answer has a form that was asked for, with no room for a thought

    @classmethod
    def of(cls, asked: ChatRequest, formats: Formats, template: ChatTemplate) -> "Conversation":
        """Raises ApiError, 400, for what this model's template does not read."""
        continued = _continued(asked)
        as_text = formats.tools is not None and TOOL_FORMATS[formats.tools].arguments_as_text
        messages = [
            _for_template(message, ("messages", index), as_text=as_text)
            for index, message in enumerate(asked.messages)
        ]
        has_tools = bool(asked.tools) and asked.tool_choice != "none"
        variables = _variables(asked, template)
        if has_tools:
            _require_tools(formats, template)
            variables["tools"] = [msgspec.to_builtins(tool) for tool in asked.tools or ()]
        variables["add_generation_prompt"] = (
            continued is None and asked.add_generation_prompt is not False
        )
        form = Form(
            tools=formats.tools if has_tools else None,
            reasoning=formats.reasoning,
            is_one_call=asked.parallel_tool_calls is False
            or isinstance(asked.tool_choice, ToolChoice),
            types=_types(asked.tools or (), formats) if has_tools else {},
        )
        if continued is not None:
            messages[-1]["content"] = continued + _HERE
        return cls(
            messages=messages,
            variables=variables,
            continued=continued,
            form=form,
            forced=_forced(asked),
            is_formed=asked.form is not None,
        )

    def prompt(self, tokenizer: Tokenizer) -> Prompt:
        """Raises RequestError when the template refuses the messages."""
        text = tokenizer.render_chat(self.messages, **self.variables)
        end = text.rstrip()
        if self.continued is not None:
            text, mark, _ = text.rpartition(_HERE)
            end = self.continued
            if not mark:
                raise ApiError.about(
                    "continue_final_message",
                    expected="sent with a final message that the template shows to its end",
                    got="one that it cuts",
                    remedy="leave it out",
                    param="continue_final_message",
                )
        has_begun = end.rfind(OPEN) > end.rfind(CLOSE) if self.continued else end.endswith(OPEN)
        form = msgspec.structs.replace(self.form, has_begun=has_begun and not self.is_formed)
        grammar = calls_grammar(self.forced, form) if self.forced else None
        return Prompt(text=text, form=form, grammar=grammar)


def _variables(asked: ChatRequest, template: ChatTemplate) -> dict[str, Any]:
    variables: dict[str, Any] = dict(asked.chat_template_kwargs or {})
    for name in variables:
        if name in _OURS or name not in template.reads:
            param = written(("chat_template_kwargs", name))
            remedy = "send it beside messages" if name in _OURS else "leave it out"
            expected = "a variable that this model's chat template reads"
            raise ApiError.about(
                param, expected=expected, got="another name", remedy=remedy, param=param
            )
    effort = asked.reasoning_effort
    if effort is None:
        return variables
    if "reasoning_effort" in template.reads:
        return variables | {"reasoning_effort": effort}
    if "enable_thinking" in template.reads and effort == "none":
        return {"enable_thinking": False} | variables
    if effort != "none":
        raise ApiError.about(
            "reasoning_effort",
            expected="left out, or 'none': this model's chat template reads no other",
            got=repr(effort),
            remedy="ask for it in a message",
            param="reasoning_effort",
            code="unsupported_parameter",
        )
    return variables


def _forced(asked: ChatRequest) -> Sequence[Tool]:
    """The tools of which one must be called; none where the model may choose."""
    tools, choice = asked.tools or (), asked.tool_choice
    if choice == "required":
        return tools
    name = choice.function.name if isinstance(choice, ToolChoice) else None
    return [tool for tool in tools if tool.function.name == name]


def _require_tools(formats: Formats, template: ChatTemplate) -> None:
    if formats.tools is None:
        raise ApiError.about(
            "tools",
            expected="sent to a model whose chat template asks for calls in a known format",
            got="one whose template does not",
            remedy="describe them in a message, or serve with --tool-call-parser",
            param="tools",
            code="unsupported_parameter",
        )


def _types(tools: Sequence[Tool], formats: Formats) -> dict[str, dict[str, str]]:
    """Of arguments that the format writes as texts."""
    if formats.tools is None or TOOL_FORMATS[formats.tools].elements is None:
        return {}
    return {tool.function.name: kinds_of(tool.function.parameters) for tool in tools}


def _continued(asked: ChatRequest) -> str | None:
    """The text that the answer goes on behind."""
    if not asked.continue_final_message:
        return None
    last = asked.messages[-1]
    text = last.text
    if last.role != "assistant" or not text or not text.strip() or last.tool_calls:
        raise ApiError.about(
            "continue_final_message",
            expected="sent with a final message of the assistant that is a text",
            got=f"one of role {last.role!r}" if last.role != "assistant" else "one without",
            remedy="leave it out, or add the message that shall go on",
            param="continue_final_message",
        )
    return text


def _for_template(message: Message, place: tuple[str, int], *, as_text: bool) -> dict[str, Any]:
    """As chat templates read it; as_text: arguments as JSON, else as what it says."""
    # Templates tell a message of calls alone by its null.
    found: dict[str, Any] = {"role": message.role, "content": message.text}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if getattr(message, name) is not None:
            found[name] = getattr(message, name)
    if not message.tool_calls:
        return found
    found["content"] = found["content"] or None
    found["tool_calls"] = [
        {
            "id": call.id,
            "type": call.type,
            "function": {
                "name": call.function.name,
                "arguments": call.function.arguments
                if as_text
                else _arguments(call.function.arguments, (*place, "tool_calls", index)),
            },
        }
        for index, call in enumerate(message.tool_calls)
    ]
    return found


def _arguments(text: str, place: tuple[str | int, ...]) -> dict[str, Any]:
    try:
        found = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        param = written((*place, "function", "arguments"))
        expected, remedy = "a JSON object", "send back what the model called it with"
        raise ApiError.about(
            param, expected=expected, got=f"{text!r:.80}", remedy=remedy, param=param
        )
    return found
