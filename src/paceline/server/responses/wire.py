"""What clients of the Responses API send, and the chat that it is."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta
from msgspec.structs import replace

from paceline.server.bodies.places import Place, written
from paceline.server.bodies.refusals import Refusal, Unserved, Wire
from paceline.server.bodies.wire import MAX_METADATA, ChatRequest, StreamOptions
from paceline.server.errors import ApiError
from paceline.server.parameters.ignored import Ignored
from paceline.server.tools.wire import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Called,
    Effort,
    Function,
    FunctionName,
    Message,
    Named,
    Tool,
    ToolCall,
    ToolChoice,
    text_of,
)

_NOT_KEPT = "no response is kept here; send the whole conversation"
_NOT_READ = "it says nothing to the model"
_NEEDS: dict[str, tuple[str, ...]] = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}
_MAY: dict[str, tuple[str, ...]] = {"reasoning": ("content",)}


class ContentPart(Wire, frozen=True, kw_only=True):
    """A piece of a message."""

    type: Literal["input_text", "output_text", "reasoning_text"]
    text: str
    annotations: Annotated[Unserved, Ignored(_NOT_READ)] = UNSET
    logprobs: Annotated[Unserved, Ignored(_NOT_READ)] = UNSET


_Content = str | Annotated[list[ContentPart], Meta(max_length=MAX_MESSAGES)]


class Item(Wire, frozen=True, kw_only=True):
    """A message, a thought, a call that the model made, or what one brought."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: _Content | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: _Content | None = None
    id: Annotated[Unserved, Ignored(_NOT_READ)] = UNSET
    status: Annotated[Unserved, Ignored(_NOT_READ)] = UNSET
    summary: Annotated[Unserved, Ignored("the thought itself is read")] = UNSET
    encrypted_content: Annotated[Unserved, Ignored("thoughts are not encrypted here")] = UNSET

    def check(self, place: Place) -> None:
        Wire.check(self, place)
        for name in ("role", "content", "call_id", "name", "arguments", "output"):
            is_needed = name in _NEEDS[self.type]
            if name in _MAY.get(self.type, ()):
                continue
            if is_needed != (getattr(self, name) is not None):
                param = written((*place, name))
                expected = f"{'present' if is_needed else 'left out'} in a {self.type}"
                got, remedy = ("nothing", "add it") if is_needed else ("a value", "remove it")
                raise ApiError.about(param, expected=expected, got=got, remedy=remedy, param=param)

    def message(self) -> Message:
        """The same of a chat."""
        if self.type == "function_call":
            called = Called(name=self.name or "", arguments=self.arguments or "")
            call = ToolCall(id=self.call_id or "", function=called)
            return Message(role="assistant", tool_calls=[call])
        if self.type == "function_call_output":
            return Message(role="tool", tool_call_id=self.call_id, content=text_of(self.output))
        if self.type == "reasoning":
            return Message(role="assistant", content="", reasoning_content=text_of(self.content))
        return Message(role=self.role or "user", content=text_of(self.content))


class FunctionTool(Wire, frozen=True, kw_only=True):
    """What the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(Wire, frozen=True, kw_only=True):
    """The function that is to be called."""

    type: Literal["function"]
    name: str


class Reasoning(Wire, frozen=True, kw_only=True):
    """How much the model reasons."""

    effort: Effort | None = None
    summary: Annotated[Unserved, Refusal((), "reasoning is told as it is")] = UNSET


class ResponsesRequest(Wire, frozen=True, kw_only=True):
    """POST /v1/responses."""

    # What its client calls a field of the chat that it is.
    NAMES: ClassVar[Mapping[str, str]] = {
        r"tools\[(\d+)\]\.function(.*)": r"tools[\1]\2",
        r"max_tokens|max_completion_tokens": "max_output_tokens",
        r"reasoning_effort": "reasoning.effort",
        r"messages.*": "input",
    }

    model: str
    input: str | Annotated[list[Item], Meta(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: FunctionChoice | Literal["none", "auto", "required"] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=MAX_METADATA)] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    # Additions of this server, as a chat has them: clients that measure it send both.
    ignore_eos: bool | None = None
    stop: str | list[str] | None = None

    background: Annotated[Unserved, Refusal((False,), _NOT_KEPT)] = UNSET
    conversation: Annotated[Unserved, Refusal((), _NOT_KEPT)] = UNSET
    include: Annotated[Unserved, Refusal(([],), "leave it out")] = UNSET
    previous_response_id: Annotated[Unserved, Refusal((), _NOT_KEPT)] = UNSET
    service_tier: Annotated[Unserved, Refusal(("auto", "default"), "there is one tier")] = UNSET
    store: Annotated[Unserved, Refusal((False,), _NOT_KEPT)] = UNSET
    text: Annotated[
        Unserved,
        Refusal(({"format": {"type": "text"}},), "ask /v1/chat/completions for another form"),
    ] = UNSET
    top_logprobs: Annotated[Unserved, Refusal((0,), "ask /v1/chat/completions for them")] = UNSET
    truncation: Annotated[Unserved, Refusal(("disabled",), "nothing is cut here")] = UNSET

    def check(self, place: Place) -> None:
        Wire.check(self, place)
        for index, item in enumerate(() if isinstance(self.input, str) else self.input):
            item.check((*place, "input", index))
        if self.reasoning is not None:
            self.reasoning.check((*place, "reasoning"))

    def told(self) -> dict[str, Any]:
        """What the answer repeats, with what stands for the fields that were left out."""
        parallel, choice = self.parallel_tool_calls, self.tool_choice
        return {
            "instructions": self.instructions,
            "metadata": self.metadata or {},
            "parallel_tool_calls": True if parallel is None else parallel,
            "tool_choice": "auto" if choice is None else choice,
            "tools": self.tools or [],
        }

    def as_chat(self) -> ChatRequest:
        """Raises ApiError for what no chat takes."""
        said = self.input
        first = [Message(role="system", content=self.instructions)] if self.instructions else []
        rest = (
            [Message(role="user", content=said)]
            if isinstance(said, str)
            else _joined([item.message() for item in said])
        )
        chat = ChatRequest(
            model=self.model,
            messages=[*first, *rest],
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            stream=self.stream,
            stream_options=StreamOptions(include_usage=True) if self.stream else None,
            tools=[_tool(tool) for tool in self.tools or ()] or None,
            tool_choice=_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            ignore_eos=self.ignore_eos,
            stop=self.stop,
        )
        chat.check(())
        return chat


def _joined(messages: list[Message]) -> list[Message]:
    """A turn is one message of a chat: a thought, the text behind it, and then calls."""
    joined: list[Message] = []
    for message in messages:
        last = joined[-1] if joined else None
        if last is None or {last.role, message.role} != {"assistant"}:
            joined.append(message)
        elif message.tool_calls:
            calls = [*(last.tool_calls or ()), *message.tool_calls]
            joined[-1] = replace(last, tool_calls=calls)
        elif _is_thought(last) and message.reasoning_content is None:
            joined[-1] = replace(message, reasoning_content=last.reasoning_content)
        else:
            joined.append(message)
    return joined


def _is_thought(message: Message) -> bool:
    return message.reasoning_content is not None and not (message.content or message.tool_calls)


def _choice(choice: Any) -> Any:
    if isinstance(choice, FunctionChoice):
        return ToolChoice(type="function", function=Named(name=choice.name))
    return choice


def _tool(tool: FunctionTool) -> Tool:
    function = Function(
        name=tool.name,
        description=tool.description,
        parameters=tool.parameters,
        strict=tool.strict,
    )
    return Tool(type="function", function=function)
