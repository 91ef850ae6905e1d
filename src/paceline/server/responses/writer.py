"""ResponsesWriter: answers as responses, whole or as their events."""

import secrets
from collections.abc import Iterator, Sequence

from paceline.engine.answers.outputs import CompletionOutput, RequestOutput
from paceline.engine.request import FinishReason
from paceline.server.answer import Document, Envelope, TokenCounts, Writer, encoded
from paceline.server.errors import ApiError
from paceline.server.stream import event
from paceline.server.tools.feed import Kind
from paceline.server.tools.forms import Form
from paceline.server.tools.speech import Said, Speech
from paceline.text.tokenizer import Tokenizer

_CUT = {"reason": "max_output_tokens"}
_IDS = {Kind.CONTENT: "msg", Kind.REASONING: "rs", Kind.NAME: "fc"}
_PARTS = {Kind.CONTENT: "output_text", Kind.REASONING: "reasoning_text"}


class _Items:
    """The items of an output: the last is open until another begins."""

    def __init__(self) -> None:
        self.items: list[Document] = []
        self._kind: Kind | None = None
        self._is_broken = False  # the open one, a call

    def told(self, said: Sequence[Said]) -> Iterator[Document]:
        for piece in said:
            if piece.kind in (Kind.CALLED, Kind.BROKEN):
                self._is_broken = piece.kind is Kind.BROKEN
                continue
            if piece.kind is Kind.NAME or (
                piece.kind is not Kind.ARGUMENTS and piece.kind is not self._kind
            ):
                yield from self.closed()
                yield from self._opened(piece)
            if piece.kind is not Kind.NAME:
                yield self._grown(piece)

    def closed(self, *, is_cut: bool = False) -> Iterator[Document]:
        """End the open item; of a call that is none no arguments are told as done."""
        kind, self._kind = self._kind, None
        is_broken, self._is_broken = self._is_broken, False
        if kind is None:
            return
        item = self.items[-1]
        if is_broken:
            is_cut = True
        elif kind is Kind.NAME:
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("response.function_call_arguments.done", done)
        else:
            part = item["content"][0]
            yield self._event(
                f"response.{_PARTS[kind]}.done",
                _AT | {"text": part["text"]} | ({"logprobs": []} if kind is Kind.CONTENT else {}),
            )
            yield self._event("response.content_part.done", _AT | {"part": dict(part)})
        item["status"] = "incomplete" if is_cut else "completed"
        yield {
            "type": "response.output_item.done",
            "output_index": len(self.items) - 1,
            "item": item,
        }

    def _opened(self, piece: Said) -> Iterator[Document]:
        kind = self._kind = piece.kind
        item: Document = {"id": f"{_IDS[kind]}_{secrets.token_hex(12)}", "status": "in_progress"}
        if kind is Kind.NAME:
            item |= {
                "type": "function_call",
                "call_id": piece.call_id,
                "name": piece.text,
                "arguments": "",
            }
        elif kind is Kind.CONTENT:
            item |= {"type": "message", "role": "assistant", "content": []}
        else:
            item |= {"type": "reasoning", "summary": [], "content": []}
        self.items.append(item)
        index = len(self.items) - 1
        added = {key: list(v) if isinstance(v, list) else v for key, v in item.items()}
        yield {"type": "response.output_item.added", "output_index": index, "item": added}
        if kind is not Kind.NAME:
            part: Document = {"type": _PARTS[kind], "text": ""}
            part |= {"annotations": [], "logprobs": []} if kind is Kind.CONTENT else {}
            item["content"] = [part]
            yield self._event("response.content_part.added", _AT | {"part": dict(part)})

    def _grown(self, piece: Said) -> Document:
        item = self.items[-1]
        if piece.kind is Kind.ARGUMENTS:
            item["arguments"] += piece.text
            return self._event("response.function_call_arguments.delta", {"delta": piece.text})
        item["content"][0]["text"] += piece.text
        more: Document = {"logprobs": []} if piece.kind is Kind.CONTENT else {}
        name = f"response.{_PARTS[piece.kind]}.delta"
        return self._event(name, _AT | {"delta": piece.text} | more)

    def _event(self, name: str, more: Document) -> Document:
        index = len(self.items) - 1
        return {"type": name, "item_id": self.items[-1]["id"], "output_index": index} | more


