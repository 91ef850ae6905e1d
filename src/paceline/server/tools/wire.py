"""What clients send of conversations: messages, tools, and which of them are to be called."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol

from msgspec import UNSET, Meta

from paceline.server.bodies.places import Place, written
from paceline.server.bodies.refusals import Refusal, Unserved, Wire
from paceline.server.errors import ApiError
from paceline.server.parameters.ignored import FromAnswers

MAX_MESSAGES = 2048  # the OpenAI API's limit; of the parts of a message, too
MAX_TOOLS = 128  # the OpenAI API's limit; of the calls of a message, too

TEXT_ONLY = "this server reads and writes text"
OLD_TOOLS = "it is the name of old; send tools, tool_choice and tool_calls"

FunctionName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class Function(Wire, frozen=True, kw_only=True, omit_defaults=True):
    """What a tool does; parameters: a JSON schema of an object."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def check(self, place: Place) -> None:
        Wire.check(self, place)
        wanted = {"type": str, "properties": dict, "required": list}
        schema = self.parameters or {}
        for name, kind in wanted.items():
            said = schema.get(name, kind())
            is_wrong = not isinstance(said, kind) or (name == "type" and said not in ("", "object"))
            if is_wrong or (name == "required" and not all(isinstance(each, str) for each in said)):
                param = written((*place, "parameters", name))
                required = "a list of names"
                expected = {"type": '"object"', "properties": "an object", "required": required}
                remedy = "describe the function's arguments as a JSON schema of an object"
                raise ApiError.about(
                    param, expected=expected[name], got=f"{said!r:.80}", remedy=remedy, param=param
                )


class Tool(Wire, frozen=True, kw_only=True):
    """What the model may call."""

    type: Literal["function"]
    function: Function

    def check(self, place: Place) -> None:
        self.function.check((*place, "function"))


class Named(Wire, frozen=True, kw_only=True):
    """A function by its name."""

    name: str


class ToolChoice(Wire, frozen=True, kw_only=True):
    """The function that is to be called."""

    type: Literal["function"]
    function: Named


def check_tools(tools: Sequence[Tool], choice: object, place: Place) -> None:
    """Raise ApiError, 400, for two tools of one name, and a choice that is not among them."""
    names: set[str] = set()
    for index, tool in enumerate(tools):
        tool.check((*place, "tools", index))
        if tool.function.name in names:
            param = written((*place, "tools", index, "function", "name"))
            raise ApiError.about(
                param,
                expected="a name of its own",
                got=repr(tool.function.name),
                remedy="give every tool another name",
                param=param,
            )
        names.add(tool.function.name)
    wanted = choice.function.name if isinstance(choice, ToolChoice) else None
    if wanted is not None and wanted not in names:
        _refuse_choice(f"one of {', '.join(sorted(names)) or 'the tools, which are none'}", wanted)
    if choice == "required" and not names:
        _refuse_choice("sent with tools", choice)


def _refuse_choice(expected: str, got: object) -> None:
    name, remedy = "tool_choice", "name a function of tools, or send 'auto'"
    raise ApiError.about(name, expected=expected, got=f"{got!r:.80}", remedy=remedy, param=name)


class HasText(Protocol):
    """A part of a message, in whatever API."""

    @property
    def text(self) -> str: ...


def text_of(content: str | Sequence[HasText] | None) -> str:
    """A content's parts, joined by line ends."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)


class TextPart(Wire, frozen=True, kw_only=True):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class Called(Wire, frozen=True, kw_only=True):
    """What was called, with arguments as JSON."""

    name: str
    arguments: str


class ToolCall(Wire, frozen=True, kw_only=True):
    """A call that the model made."""

    id: str
    function: Called
    type: Literal["function"] = "function"
    index: int | None = None  # clients that join a stream leave it there


class Message(FromAnswers, frozen=True, kw_only=True):
    """One turn of a conversation; its content is a text, or a list of text parts, joined by line
    ends; null beside calls.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Meta(max_length=MAX_MESSAGES)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    annotations: Annotated[Unserved, Refusal(([],), TEXT_ONLY)] = UNSET
    audio: Annotated[Unserved, Refusal((), TEXT_ONLY)] = UNSET
    function_call: Annotated[Unserved, Refusal((), OLD_TOOLS)] = UNSET
    refusal: Annotated[Unserved, Refusal(("",), "send it as content")] = UNSET

    def check(self, place: Place) -> None:
        FromAnswers.check(self, place)
        self._require(place, "content", self.content is not None or bool(self.tool_calls), "a text")
        is_tool, is_assistant = self.role == "tool", self.role == "assistant"
        self._require(
            place,
            "tool_call_id",
            is_tool == (self.tool_call_id is not None),
            "the id of the call, where the role is tool and there alone",
        )
        only = "left out, but of the assistant"
        self._require(place, "tool_calls", is_assistant or not self.tool_calls, only)
        self._require(place, "reasoning_content", is_assistant or not self.reasoning_content, only)

    def _require(self, place: Place, name: str, holds: bool, expected: str) -> None:
        if not holds:
            param = written((*place, name))
            got = "nothing" if getattr(self, name) is None else f"one of role {self.role!r}"
            remedy = "see the OpenAI API's chat completions"
            raise ApiError.about(param, expected=expected, got=got, remedy=remedy, param=param)

    @property
    def text(self) -> str | None:
        return None if self.content is None else text_of(self.content)
