"""/v1/chat/completions: messages through the model's chat template, answers as messages."""

from paceline.engine.answers.outputs import CompletionOutput, RequestOutput
from paceline.engine.request import FinishReason
from paceline.server.answer import Document, Job, Writer
from paceline.server.bodies.reader import Reading
from paceline.server.logprobs import chat_logprobs
from paceline.server.service import Service
from paceline.server.token_names import TokenNames
from paceline.server.tokens.trace import Traces
from paceline.server.tools.forms import TEXT, Form
from paceline.server.tools.speech import Speech, delta_of, message_of

_CALLS = "tool_calls"  # why an answer with calls ended


def chat_job(service: Service, asked: Reading) -> Job:
    """What the engine is to do for a conversation."""
    return Job.of(asked, ChatWriter(service.names, asked.form))


class ChatWriter(Writer):
    """Choices with a `message`, or with a `delta` in a stream.  Owns what was read of each."""

    id_prefix = "chatcmpl-"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, names: TokenNames, form: Form = TEXT) -> None:
        self._names = names
        self._traces = Traces(names)
        self._form = form
        self._speeches: dict[int, Speech] = {}  # by index, of a stream

    def opening(self, index: int) -> list[Document]:
        return [_delta(index, {"role": "assistant", "content": ""})]

    def piece(
        self, index: int, growth: RequestOutput, completion: CompletionOutput
    ) -> list[Document]:
        logprobs = self._logprobs(completion) if completion.token_ids else None
        trace = self._traces.of(index, growth, completion) if completion.token_ids else {}
        deltas, finish = self._deltas(index, completion)
        if (logprobs is not None or trace) and not deltas:
            deltas = [{"content": ""}]
        choices = [_delta(index, delta) for delta in deltas]
        if choices:
            choices[0] |= {"logprobs": logprobs, **trace}
        if finish is not None:
            choices.append(_delta(index, {}, finish))
        return choices

    def whole(self, index: int, growth: RequestOutput, completion: CompletionOutput) -> Document:
        message: Document = {"content": completion.text}
        finish: str | None = completion.finish_reason
        if self._form.is_any:
            speech = Speech(self._form)
            message = message_of(speech.push(completion.text, is_end=True))
            finish = _finish(completion, speech)
        return {
            "index": index,
            "message": {"role": "assistant", **message, "refusal": None},
            "logprobs": self._logprobs(completion),
            "finish_reason": finish,
            **self._traces.of(index, growth, completion),
        }

    def _deltas(
        self, index: int, completion: CompletionOutput
    ) -> tuple[list[Document], str | None]:
        """What a piece adds to the message, and why it ends."""
        if not self._form.is_any:
            deltas = [{"content": completion.text}] if completion.text else []
            return deltas, completion.finish_reason
        if index not in self._speeches:
            self._speeches[index] = Speech(self._form)
        speech = self._speeches[index]
        is_end = completion.finish_reason is not None
        said = speech.push(completion.text, is_end=is_end)
        found = [delta for each in said if (delta := delta_of(each)) is not None]
        return found, _finish(completion, speech)

    def _logprobs(self, completion: CompletionOutput) -> Document | None:
        if completion.logprobs is None:
            return None
        return chat_logprobs(self._names, completion.token_ids, completion.logprobs)


def _finish(completion: CompletionOutput, speech: Speech) -> str | None:
    has_called = completion.finish_reason is FinishReason.STOP and speech.num_called
    return _CALLS if has_called else completion.finish_reason


def _delta(index: int, delta: Document, finish_reason: str | None = None) -> Document:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