_AT: Document = {"content_index": 0}


class ResponsesWriter(Writer):
    """Of one answer.  asked: what it repeats; tokenizer: counts those of reasoning."""

    id_prefix = "resp_"
    kind = chunk_kind = "response"

    def __init__(self, form: Form, asked: Document, tokenizer: Tokenizer) -> None:
        self._asked = asked
        self._tokenizer = tokenizer
        self._speech = Speech(form)
        self._items = _Items()
        self._finish: FinishReason | None = None
        self._num_events = 0

    def opening(self, index: int) -> list[Document]:
        return [{"type": "response.created"}, {"type": "response.in_progress"}]

    def piece(
        self, index: int, growth: RequestOutput, completion: CompletionOutput
    ) -> list[Document]:
        is_end = completion.finish_reason is not None
        told = list(self._items.told(self._speech.push(completion.text, is_end=is_end)))
        if is_end:
            self._finish = completion.finish_reason
            told += self._items.closed(is_cut=self._is_cut)
        return told

    def whole(self, index: int, growth: RequestOutput, completion: CompletionOutput) -> Document:
        said = self._speech.push(completion.text, is_end=True)
        self._finish = completion.finish_reason
        list(self._items.told(_mended(said)))
        list(self._items.closed(is_cut=self._is_cut))
        return {}

    def document(
        self, envelope: Envelope, choices: list[Document], counts: TokenCounts
    ) -> Document:
        return self._response(envelope, counts)

    def chunk(self, envelope: Envelope, choice: Document, usage: Document) -> bytes:
        if choice["type"] in ("response.created", "response.in_progress"):
            choice = choice | {"response": self._response(envelope, None)}
        return self._event(choice)

    def ending(
        self, envelope: Envelope, counts: TokenCounts | None, receipt: Document
    ) -> list[bytes]:
        response = self._response(envelope, counts)
        return [self._event({"type": f"response.{response['status']}", "response": response})]

    def fault(self, error: ApiError) -> bytes:
        about = {"code": error.code, "message": str(error), "param": error.param}
        return self._event({"type": "error", **about})

    def _event(self, document: Document) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return event(encoded(document | {"sequence_number": number}), document["type"])

    def _response(self, envelope: Envelope, counts: TokenCounts | None) -> Document:
        """counts: None while it goes on."""
        status = "in_progress" if counts is None else "incomplete" if self._is_cut else "completed"
        return self._asked | {
            "id": envelope.response_id,
            "object": "response",
            "created_at": envelope.created,
            "model": envelope.model,
            "status": status,
            "error": None,
            "incomplete_details": _CUT if self._is_cut else None,
            "output": [] if counts is None else self._items.items,
            "usage": None if counts is None else _usage(counts, self._num_reasoning()),
        }

    @property
    def _is_cut(self) -> bool:
        return self._finish is FinishReason.LENGTH

    def _num_reasoning(self) -> int:
        """Tokens of the text of what was reasoned."""
        thoughts = [item for item in self._items.items if item["type"] == "reasoning"]
        texts = [part["text"] for item in thoughts for part in item["content"]]
        return sum(len(self._tokenizer.encode(each, add_special_tokens=False)) for each in texts)


def _mended(said: Sequence[Said]) -> list[Said]:
    """What began as a call and is none is content."""
    found: list[Said] = []
    for piece in said:
        if piece.kind is Kind.BROKEN:
            found = [each for each in found if each.call != piece.call]
            piece = Said(Kind.CONTENT, piece.text)
        found.append(piece)
    return found


def _usage(counts: TokenCounts, num_reasoning: int) -> Document:
    return {
        "input_tokens": counts.prompt,
        "input_tokens_details": {"cached_tokens": counts.cached},
        "output_tokens": counts.completion,
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": counts.total,
    }
