"""MessagesWriter: answers as messages of the Anthropic API, whole or as its events."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.engine.answers.outputs import CompletionOutput, RequestOutput
from paceline.engine.request import FinishReason
from paceline.server.answer import Document, Envelope, TokenCounts, Writer, encoded
from paceline.server.errors import MESSAGES_PATH, ApiError
from paceline.server.stream import event
from paceline.server.tools.feed import Kind
from paceline.server.tools.forms import Form
from paceline.server.tools.speech import Said, Speech, spoken

_EMPTY: dict[Kind, Document] = {
    Kind.CONTENT: {"type": "text", "text": ""},
    Kind.REASONING: {"type": "thinking", "thinking": "", "signature": ""},
}


@dataclass(slots=True, kw_only=True)
class _Blocks:
    """The blocks of a streamed message: one is open at a time."""

    index: int = -1
    kind: Kind | None = None

    def told(self, said: Sequence[Said]) -> list[Document]:
        events: list[Document] = []
        for piece in said:
            if piece.kind in (Kind.CALLED, Kind.BROKEN):
                continue
            if piece.kind is Kind.NAME or (
                piece.kind is not Kind.ARGUMENTS and piece.kind is not self.kind
            ):
                events += [*self.closed(), self._opened(piece)]
            if piece.kind is not Kind.NAME:
                events.append(self._delta(piece))
        return events

    def closed(self) -> list[Document]:
        if self.kind is None:
            return []
        self.kind = None
        return [{"type": "content_block_stop", "index": self.index}]

    def _opened(self, piece: Said) -> Document:
        self.index, self.kind = self.index + 1, piece.kind
        block = _EMPTY.get(piece.kind) or _tool_use(piece.call_id, piece.text, {})
        return {"type": "content_block_start", "index": self.index, "content_block": block}

    def _delta(self, piece: Said) -> Document:
        delta: Document = {"type": "text_delta", "text": piece.text}
        if piece.kind is Kind.REASONING:
            delta = {"type": "thinking_delta", "thinking": piece.text}
        elif piece.kind is Kind.ARGUMENTS:
            delta = {"type": "input_json_delta", "partial_json": piece.text}
        return {"type": "content_block_delta", "index": self.index, "delta": delta}


class MessagesWriter(Writer):
    """Of one answer.  num_prompt: tokens of its prompt."""

    id_prefix = "msg_"
    kind = chunk_kind = "message"

    def __init__(self, form: Form, num_prompt: int) -> None:
        self._num_prompt = num_prompt
        self._speech = Speech(form)
        self._blocks = _Blocks()
        self._stop: Document = {"stop_reason": None, "stop_sequence": None}

    def opening(self, index: int) -> list[Document]:
        return [{"type": "message_start"}]

    def piece(
        self, index: int, growth: RequestOutput, completion: CompletionOutput
    ) -> list[Document]:
        is_end = completion.finish_reason is not None
        events = self._blocks.told(self._speech.push(completion.text, is_end=is_end))
        if is_end:
            self._stop = _stop(completion, self._speech)
            events += self._blocks.closed()
        return events

    def whole(self, index: int, growth: RequestOutput, completion: CompletionOutput) -> Document:
        message = spoken(self._speech.push(completion.text, is_end=True))
        content = []
        if message.reasoning:
            content.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
        if message.content:
            content.append({"type": "text", "text": message.content})
        for call in message.calls:
            content.append(_tool_use(call.id, call.name, json.loads(call.arguments)))
        return {"content": content, **_stop(completion, self._speech)}

    def document(
        self, envelope: Envelope, choices: list[Document], counts: TokenCounts
    ) -> Document:
        return _message(envelope) | choices[0] | {"usage": _usage(counts)}

    def chunk(self, envelope: Envelope, choice: Document, usage: Document) -> bytes:
        if choice["type"] == "message_start":
            told = {"input_tokens": self._num_prompt, "output_tokens": 0}
            message = _message(envelope) | {"content": [], **self._stop, "usage": told}
            choice = choice | {"message": message}
        return event(encoded(choice), choice["type"])

    def ending(
        self, envelope: Envelope, counts: TokenCounts | None, receipt: Document
    ) -> list[bytes]:
        assert counts is not None, "asked for by every stream"
        delta: Document = {"type": "message_delta", "delta": self._stop, "usage": _usage(counts)}
        return [event(encoded(each), each["type"]) for each in (delta, {"type": "message_stop"})]

    def fault(self, error: ApiError) -> bytes:
        return event(encoded(error.document(MESSAGES_PATH)), "error")


def _message(envelope: Envelope) -> Document:
    about = {"id": envelope.response_id, "model": envelope.model}
    return about | {"type": "message", "role": "assistant"}


def _tool_use(call_id: str, name: str, arguments: Document) -> Document:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def _usage(counts: TokenCounts) -> Document:
    return {
        "input_tokens": counts.prompt - counts.cached,
        "cache_read_input_tokens": counts.cached,
        "output_tokens": counts.completion,
    }


def _stop(completion: CompletionOutput, speech: Speech) -> Document:
    reason, sequence = "end_turn", None
    if completion.finish_reason is FinishReason.LENGTH:
        reason = "max_tokens"
    elif speech.num_called:
        reason = "tool_use"
    elif isinstance(completion.stop_reason, str):
        reason, sequence = "stop_sequence", completion.stop_reason
    return {"stop_reason": reason, "stop_sequence": sequence}
