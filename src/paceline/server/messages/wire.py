"""What clients of the Anthropic API send, and the chat that it is."""

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta
from msgspec.structs import replace

from paceline.server.bodies.places import Place, written
from paceline.server.bodies.refusals import Refusal, Unserved, Wire
from paceline.server.bodies.wire import ChatRequest, StreamOptions
from paceline.server.errors import ApiError
from paceline.server.parameters.ignored import Ignored
from paceline.server.tools.wire import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Called,
    Function,
    FunctionName,
    Message,
    Named,
    Tool,
    ToolCall,
    ToolChoice,
    text_of,
)

_Cached = Annotated[Unserved, Ignored("prefixes are shared without being asked")]
_NOT_CITED = "nothing is cited here"


class Text(Wire, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """A block of text."""

    text: str
    cache_control: _Cached = UNSET
    citations: Annotated[Unserved, Refusal(([],), _NOT_CITED)] = UNSET


class Thinking(Wire, frozen=True, kw_only=True, tag_field="type", tag="thinking"):
    """Reasoning of an earlier answer."""

    thinking: str
    signature: Annotated[Unserved, Ignored("reasoning is not signed here")] = UNSET


class ToolUse(Wire, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    """A call of an earlier answer."""

    id: str
    name: str
    input: dict[str, Any]
    cache_control: _Cached = UNSET


class ToolResult(Wire, frozen=True, kw_only=True, tag_field="type", tag="tool_result"):
    """What a call brought."""

    tool_use_id: str
    content: str | Annotated[list[Text], Meta(max_length=MAX_MESSAGES)] | None = None
    is_error: Annotated[Unserved, Ignored("the content says it")] = UNSET
    cache_control: _Cached = UNSET

    def check(self, place: Place) -> None:
        Wire.check(self, place)
        _check_texts(self.content, (*place, "content"))


ContentBlock = Text | Thinking | ToolUse | ToolResult


class InputMessage(Wire, frozen=True, kw_only=True):
    """One turn of a conversation."""

    role: Literal["user", "assistant"]
    content: str | Annotated[list[ContentBlock], Meta(max_length=MAX_MESSAGES)]

    def check(self, place: Place) -> None:
        for index, block in enumerate(() if isinstance(self.content, str) else self.content):
            here = (*place, "content", index)
            block.check(here)
            of = "user" if isinstance(block, ToolResult) else "assistant"
            if not isinstance(block, Text) and self.role != of:
                param, remedy = written((*here, "type")), "send it in another turn"
                expected, got = f"of a turn of the {of}", f"one of the {self.role}"
                raise ApiError.about(param, expected=expected, got=got, remedy=remedy, param=param)

    def messages(self) -> Iterator[Message]:
        """The same of a chat: results of calls are messages of their own."""
        if isinstance(self.content, str):
            yield Message(role=self.role, content=self.content)
            return
        for block in self.content:
            if isinstance(block, ToolResult):
                said = text_of(block.content)
                yield Message(role="tool", tool_call_id=block.tool_use_id, content=said)
        text = text_of([block for block in self.content if isinstance(block, Text)])
        thought = "\n".join(b.thinking for b in self.content if isinstance(b, Thinking))
        calls = [
            ToolCall(id=b.id, function=Called(name=b.name, arguments=json.dumps(b.input)))
            for b in self.content
            if isinstance(b, ToolUse)
        ]
        has_text = any(isinstance(block, Text) for block in self.content)
        if has_text or calls or thought or not self.content:
            yield Message(
                role=self.role,
                content=None if calls and not text else text,
                tool_calls=calls or None,
                reasoning_content=thought or None,
            )


class CustomTool(Wire, frozen=True, kw_only=True):
    """What the model may call; input_schema: a JSON schema of an object."""

    name: FunctionName
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    cache_control: _Cached = UNSET


class ToolUseChoice(Wire, frozen=True, kw_only=True):
    """Which tools are to be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Wire, frozen=True, kw_only=True):
    """Whether the model reasons; how long, its template does not say."""

    type: Literal["disabled"]


class CountRequest(Wire, frozen=True, kw_only=True):
    """POST /v1/messages/count_tokens."""

    # What its client calls a field of the chat that it is.
    NAMES: ClassVar[Mapping[str, str]] = {
        r"tools\[(\d+)\]\.function\.parameters(.*)": r"tools[\1].input_schema\2",
        r"tools\[(\d+)\]\.function(.*)": r"tools[\1]\2",
        r"stop": "stop_sequences",
        r"reasoning_effort": "thinking",
        r"messages.*|continue_final_message": "messages",
    }

    model: str
    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | Annotated[list[Text], Meta(max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[CustomTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolUseChoice | None = None
    thinking: ThinkingConfig | None = None

    def check(self, place: Place) -> None:
        Wire.check(self, place)
        _check_texts(self.system, (*place, "system"))
        for index, turn in enumerate(self.messages):
            turn.check((*place, "messages", index))
        choice = self.tool_choice
        if choice is not None and (choice.type == "tool") != (choice.name is not None):
            raise ApiError.about(
                "tool_choice.name",
                expected="sent with the type 'tool', and with no other",
                got=repr(choice.name),
                remedy="name the tool that is to be called",
                param="tool_choice.name",
            )

    def _chat(self) -> ChatRequest:
        """Not yet checked."""
        system = (
            [] if self.system is None else [Message(role="system", content=text_of(self.system))]
        )
        choice = self.tool_choice or ToolUseChoice(type="auto")
        kinds: Mapping[str, Literal["auto", "required", "none"]] = {
            "auto": "auto",
            "any": "required",
            "none": "none",
        }
        named = ToolChoice(type="function", function=Named(name=choice.name or ""))
        # What an assistant's last turn says goes on.
        goes_on = self.messages[-1].role == "assistant"
        return ChatRequest(
            model=self.model,
            messages=[*system, *(said for turn in self.messages for said in turn.messages())],
            tools=[_tool(tool) for tool in self.tools or ()] or None,
            tool_choice=named if choice.type == "tool" else kinds[choice.type],
            parallel_tool_calls=False if choice.disable_parallel_tool_use else None,
            reasoning_effort=None if self.thinking is None else "none",
            continue_final_message=True if goes_on else None,
        )

    def as_chat(self) -> ChatRequest:
        """Raises ApiError for what no chat takes."""
        return _checked(self._chat())


class MessagesRequest(CountRequest, frozen=True, kw_only=True):
    """POST /v1/messages."""

    max_tokens: int
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    metadata: dict[str, str | None] | None = None

    service_tier: Annotated[Unserved, Refusal(("auto", "standard_only"), "there is one tier")] = (
        UNSET
    )
    container: Annotated[Unserved, Refusal((), "nothing is run here")] = UNSET
    mcp_servers: Annotated[Unserved, Refusal(([],), "nothing is run here")] = UNSET

    def as_chat(self) -> ChatRequest:
        return _checked(
            replace(
                self._chat(),
                max_tokens=self.max_tokens,
                stream=self.stream,
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                stop=self.stop_sequences,
                stream_options=StreamOptions(include_usage=True) if self.stream else None,
            )
        )


def _checked(chat: ChatRequest) -> ChatRequest:
    chat.check(())
    return chat


def _tool(tool: CustomTool) -> Tool:
    function = Function(name=tool.name, description=tool.description, parameters=tool.input_schema)
    return Tool(type="function", function=function)


def _check_texts(content: str | list[Text] | None, place: Place) -> None:
    for index, block in enumerate(content if isinstance(content, list) else ()):
        block.check((*place, index))
