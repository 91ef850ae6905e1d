"""OutputsRing: pinned host memory that receives what a step produced, one slot per epoch."""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from paceline.core.draft_shape import NO_DRAFTS, DraftShape
from paceline.core.modes import End
from paceline.core.request.sampling_params import MAX_LOGPROBS
from paceline.core.step import FinishCode, RowDrafts, RowLogprobs, Step, StepOutputs, StepRun
from paceline.layers.sampling import SampledLogprobs
from paceline.runner.buffers import StepBuffers, packed_results
from paceline.runner.staging import RING_DEPTH
from paceline.runner.streams import StreamEvent

_FINISH_CODES = tuple(FinishCode)  # by their value


@dataclass(frozen=True, slots=True, eq=False)
class OutputsSlot:
    """Host side of the results of one step; columns as in StepBuffers."""

    results: Tensor  # [max_reqs * (2 + max_path)]  int32  tokens emitted, FinishCode, ids; packed
    state_lens: Tensor  # [max_reqs]  int32; zero-sized where there are no STATE groups
    chosen_logprobs: Tensor  # [max_reqs * max_path]  float32
    top_ids: Tensor  # [max_reqs * max_path, MAX_LOGPROBS]  int64
    top_logprobs: Tensor  # [max_reqs * max_path, MAX_LOGPROBS]  float32
    pooled: Tensor  # [max_reqs, pooled_width]  float32; zero-sized where no step pools
    prompt: SampledLogprobs  # [max_tokens] and [max_tokens, MAX_LOGPROBS], filled densely in order
    draft_ids: Tensor  # [max_reqs * tree rows]  int64  of a round, roots included
    draft_parents: Tensor  # [max_reqs * tree rows]  int32  zero-sized where drafts are chains

    def receive(
        self,
        buffers: StepBuffers,
        num_reqs: int,
        *,
        max_emitted: int,
        logprobs: bool,
        tree_rows: int = 0,
        pools: bool = False,
    ) -> None:
        """Copy a step's results here; call on the step's stream, after its commit.

        max_emitted: tokens that a row of the step emits at most.  tree_rows: of a round whose
        drafts are told, rows of each request.
        """
        if pools:
            self.pooled[:num_reqs].copy_(buffers.pooled[:num_reqs], non_blocking=True)
        if self.state_lens.numel():
            self.state_lens[:num_reqs].copy_(buffers.state_lens[:num_reqs], non_blocking=True)
        num_rows, size = num_reqs * max_emitted, num_reqs * (2 + max_emitted)
        self.results[:size].copy_(buffers.results[:size], non_blocking=True)
        if logprobs:
            self.chosen_logprobs[:num_rows].copy_(
                buffers.chosen_logprobs[:num_rows], non_blocking=True
            )
            self.top_ids[:num_rows].copy_(buffers.top_ids[:num_rows], non_blocking=True)
            self.top_logprobs[:num_rows].copy_(buffers.top_logprobs[:num_rows], non_blocking=True)
        if tree_rows:
            num_rows = num_reqs * tree_rows
            self.draft_ids[:num_rows].copy_(buffers.input_ids[:num_rows], non_blocking=True)
            if self.draft_parents.numel():
                self.draft_parents[:num_rows].copy_(buffers.parents[:num_rows], non_blocking=True)

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
        draft: DraftShape = NO_DRAFTS,
        keeps_states: bool = False,
        pooled_width: int = 0,
        pinned: bool,
        depth: int = RING_DEPTH,
    ) -> None:
        """draft: of rounds."""
        max_path = draft.max_path
        emitted = max_reqs * max_path
        tree_rows = max_reqs * draft.num_draft_tokens if draft.has_drafts else 0

        def host(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, pin_memory=pinned)

        self._slots = [
            OutputsSlot(
                results=host(max_reqs * (2 + max_path), dtype=torch.int32),
                state_lens=host(max_reqs if keeps_states else 0, dtype=torch.int32),
                chosen_logprobs=host(emitted, dtype=torch.float32),
                top_ids=host(emitted, MAX_LOGPROBS, dtype=torch.int64),
                top_logprobs=host(emitted, MAX_LOGPROBS, dtype=torch.float32),
                pooled=host(max_reqs if pooled_width else 0, pooled_width, dtype=torch.float32),
                prompt=SampledLogprobs(
                    chosen=host(max_tokens, dtype=torch.float32),
                    top_ids=host(max_tokens, MAX_LOGPROBS, dtype=torch.int64),
                    top_values=host(max_tokens, MAX_LOGPROBS, dtype=torch.float32),
                ),
                draft_ids=host(tree_rows, dtype=torch.int64),
                draft_parents=host(0 if draft.is_chain else tree_rows, dtype=torch.int32),
            )
            for _ in range(depth)
        ]

    def slot(self, epoch: int) -> OutputsSlot:
        return self._slots[epoch % len(self._slots)]


