"""Completion: one of a request's completions as its caller sees it: text, ids, how it ended."""

from collections.abc import Callable
from typing import TypeVar

from paceline.engine.answers.outputs import CompletionOutput
from paceline.engine.answers.token_logprobs import TokenLogprobs
from paceline.engine.answers.trace import Round, Trace
from paceline.engine.request import FinishReason, Request
from paceline.engine.scheduler import RequestUpdate
from paceline.text.detokenize import Detokenizer
from paceline.text.tokenizer import Tokenizer

T = TypeVar("T")


class Completion:
    """Owns the text of one completion.  Without a tokenizer the text stays empty."""

    def __init__(self, request: Request, *, tokenizer: Tokenizer | None) -> None:
        self.request = request
        self._token_ids: list[int] = []
        self._tokenizer = tokenizer
        self._logprobs: list[TokenLogprobs] = []
        self._is_drafted: list[bool] = []  # up to the last token of a round that took drafts
        self._rounds: list[Round] = []  # where a trace was asked for
        self._finish: FinishReason | None = None
        self._stop_reason: int | str | None = None
        # What `growth` has told:
        self._num_chars_told = 0
        self._num_tokens_told = 0
        self._num_rounds_told = 0
        self._is_end_told = False
        params = request.params
        self._detokenizer = (
            Detokenizer(
                tokenizer,
                request.prompt_ids,
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

        Returns the number of generated tokens to keep when a stop string ended the completion
        here, which the scheduler does not know yet; None otherwise.
        """
        if self._finish is not None:
            return None
        if update.num_drafted or update.logprobs or update.drafts is not None:
            self._note_round(update)
        self._token_ids += update.new_token_ids
        stop_tokens = None if self._detokenizer is None else self._find_stop(update)
        if stop_tokens is not None:
            return stop_tokens if update.finish is None else None
        if update.finish is not None:
            self.finish(update.finish)
            is_stopped = self._finish is FinishReason.STOP and not self.request.is_done
            if is_stopped and self._stop_reason is None:
                self._stop_reason = self._token_ids[-1]
        return None

    def finish(self, reason: FinishReason) -> None:
        """End the completion for its caller; held-back text is released."""
        if self._finish is not None:
            return
        self._finish = reason
        if self._detokenizer is not None and self._detokenizer.stop is None:
            self._detokenizer.flush()

    def snapshot(self) -> CompletionOutput:
        """The completion as it stands."""
        text = "" if self._detokenizer is None else self._detokenizer.text
        return self._output(CompletionOutput, text)

    @property
    def has_first_growth(self) -> bool:
        """Whether something has come, and nothing was told."""
        return self._num_tokens_told == 0 and self._has_growth

    def growth(self, make: Callable[..., T]) -> T | None:
        """What has come since the last call; None when nothing has.  Its cost is that of what it
        tells.  make: from the fields of a CompletionOutput, as that or in another form.
        """
        if not self._has_growth:
            return None
        num_chars, num_tokens = self._num_chars_told, self._num_tokens_told
        num_rounds = self._num_rounds_told
        text = "" if self._detokenizer is None else self._detokenizer.take()
        self._num_chars_told += len(text)
        self._num_tokens_told = len(self._token_ids)
        self._num_rounds_told = len(self._rounds)
        self._is_end_told = self._finish is not None
        return self._output(make, text, num_chars, num_tokens, num_rounds)

    @property
    def _has_growth(self) -> bool:
        has_come = self._num_tokens_told < len(self._token_ids) or self._finish is not None
        return has_come and not self._is_end_told

    def _output(
        self,
        make: Callable[..., T],
        text: str,
        num_chars: int = 0,
        num_tokens: int = 0,
        num_rounds: int = 0,
    ) -> T:
        """Behind so many tokens of so many rounds, whose text has so many characters; text: what
        followed."""
        is_scored = self.request.params.logprobs is not None
        return make(
            index=self.request.index,
            text=text,
            token_ids=tuple(self._token_ids[num_tokens:]),
            finish_reason=self._finish,
            stop_reason=self._stop_reason,
            logprobs=tuple(self._logprobs[num_tokens:]) if is_scored else None,
            error=self.request.error,
            is_drafted=self._drafted_behind(num_tokens),
            num_chars_before=num_chars,
            num_tokens_before=num_tokens,
            trace=self._trace(num_rounds) if self.request.params.trace_tokens else None,
        )

    def _drafted_behind(self, num_tokens: int) -> tuple[bool, ...]:
        """Of each token behind so many, whether a drafter proposed it."""
        noted = tuple(self._is_drafted[num_tokens:])
        return noted + (False,) * (len(self._token_ids) - num_tokens - len(noted))

    def _trace(self, num_rounds: int) -> Trace:
        """Behind so many rounds."""
        rounds = tuple(self._rounds[num_rounds:])
        return Trace(cached_tokens=self.request.num_cached, rounds=rounds)

    def _note_round(self, update: RequestUpdate) -> None:
        """What is known of new tokens beside their ids, before these are."""
        tokens = update.new_token_ids
        if update.drafts is not None and tokens and self.request.params.trace_tokens:
            self._rounds.append(Round.of(update.drafts, tokens, at=self.num_tokens))
        if update.num_drafted:
            self._is_drafted += (False,) * (self.num_tokens - len(self._is_drafted))
            self._is_drafted += (True,) * update.num_drafted
        if update.logprobs:
            wanted = self.request.params.logprobs or 0
            self._logprobs += [
                TokenLogprobs.of(token, row.best(wanted), self._tokenizer)
                for token, row in zip(tokens, update.logprobs, strict=True)
            ]

    def _find_stop(self, update: RequestUpdate) -> int | None:
        """Feed the detokeniser; the tokens to keep when it found a stop string."""
        assert self._detokenizer is not None, "the completion has text"
        tokens, finish = update.new_token_ids, update.finish
        if finish is None:
            found = self._detokenizer.feed(tokens)
        else:
            is_stopped = finish is FinishReason.STOP and not self.request.is_done
            if is_stopped and not self.request.params.include_stop_str_in_output:
                tokens = tokens[:-1]  # the token that stopped it is no part of the text
            self._detokenizer.feed(tokens)
            found = self._detokenizer.flush().stop
        if found is None:
            return None
        del self._token_ids[found.num_tokens :]
        del self._logprobs[found.num_tokens :]
        del self._is_drafted[found.num_tokens :]
        self._stop_reason = found.string
        self._finish = FinishReason.STOP
        return found.num_tokens
