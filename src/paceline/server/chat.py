"""/v1/chat/completions: messages through the model's chat template, answers as messages."""

from paceline.engine.outputs import CompletionOutput, RequestOutput
from paceline.engine.request import FinishReason
from paceline.server.answer import Document, Job, Writer
from paceline.server.logprobs import chat_logprobs
from paceline.server.reader import Reading
from paceline.server.service import Service
from paceline.server.token_names import TokenNames


def chat_job(service: Service, asked: Reading) -> Job:
    """What the engine is to do for a conversation."""
    return Job.of(asked, ChatWriter(service.names))


class ChatWriter(Writer):
    """Choices with a `message`, or with a `delta` in a stream."""

    id_prefix = "chatcmpl-"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, names: TokenNames) -> None:
        self._names = names

    def opening(self, index: int) -> list[Document]:
        return [_delta(index, {"role": "assistant", "content": ""})]

    def piece(
        self, index: int, growth: RequestOutput, completion: CompletionOutput
    ) -> list[Document]:
        logprobs = self._logprobs(completion) if completion.token_ids else None
        choices = []
        if completion.text or logprobs is not None:
            choices.append(_delta(index, {"content": completion.text}) | {"logprobs": logprobs})
        if completion.finish_reason is not None:
            choices.append(_delta(index, {}, completion.finish_reason))
        return choices

    def whole(self, index: int, growth: RequestOutput, completion: CompletionOutput) -> Document:
        return {
            "index": index,
            "message": {"role": "assistant", "content": completion.text, "refusal": None},
            "logprobs": self._logprobs(completion),
            "finish_reason": completion.finish_reason,
        }

    def _logprobs(self, completion: CompletionOutput) -> Document | None:
        if completion.logprobs is None:
            return None
        return chat_logprobs(self._names, completion.token_ids, completion.logprobs)


def _delta(index: int, delta: Document, finish_reason: FinishReason | None = None) -> Document:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
