"""Tracker: one request as its caller sees it: text, times, and how it ended."""

import time

from paceline.core.step import RowLogprobs
from paceline.engine.detokenize import Detokenizer
from paceline.engine.outputs import (
    CompletionOutput,
    RequestMetrics,
    RequestOutput,
)
from paceline.engine.request import FinishReason, Request
from paceline.engine.scheduler import RequestUpdate
from paceline.engine.tokenizer import Tokenizer


class Tracker:
    """Owns the text of one request.  Without a tokenizer the text stays empty."""

    def __init__(
        self, request: Request, *, prompt: str | None, tokenizer: Tokenizer | None
    ) -> None:
        self.request = request
        self._prompt = prompt
        self._prompt_ids = request.prompt_ids
        self._arrival_s = time.perf_counter()
        self._first_token_s: float | None = None
        self._last_token_s: float | None = None
        self._token_ids: list[int] = []
        self._logprobs: list[RowLogprobs] = []
        self._finish: FinishReason | None = None
        self._stop_reason: int | str | None = None
        params = request.params
        self._detokenizer = (
            Detokenizer(
                tokenizer,
                self._prompt_ids,
                stop=params.stop,
                include_stop=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
                min_tokens=params.min_tokens,
            )
            if tokenizer is not None
            else None
        )

    @property
    def is_finished(self) -> bool:
        return self._finish is not None

    @property
    def num_tokens(self) -> int:
        """Generated tokens so far."""
        return len(self._token_ids)

    def apply(self, update: RequestUpdate) -> int | None:
        """Take in new tokens.

        Returns the number of generated tokens to keep when a stop string ended the request here,
        which the scheduler does not know yet; None otherwise.
        """
        if self._finish is not None:
            return None
        self._note_tokens(update)
        stop_tokens = self._find_stop(update)
        if stop_tokens is not None:
            return stop_tokens if update.finish is None else None
        if update.finish is not None:
            self.finish(update.finish)
            if self._finish is FinishReason.STOP and self._stop_reason is None:
                self._stop_reason = self._token_ids[-1]
        return None

    def finish(self, reason: FinishReason) -> None:
        """End the request for its caller; held-back text is released."""
        if self._finish is not None:
            return
        self._finish = reason
        if self._detokenizer is not None and self._detokenizer.stop is None:
            self._detokenizer.flush()

    def snapshot(self) -> RequestOutput:
        """The request as it stands."""
        completion = CompletionOutput(
            text=self._detokenizer.text if self._detokenizer is not None else "",
            token_ids=tuple(self._token_ids),
            finish_reason=self._finish,
            stop_reason=self._stop_reason,
            logprobs=tuple(self._logprobs) if self.request.params.logprobs is not None else None,
            error=self.request.error,
        )
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_ids,
            outputs=(completion,),
            finished=self.is_finished,
            metrics=self._metrics() if self.is_finished else None,
        )

    def _note_tokens(self, update: RequestUpdate) -> None:
        if not update.new_token_ids:
            return
        self._last_token_s = time.perf_counter()
        if self._first_token_s is None:
            self._first_token_s = self._last_token_s
        self._token_ids.extend(update.new_token_ids)
        wanted = self.request.params.logprobs or 0
        for row in update.logprobs:
            self._logprobs.append(
                RowLogprobs(
                    chosen=row.chosen,
                    top_ids=row.top_ids[:wanted],
                    top_values=row.top_values[:wanted],
                )
            )

    def _find_stop(self, update: RequestUpdate) -> int | None:
        """Feed the detokeniser; the tokens to keep when it found a stop string."""
        if self._detokenizer is None:
            return None
        tokens = update.new_token_ids
        is_stop_token = update.finish is FinishReason.STOP
        if is_stop_token and not self.request.params.include_stop_str_in_output:
            tokens = tokens[:-1]  # the token that stopped it is no part of the text
        self._detokenizer.push(tokens)
        if update.finish is not None:
            self._detokenizer.flush()
        found = self._detokenizer.stop
        if found is None:
            return None
        del self._token_ids[found.num_tokens :]
        del self._logprobs[found.num_tokens :]
        self._stop_reason = found.string
        self._finish = FinishReason.STOP
        return found.num_tokens

    def _metrics(self) -> RequestMetrics:
        return RequestMetrics.from_times(
            arrival_s=self._arrival_s,
            first_token_s=self._first_token_s,
            last_token_s=self._last_token_s,
            prompt_tokens=len(self._prompt_ids),
            cached_tokens=self.request.num_cached,
            output_tokens=len(self._token_ids),
            preemptions=self.request.num_preemptions,
        )
