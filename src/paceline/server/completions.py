"""/v1/completions: prompts as text or token ids, answers as text."""

from collections.abc import Sequence

from paceline.engine.answers.outputs import CompletionOutput, RequestOutput
from paceline.engine.answers.token_logprobs import TokenLogprobs
from paceline.server.answer import Document, Job, Writer
from paceline.server.bodies.reader import Reading
from paceline.server.logprobs import completion_logprobs, prompt_scores
from paceline.server.service import Service
from paceline.server.token_names import TokenNames
from paceline.server.tokens.trace import Traces


def completion_job(service: Service, asked: Reading) -> Job:
    """What the engine is to do for prompts."""
    echoed = [text for text in asked.echoed for _ in range(asked.params.n)]
    writer = CompletionWriter(service.names, echoed, tells_scores=asked.tells_scores)
    return Job.of(asked, writer)


class CompletionWriter(Writer):
    """Choices with `text`.  echoed: what comes before the answer of each choice, or nothing.
    tells_scores: of the prompt's tokens, in a field of their own."""

    id_prefix = "cmpl-"
    kind = chunk_kind = "text_completion"

    def __init__(
        self, names: TokenNames, echoed: Sequence[str], *, tells_scores: bool = False
    ) -> None:
        self._names = names
        self._traces = Traces(names)
        self._echoed = echoed
        self._tells_scores = tells_scores

    def opening(self, index: int) -> list[Document]:
        return []

    def piece(
        self, index: int, growth: RequestOutput, completion: CompletionOutput
    ) -> list[Document]:
        has_echo = completion.num_tokens_before == 0 and self._echo(index)
        is_told = completion.logprobs is not None or completion.trace is not None
        says = has_echo or completion.text or completion.finish_reason or is_told
        return [self.whole(index, growth, completion)] if says else []

    def whole(self, index: int, growth: RequestOutput, completion: CompletionOutput) -> Document:
        is_first = completion.num_tokens_before == 0
        document = {
            "index": index,
            "text": self._echo(index) + completion.text if is_first else completion.text,
            "logprobs": self._logprobs(index, growth, completion),
            "finish_reason": completion.finish_reason,
            **self._traces.of(index, growth, completion),
        }
        if self._tells_scores:
            document["prompt_logprobs"] = prompt_scores(self._names, growth.prompt_logprobs or ())
        return document

    def _echo(self, index: int) -> str:
        return self._echoed[index] if self._echoed else ""

    def _logprobs(
        self, index: int, growth: RequestOutput, completion: CompletionOutput
    ) -> Document | None:
        """Of the tokens of this piece, behind those of an echoed prompt in the first."""
        if completion.logprobs is None:
            return None
        tokens: Sequence[int] = completion.token_ids
        rows: Sequence[TokenLogprobs | None] = completion.logprobs
        offset = len(self._echo(index)) + completion.num_chars_before
        if completion.num_tokens_before == 0 and growth.prompt_logprobs is not None:
            tokens = [*growth.prompt_token_ids, *tokens]
            rows = [*growth.prompt_logprobs, *rows]
            offset = 0
        return completion_logprobs(self._names, tokens, rows, offset=offset)
