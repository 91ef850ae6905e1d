"""What a caller gets back: frozen snapshots of a request and their JSON document, or growths, of
the same form: what came to it since the growth before.  A snapshot is all growths, joined.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.engine.acceptance import Acceptance
from paceline.engine.answers.receipt import Receipt
from paceline.engine.answers.token_logprobs import TokenLogprobs
from paceline.engine.answers.trace import Trace
from paceline.engine.request import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One completion so far; in a growth, what came to it since the growth before."""

    index: int = 0  # of the request's completions
    text: str  # everything released so far
    token_ids: tuple[int, ...]  # [num_output_tokens]
    finish_reason: FinishReason | None = None  # None = still running
    stop_reason: int | str | None = None  # the stop id or stop string that ended it
    logprobs: tuple[TokenLogprobs, ...] | None = None  # [num_output_tokens] when asked for
    error: str | None = None  # why finish_reason is "error"
    is_drafted: tuple[bool, ...] = ()  # [num_output_tokens] whether a drafter proposed the token
    num_chars_before: int = 0  # of its text, told by earlier growths
    num_tokens_before: int = 0  # told likewise; 0: a snapshot or a first growth
    trace: Trace | None = None  # where it was asked for

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the tokens' log-probabilities; None unless they were asked for."""
        return None if self.logprobs is None else math.fsum(row.chosen for row in self.logprobs)

    def as_document(self) -> dict[str, Any]:
        """{text, token_ids, finish_reason}; an error adds `error`, log-probabilities add `logprobs`
        and `cumulative_logprob`, and a trace `trace`, with `is_drafted` of each token.
        """
        document: dict[str, Any] = {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
        }
        if self.error is not None:
            document["error"] = self.error
        if self.logprobs is not None:
            document["logprobs"] = [row.as_document() for row in self.logprobs]
            document["cumulative_logprob"] = self.cumulative_logprob
        if self.trace is not None:
            is_drafted = list(self.is_drafted)
            document["trace"] = self.trace.as_document() | {"is_drafted": is_drafted}
        return document

    def then(self, later: "CompletionOutput") -> "CompletionOutput":
        """This growth and the one that followed as one."""
        logprobs = None if self.logprobs is None else self.logprobs + (later.logprobs or ())
        return replace(
            later,
            num_chars_before=self.num_chars_before,
            num_tokens_before=self.num_tokens_before,
            text=self.text + later.text,
            token_ids=self.token_ids + later.token_ids,
            logprobs=logprobs,
            is_drafted=self.is_drafted + later.is_drafted,
            trace=None if self.trace is None else self.trace.then(later.trace),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """One request's times and counts.  None where there was nothing to measure."""

    prompt_tokens: int
    cached_tokens: int  # prompt tokens whose KV a prefix hit supplied, of the first completion
    output_tokens: int
    preemptions: int
    ttft_s: float | None  # from arrival to the first token
    latency_s: float | None  # from arrival to the last token
    decode_tok_s: float | None  # (output_tokens - 1) / (latency_s - ttft_s)
    # Speculation, of all completions: rounds that verified drafts of theirs; 0 where none did.
    rounds: int = 0
    drafted_tokens: int = 0  # drafts verified
    forced_tokens: int = 0  # drafts accepted which a grammar left no choice about
    accepted_by_position: tuple[int, ...] = ()  # [num_steps] rounds that took i + 1 drafts
    tokens_per_round: float | None = None  # bonus tokens included, the first token (prefill's) not
    fallbacks: tuple[str, ...] = ()  # why steps waited for the host: HostNeed, "host_plan_sync"
    receipt: Receipt | None = None  # where the request asked for it

    @classmethod
    def from_times(
        cls,
        *,
        arrival_s: float,
        first_token_s: float | None,
        last_token_s: float | None,
        prompt_tokens: int,
        cached_tokens: int,
        output_tokens: int,
        preemptions: int,
        acceptance: Acceptance,
        receipt: Receipt | None = None,
    ) -> "RequestMetrics":
        """Metrics from readings of one clock."""
        decode_s = 0.0
        if first_token_s is not None and last_token_s is not None:
            decode_s = last_token_s - first_token_s
        return cls(
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            output_tokens=output_tokens,
            preemptions=preemptions,
            ttft_s=None if first_token_s is None else first_token_s - arrival_s,
            latency_s=None if last_token_s is None else last_token_s - arrival_s,
            decode_tok_s=(output_tokens - 1) / decode_s if decode_s > 0 else None,
            rounds=acceptance.rounds,
            drafted_tokens=acceptance.drafted,
            forced_tokens=acceptance.forced,
            accepted_by_position=tuple(acceptance.accepted),
            tokens_per_round=acceptance.mean_tokens_per_round,
            fallbacks=tuple(sorted(acceptance.fallbacks)),
            receipt=receipt,
        )

    def as_document(self) -> dict[str, Any]:
        """{field: value}; `receipt` where there is one."""
        document = asdict(self)
        if self.receipt is None:
            del document["receipt"]
        return document

    def receipt_document(self) -> dict[str, Any] | None:
        """The receipt and the counts that belong to it; None where it was not asked for."""
        if self.receipt is None:
            return None
        counted = ("cached_tokens", "preemptions", "rounds", "drafted_tokens", "forced_tokens")
        told = {name: getattr(self, name) for name in counted}
        lists = {name: list(getattr(self, name)) for name in ("accepted_by_position", "fallbacks")}
        found = asdict(self.receipt)
        return {**(found.pop("facts") or {}), **found, **told, **lists}

    @property
    def acceptance(self) -> Acceptance:
        """The same counts of rounds, to be added up over requests."""
        return Acceptance(
            rounds=self.rounds,
            drafted=self.drafted_tokens,
            forced=self.forced_tokens,
            accepted=list(self.accepted_by_position),
            fallbacks=set(self.fallbacks),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """One request's state, as the caller may see it.  When streaming, text and ids accumulate,
    unless the caller asked for growths.

    A prompt that was refused has one output, whose finish_reason is "error".
    """

    request_id: str
    prompt: str | None  # None when the prompt was given as token ids
    prompt_token_ids: tuple[int, ...]  # [num_prompt_tokens]
    outputs: tuple[CompletionOutput, ...]  # [n] by index; a growth's: of those that grew or ended
    finished: bool
    metrics: RequestMetrics | None  # of all completions together; None until finished
    # [num_prompt_tokens] when asked for; a growth's: beside a completion's first
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    pooled: bytes | None = (
        None  # [width] float32, of one that ends in a vector; None until finished
    )

    @classmethod
    def refused(cls, request_id: str, error: str) -> "RequestOutput":
        """What a caller who wants no exception gets for a wrong prompt."""
        failed = CompletionOutput(
            text="", token_ids=(), finish_reason=FinishReason.ERROR, error=error
        )
        return cls(
            request_id=request_id,
            prompt=None,
            prompt_token_ids=(),
            outputs=(failed,),
            finished=True,
            metrics=None,
        )

    def as_document(self) -> dict[str, Any]:
        """The JSON document {text, token_ids, finish_reason, metrics} of the first completion.

        An error adds `error`; several completions add `completions`, all of them; log-probabilities
        of the prompt add `prompt_logprobs`.
        """
        metrics = None if self.metrics is None else self.metrics.as_document()
        document = {**self.outputs[0].as_document(), "metrics": metrics}
        if len(self.outputs) > 1:
            document["completions"] = [each.as_document() for each in self.outputs]
        if self.prompt_logprobs is not None:
            document["prompt_logprobs"] = [
                None if row is None else row.as_document() for row in self.prompt_logprobs
            ]
        return document


def joined(growths: Sequence[RequestOutput]) -> RequestOutput:
    """Consecutive growths of one request, at least one, as one."""
    if len(growths) == 1:
        return growths[0]
    outputs: dict[int, CompletionOutput] = {}
    for growth in growths:
        for piece in growth.outputs:
            before = outputs.get(piece.index)
            outputs[piece.index] = piece if before is None else before.then(piece)
    scored = (growth.prompt_logprobs for growth in growths)
    return replace(
        growths[-1],
        outputs=tuple(outputs[index] for index in sorted(outputs)),
        prompt_logprobs=next((rows for rows in scored if rows is not None), None),
    )
