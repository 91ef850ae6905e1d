"""What a caller gets back: frozen snapshots of a request, and their JSON document."""

from dataclasses import asdict, dataclass
from typing import Any

from paceline.core.step import RowLogprobs
from paceline.engine.request import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One completion so far."""

    text: str  # everything released so far
    token_ids: tuple[int, ...]  # [num_output_tokens]
    finish_reason: FinishReason | None = None  # None = still running
    stop_reason: int | str | None = None  # the stop id or stop string that ended it
    logprobs: tuple[RowLogprobs, ...] | None = None  # [num_output_tokens] when asked for
    error: str | None = None  # why finish_reason is "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """One request's times and counts.  None where there was nothing to measure."""

    prompt_tokens: int
    cached_tokens: int  # prompt tokens whose KV a prefix hit supplied
    output_tokens: int
    preemptions: int
    ttft_s: float | None  # from arrival to the first token
    latency_s: float | None  # from arrival to the last token
    decode_tok_s: float | None  # (output_tokens - 1) / (latency_s - ttft_s)

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
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """One request's state, as the caller may see it.  When streaming, text and ids accumulate."""

    request_id: str
    prompt: str | None  # None when the prompt was given as token ids
    prompt_token_ids: tuple[int, ...]  # [num_prompt_tokens]
    outputs: tuple[CompletionOutput, ...]  # [1]
    finished: bool
    metrics: RequestMetrics | None  # None until finished

    def as_document(self) -> dict[str, Any]:
        """The JSON document {text, token_ids, finish_reason, metrics}; an error adds `error`."""
        completion = self.outputs[0]
        document: dict[str, Any] = {
            "text": completion.text,
            "token_ids": list(completion.token_ids),
            "finish_reason": completion.finish_reason,
            "metrics": None if self.metrics is None else asdict(self.metrics),
        }
        if completion.error is not None:
            document["error"] = completion.error
        return document
