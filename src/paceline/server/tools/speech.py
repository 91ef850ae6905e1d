"""Speech: an answer as a message, in pieces or whole."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paceline.server.tools.feed import Kind, Piece
from paceline.server.tools.formats import TOOL_FORMATS, parser_of
from paceline.server.tools.forms import Form


class Said(NamedTuple):
    """A piece with the call that it is of."""

    kind: Kind
    text: str
    call: int = -1  # its index
    call_id: str = ""  # of a NAME


class Speech:
    """Owns what was read of one answer."""

    def __init__(self, form: Form) -> None:
        self._parser = parser_of(form)
        self._new_id = None if form.tools is None else TOOL_FORMATS[form.tools].new_id
        self._most_calls = 1 if form.is_one_call else None
        self._num_begun = 0
        self.num_called = 0  # whole calls

    def push(self, text: str, *, is_end: bool) -> list[Said]:
        """What has become certain of it."""
        pieces = self._parser.push(text) + (self._parser.finish() if is_end else [])
        return list(self._told(pieces))

    def _told(self, pieces: Iterable[Piece]) -> Iterable[Said]:
        for kind, text in pieces:
            if kind in (Kind.CONTENT, Kind.REASONING):
                yield Said(kind, text)
                continue
            if kind is Kind.NAME:
                self._num_begun += 1
            if self._most_calls is not None and self.num_called >= self._most_calls:
                continue
            self.num_called += kind is Kind.CALLED
            assert self._new_id is not None, "a format with calls"
            call_id = self._new_id() if kind is Kind.NAME else ""
            yield Said(kind, text, self._num_begun - 1, call_id)


@dataclass(slots=True)
class SpokenCall:
    """A call of a whole message."""

    id: str
    name: str
    arguments: str  # JSON, as far as it was read


@dataclass(slots=True)
class Spoken:
    """A whole message."""

    content: str = ""
    reasoning: str = ""
    calls: list[SpokenCall] = field(default_factory=list)


def spoken(said: Iterable[Said]) -> Spoken:
    """What began as a call and is none is content."""
    message = Spoken()
    for kind, text, _, call_id in said:
        if kind is Kind.BROKEN:
            message.calls.pop()
        if kind in (Kind.CONTENT, Kind.BROKEN):
            message.content += text
        elif kind is Kind.REASONING:
            message.reasoning += text
        elif kind is Kind.NAME:
            message.calls.append(SpokenCall(call_id, text, ""))
        elif kind is Kind.ARGUMENTS:
            message.calls[-1].arguments += text
    return message


def message_of(said: Iterable[Said]) -> dict[str, Any]:
    """As a chat has it: {content, reasoning_content?, tool_calls?}."""
    found = spoken(said)
    message: dict[str, Any] = {"content": found.content or (None if found.calls else "")}
    if found.reasoning:
        message["reasoning_content"] = found.reasoning
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in found.calls
    ]
    return message | ({"tool_calls": calls} if calls else {})


def delta_of(said: Said) -> dict[str, Any] | None:
    """What a stream tells of a piece; None: nothing, as a part of a call cannot be taken back."""
    kind, text, index, call_id = said
    if kind is Kind.CONTENT:
        return {"content": text}
    if kind is Kind.REASONING:
        return {"reasoning_content": text}
    if kind is Kind.NAME:
        function = {"name": text, "arguments": ""}
        call = {"index": index, "id": call_id, "type": "function", "function": function}
        return {"tool_calls": [call]}
    if kind is Kind.ARGUMENTS:
        return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
    return None