@dataclass(frozen=True, slots=True, eq=False)
class LaunchedStep:
    """A step whose work is queued; a value that the loop hands to its next turn."""

    step: Step
    run: StepRun
    _done: StreamEvent
    _slot: OutputsSlot
    _max_emitted: int  # tokens of a row

    def synchronize(self) -> None:
        """Block until the step has executed."""
        self._done.wait()

    def wait(self) -> StepOutputs:
        """Block until the step has executed; its outputs as host values."""
        self.synchronize()
        num_reqs = self.step.layout.num_reqs
        rows = packed_results(self._slot.results, num_reqs, self._max_emitted)
        # The loop waits here in every turn, as a rule for one token of each row, which all go on.
        emitted, codes, *tokens = rows.t().tolist()
        token_ids: tuple[tuple[int, ...], ...] = tuple(zip(*tokens, strict=True))
        if self._max_emitted > 1 or 0 in emitted:
            token_ids = tuple([row[:num] for row, num in zip(token_ids, emitted, strict=True)])
        finish = (FinishCode.RUNNING,) * num_reqs
        if any(codes):
            finish = tuple([_FINISH_CODES[code] for code in codes])
        return StepOutputs(
            epoch=self.step.epoch,
            token_ids=token_ids,
            finish=finish,
            logprobs=self._logprobs(token_ids) if self.step.logprobs else None,
            drafts=self._drafts() if self.step.tells_drafts else {},
            state_lens=self._state_lens(),
            prompt_logprobs=self._prompt_logprobs() if self.step.prompt_spans else {},
            pooled=self._pooled() if End.POOL in self.step.ends else None,
        )

    def _drafts(self) -> dict[int, RowDrafts]:
        """Of the rows that were asked of."""
        reqs, rows = self.step.layout.num_reqs, self.step.layout.extend_lens[0]
        tokens = self._slot.draft_ids[: reqs * rows].view(reqs, rows)
        parents = None
        if self._slot.draft_parents.numel():
            parents = self._slot.draft_parents[: reqs * rows].view(reqs, rows).tolist()
        return {
            row: RowDrafts.of(tokens[row].tolist(), parents and parents[row])
            for row in self.step.tells_drafts
        }

    def _pooled(self) -> tuple[bytes, ...]:
        """[num_reqs] of [pooled_width] float32"""
        rows = self._slot.pooled[: self.step.layout.num_reqs].numpy()
        return tuple(row.tobytes() for row in rows)

    def _state_lens(self) -> tuple[int, ...] | None:
        """[num_reqs]"""
        lens = self._slot.state_lens
        return tuple(lens[: self.step.layout.num_reqs].tolist()) if lens.numel() else None

    def _logprobs(
        self, token_ids: tuple[tuple[int, ...], ...]
    ) -> tuple[tuple[RowLogprobs, ...], ...]:
        """[num_reqs][num_emitted]"""
        slot, stride = self._slot, self._max_emitted
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
