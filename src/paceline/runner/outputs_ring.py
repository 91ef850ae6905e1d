"""OutputsRing: pinned host memory that receives what a step produced, one slot per epoch."""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from paceline.core.sampling_params import MAX_LOGPROBS
from paceline.core.step import FinishCode, RowLogprobs, Step, StepOutputs, StepRun
from paceline.layers.sampling import SampledLogprobs
from paceline.runner.buffers import StepBuffers
from paceline.runner.staging import RING_DEPTH
from paceline.runner.streams import StreamEvent

_FINISH_CODES = tuple(FinishCode)  # by their value


@dataclass(frozen=True, slots=True, eq=False)
class OutputsSlot:
    """Host side of the results of one step; columns as in StepBuffers."""

    results: Tensor  # [max_reqs, 3]  int32  emitted, token id, FinishCode
    round_results: Tensor  # [max_reqs or 0, 2 + max_path]  int32  tokens emitted, FinishCode, ids
    chosen_logprobs: Tensor  # [max_reqs * max(max_path, 1)]  float32
    top_ids: Tensor  # [max_reqs * max(max_path, 1), MAX_LOGPROBS]  int64
    top_logprobs: Tensor  # [max_reqs * max(max_path, 1), MAX_LOGPROBS]  float32
    prompt: SampledLogprobs  # [max_tokens] and [max_tokens, MAX_LOGPROBS], filled densely in order

    @property
    def max_path(self) -> int:
        """Tokens a round emits at most, per request."""
        return self.round_results.shape[1] - 2

    def receive(
        self, buffers: StepBuffers, num_reqs: int, *, logprobs: bool, is_round: bool = False
    ) -> None:
        """Copy a step's results here; call on the step's stream, after its commit."""
        num_rows = num_reqs * self.max_path if is_round else num_reqs
        if is_round:
            source = buffers.round_results[:num_reqs]
            self.round_results[:num_reqs].copy_(source, non_blocking=True)
        else:
            self.results[:num_reqs].copy_(buffers.results[:num_reqs], non_blocking=True)
        if logprobs:
            self.chosen_logprobs[:num_rows].copy_(
                buffers.chosen_logprobs[:num_rows], non_blocking=True
            )
            self.top_ids[:num_rows].copy_(buffers.top_ids[:num_rows], non_blocking=True)
            self.top_logprobs[:num_rows].copy_(buffers.top_logprobs[:num_rows], non_blocking=True)

    def receive_prompt(self, found: SampledLogprobs | None) -> None:
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
        self,
        max_reqs: int,
        max_tokens: int,
        *,
        max_path: int = 0,
        pinned: bool,
        depth: int = RING_DEPTH,
    ) -> None:
        """max_path: tokens a round emits at most, per request; 0: nobody drafts."""
        emitted = max_reqs * max(max_path, 1)

        def host(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, pin_memory=pinned)

        self._slots = [
            OutputsSlot(
                results=host(max_reqs, 3, dtype=torch.int32),
                round_results=host(max_reqs if max_path else 0, 2 + max_path, dtype=torch.int32),
                chosen_logprobs=host(emitted, dtype=torch.float32),
                top_ids=host(emitted, MAX_LOGPROBS, dtype=torch.int64),
                top_logprobs=host(emitted, MAX_LOGPROBS, dtype=torch.float32),
                prompt=SampledLogprobs(
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
    run: StepRun
    _done: StreamEvent
    _slot: OutputsSlot

    def synchronize(self) -> None:
        """Block until the step has executed."""
        self._done.wait()

    def wait(self) -> StepOutputs:
        """Block until the step has executed; its outputs as host values."""
        self.synchronize()
        token_ids, finish = self._round_tokens() if self.step.is_round else self._tokens()
        return StepOutputs(
            epoch=self.step.epoch,
            token_ids=token_ids,
            finish=finish,
            logprobs=self._logprobs(token_ids) if self.step.logprobs else None,
            prompt_logprobs=self._prompt_logprobs() if self.step.prompt_spans else {},
        )

    def _tokens(self) -> tuple[tuple[tuple[int, ...], ...], tuple[FinishCode, ...]]:
        """[num_reqs] emitted tokens, one or none, and how each row stands."""
        rows = self._slot.results[: self.step.layout.num_reqs].tolist()
        token_ids = tuple([(token,) if emitted else () for emitted, token, _ in rows])
        return token_ids, tuple([_FINISH_CODES[code] for _, _, code in rows])

    def _round_tokens(self) -> tuple[tuple[tuple[int, ...], ...], tuple[FinishCode, ...]]:
        """The same of a round: as many tokens as it emitted."""
        rows = self._slot.round_results[: self.step.layout.num_reqs].tolist()
        token_ids = tuple(tuple(tokens[:emitted]) for emitted, _, *tokens in rows)
        return token_ids, tuple([_FINISH_CODES[row[1]] for row in rows])

    def _logprobs(
        self, token_ids: tuple[tuple[int, ...], ...]
    ) -> tuple[tuple[RowLogprobs, ...], ...]:
        """[num_reqs][num_emitted]; a round has max_path rows per request, another step one."""
        slot, stride = self._slot, self._slot.max_path if self.step.is_round else 1
        num_rows = len(token_ids) * stride
        rows = _rows(
            slot.chosen_logprobs[:num_rows], slot.top_ids[:num_rows], slot.top_logprobs[:num_rows]
        )
        return tuple(
            rows[index * stride : index * stride + len(tokens)]
            for index, tokens in enumerate(token_ids)
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
