"""Tracker: one request as its caller sees it: its completions, its prompt's scores, its times."""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from paceline.core.modes import End
from paceline.engine.acceptance import Acceptance
from paceline.engine.answers.completion import Completion
from paceline.engine.answers.outputs import RequestMetrics, RequestOutput
from paceline.engine.answers.receipt import ReceiptLog
from paceline.engine.answers.token_logprobs import TokenLogprobs
from paceline.engine.request import FinishReason, Request
from paceline.engine.scheduler import RequestUpdate
from paceline.text.tokenizer import Tokenizer

P = TypeVar("P")
W = TypeVar("W")


class Tracker:
    """Owns the completions of one request, and its times.

    requests: one per completion, in order; they share their prompt.  receipt: what is noted of
    them, where that was asked for.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        *,
        prompt: str | None,
        tokenizer: Tokenizer | None,
        receipt: ReceiptLog | None = None,
    ) -> None:
        self.request = requests[0]  # the first completion's; its id is the caller's
        generates = self.request.end is End.GENERATE
        reads = tokenizer if generates else None  # a completion that stays empty
        self._completions = [Completion(each, tokenizer=reads) for each in requests]
        self._prompt = prompt
        self._tokenizer = tokenizer
        self.receipt = receipt
        self._prompt_ids = self.request.prompt_ids
        # The first token has none, nor have those before the first that is scored.
        self._prompt_logprobs: list[TokenLogprobs | None] = [None] * (self.request.num_scored + 1)
        self._arrival_s = time.perf_counter()
        self._first_token_s: float | None = None
        self._last_token_s: float | None = None

    @property
    def requests(self) -> list[Request]:
        """One per completion."""
        return [each.request for each in self._completions]

    @property
    def is_finished(self) -> bool:
        return False not in [each.is_finished for each in self._completions]

    @property
    def num_tokens(self) -> int:
        """Generated tokens so far, of all completions."""
        return sum(each.num_tokens for each in self._completions)

    def apply(self, update: RequestUpdate) -> int | None:
        """Take in what a step brought to one completion; returns what `Completion.apply` does."""
        if update.new_token_ids:
            self._last_token_s = time.perf_counter()
            if self._first_token_s is None:
                self._first_token_s = self._last_token_s
        if update.prompt_logprobs:
            wanted = self.request.params.prompt_logprobs or 0
            scored = self._prompt_ids[len(self._prompt_logprobs) :]
            self._prompt_logprobs += [
                TokenLogprobs.of(token, row.best(wanted), self._tokenizer)
                for token, row in zip(scored, update.prompt_logprobs, strict=False)  # a chunk
            ]
        return self._completions[update.request.index].apply(update)

    def finish(self, reason: FinishReason) -> None:
        """End for the caller every completion that still runs."""
        for each in self._completions:
            each.finish(reason)

    def snapshot(self) -> RequestOutput:
        """The request as it stands."""
        outputs = [each.snapshot() for each in self._completions]
        return self._output(RequestOutput, outputs, is_first=True)

    def growth(self, piece: Callable[..., P], whole: Callable[..., W]) -> W:
        """What has come since the last call; unlike a snapshot, it costs what it tells.

        piece: makes what is told of a completion, from the fields of a CompletionOutput; whole: of
        the request, from those of a RequestOutput.
        """
        is_first = self._is_scored and any(each.has_first_growth for each in self._completions)
        grown = [each.growth(piece) for each in self._completions]
        return self._output(whole, [each for each in grown if each is not None], is_first=is_first)

    @property
    def _is_scored(self) -> bool:
        return self.request.params.prompt_logprobs is not None

    def _output(self, make: Callable[..., W], outputs: Sequence[P], *, is_first: bool) -> W:
        """is_first: with the scores of the prompt, where they were asked for."""
        is_whole = self.request.finish is FinishReason.LENGTH
        pooled = self.request.pooled if is_whole else None
        is_finished = self.is_finished
        return make(
            request_id=self.request.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_ids,
            outputs=tuple(outputs),
            finished=is_finished,
            metrics=self._metrics() if is_finished else None,
            prompt_logprobs=tuple(self._prompt_logprobs) if is_first and self._is_scored else None,
            pooled=None if pooled is None else pooled.vector().tobytes(),
        )

    def _acceptance(self) -> Acceptance:
        """Of all completions; only to be read."""
        if len(self._completions) == 1:
            return self.request.acceptance
        return Acceptance.total(each.request.acceptance for each in self._completions)

    def _metrics(self) -> RequestMetrics:
        return RequestMetrics.from_times(
            arrival_s=self._arrival_s,
            first_token_s=self._first_token_s,
            last_token_s=self._last_token_s,
            prompt_tokens=len(self._prompt_ids),
            cached_tokens=self.request.num_cached,
            output_tokens=self.num_tokens,
            preemptions=sum(each.request.num_preemptions for each in self._completions),
            acceptance=self._acceptance(),
            receipt=None if self.receipt is None else self.receipt.receipt(),
        )
