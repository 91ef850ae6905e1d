"""OutputsRing: pinned host memory that receives what a step produced, one slot per epoch."""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from paceline.core.sampling_params import MAX_LOGPROBS
from paceline.core.step import FinishCode, RowLogprobs, Step, StepOutputs
from paceline.layers.sampling import TokenLogprobs
from paceline.runner.buffers import StepBuffers
from paceline.runner.staging import RING_DEPTH
from paceline.runner.streams import Event


@dataclass(frozen=True, slots=True, eq=False)
class OutputsSlot:
    """Host side of the results of one step; columns as in StepBuffers."""

    results: Tensor  # [max_reqs, 3]  int32  emitted, token id, FinishCode
    chosen_logprobs: Tensor  # [max_reqs]  float32
    top_ids: Tensor  # [max_reqs, MAX_LOGPROBS]  int64
    top_logprobs: Tensor  # [max_reqs, MAX_LOGPROBS]  float32
    prompt: TokenLogprobs  # [max_tokens] and [max_tokens, MAX_LOGPROBS], filled densely in order

    def receive(self, buffers: StepBuffers, num_reqs: int, *, logprobs: bool) -> None:
        """Copy a step's results here; call on the step's stream, after its commit."""
        self.results[:num_reqs].copy_(buffers.results[:num_reqs], non_blocking=True)
        if logprobs:
            self.chosen_logprobs[:num_reqs].copy_(
                buffers.chosen_logprobs[:num_reqs], non_blocking=True
            )
            self.top_ids[:num_reqs].copy_(buffers.top_ids[:num_reqs], non_blocking=True)
            self.top_logprobs[:num_reqs].copy_(buffers.top_logprobs[:num_reqs], non_blocking=True)

    def receive_prompt(self, found: TokenLogprobs | None) -> None:
        """Copy the scores of a step's prompt tokens here; call on its stream, after forward."""
        assert found is not None, "forward runs before its scores are copied"
        count, width = found.top_ids.shape
        self.prompt.chosen[:count].copy_(found.chosen, non_blocking=True)
        for pinned, values in (
            (self.prompt.top_ids, found.top_ids),
            (self.prompt.top_values, found.top_values),
        ):
            # Packed as the result is: a copy into part of each row would not be asynchronous.
            pinned.view(-1)[: count * width].copy_(values.view(-1), non_blocking=True)


class OutputsRing:
    """Slots reused every `depth` epochs; the loop has read a slot long before that."""

    def __init__(
        self, max_reqs: int, max_tokens: int, *, pinned: bool, depth: int = RING_DEPTH
    ) -> None:
        def host(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, pin_memory=pinned)

        self._slots = [
            OutputsSlot(
                results=host(max_reqs, 3, dtype=torch.int32),
                chosen_logprobs=host(max_reqs, dtype=torch.float32),
                top_ids=host(max_reqs, MAX_LOGPROBS, dtype=torch.int64),
                top_logprobs=host(max_reqs, MAX_LOGPROBS, dtype=torch.float32),
                prompt=TokenLogprobs(
                    chosen=host(max_tokens, dtype=torch.float32),
                    top_ids=host(max_tokens, MAX_LOGPROBS, dtype=torch.int64),
                    top_values=host(max_tokens, MAX_LOGPROBS, dtype=torch.float32),
                ),
            )
            for _ in range(depth)
        ]

    def slot(self, epoch: int) -> OutputsSlot:
        """The slot of `epoch`."""
        return self._slots[epoch % len(self._slots)]


@dataclass(frozen=True, slots=True, eq=False)
class LaunchedStep:
    """A step whose work is queued; a value that the loop hands to its next turn."""

    step: Step
    _done: Event
    _slot: OutputsSlot

    def wait(self) -> StepOutputs:
        """Block until the step has executed; its outputs as host values."""
        self._done.wait()
        num_reqs = self.step.layout.num_reqs
        emitted, token_ids, finish = self._slot.results[:num_reqs].T.tolist()
        return StepOutputs(
            epoch=self.step.epoch,
            emitted=tuple(map(bool, emitted)),
            token_ids=tuple(token_ids),
            finish=tuple(map(FinishCode, finish)),
            logprobs=self._logprobs(num_reqs) if self.step.logprobs else None,
            prompt_logprobs=self._prompt_logprobs() if self.step.prompt_spans else {},
        )

    def _logprobs(self, num_reqs: int) -> tuple[RowLogprobs, ...]:
        slot = self._slot
        return _rows(
            slot.chosen_logprobs[:num_reqs], slot.top_ids[:num_reqs], slot.top_logprobs[:num_reqs]
        )

    def _prompt_logprobs(self) -> dict[int, tuple[RowLogprobs, ...]]:
        """Row of the step -> the scores of its span."""
        spans, prompt = self.step.prompt_spans, self._slot.prompt
        count, width = sum(span.length for span in spans), max(span.top for span in spans)
        rows = _rows(
            prompt.chosen[:count],
            prompt.top_ids.view(-1)[: count * width].view(count, width),
            prompt.top_values.view(-1)[: count * width].view(count, width),
        )
        ends = accumulate(span.length for span in spans)
        return {
            span.index: rows[end - span.length : end] for span, end in zip(spans, ends, strict=True)
        }


def _rows(chosen: Tensor, top_ids: Tensor, top_values: Tensor) -> tuple[RowLogprobs, ...]:
    """Host tensors [num_rows] and [num_rows, top] as values."""
    return tuple(
        RowLogprobs(chosen=row, top_ids=tuple(row_ids), top_values=tuple(row_values))
        for row, row_ids, row_values in zip(
            chosen.tolist(), top_ids.tolist(), top_values.tolist(), strict=True
        )
    )
