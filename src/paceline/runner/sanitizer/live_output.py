"""What a step leaves that the host or a later step will read: the sanitizer demands it twice."""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.modes import End
from paceline.core.step import Step
from paceline.runner.program import Parts, StepProgram
from paceline.runner.sanitizer.live_rows import LiveRow, LiveRows

# Rows of the request table, and [num_rows, ...] or a tensor of each.
Output = tuple[tuple[int, ...], Tensor | tuple[Tensor, ...]]


def live_output(
    parts: Parts, step: Step, program: StepProgram | None, live: LiveRows
) -> dict[str, Output]:
    """Copies of it by name, KV aside."""
    rows = step.layout.rows
    state = parts.table.named_tensors()["table.state"][list(rows)]
    seen: dict[str, Output] = {
        "the results": (rows, _results(parts, step)),
        "the table's state": (rows, state),
    }
    if not live.target:
        return seen
    seen["the tokens"] = _of(live.target), _history(parts, live.target)
    seen |= _computed(parts, step, program, live.target)
    if step.logprobs:
        seen |= _logprobs(parts, live.target, max_emitted=parts.max_emitted(is_round=step.is_round))
    observed = [row for row in live.draft if _is_observed(row, is_round=step.is_round)]
    for name, features in parts.proposer.request_state().items():
        index = list(_of(observed))
        seen[f"the rows of {name}"] = tuple(index), features[index]
    return seen


def _of(live: Sequence[LiveRow]) -> tuple[int, ...]:
    return tuple(row.row for row in live)


def _is_observed(row: LiveRow, *, is_round: bool) -> bool:
    """Whether the token behind its last one is known: what a drafter keeps depends on that."""
    return row.num_emitted > 0 if is_round else row.kept_len == row.kv_len


def _results(parts: Parts, step: Step) -> Tensor:
    """[num_reqs, 2 + max_emitted]  int32"""
    most = parts.max_emitted(is_round=step.is_round)
    return parts.buffers.results_of(step.layout.num_reqs, most).clone()


def _history(parts: Parts, live: Sequence[LiveRow]) -> Tensor:
    """[num_live, max_tokens]  int32, 0 behind the last token that is known."""
    token_ids = parts.table.token_ids
    ends = [[row.first_emitted + row.num_emitted] for row in live]
    columns = torch.arange(token_ids.shape[1], device=token_ids.device)
    known = columns < torch.tensor(ends, device=token_ids.device)
    return token_ids[list(_of(live))] * known


def _computed(
    parts: Parts, step: Step, program: StepProgram | None, live: Sequence[LiveRow]
) -> dict[str, Output]:
    """Drafts, and logits wherever a row is sampled."""
    index, rows = [row.index for row in live], _of(live)
    width = max(step.layout.extend_lens) if step.is_round else 1
    seen: dict[str, Output] = {}
    if step.is_round:
        tokens = parts.buffers.input_ids[: (index[-1] + 1) * width]
        seen["the drafts"] = rows, tokens.view(-1, width)[index]
    if program is not None and program.logits is not None:
        logits = program.logits
        seen["the logits"] = rows, logits.view(-1, width, logits.shape[1])[index]
    if End.POOL in step.ends:
        seen["the vectors"] = rows, parts.buffers.pooled[index]
    if program is not None and program.prompt_logprobs is not None:
        lengths = [span.length for span in step.prompt_spans]
        seen["the prompt's log-probabilities"] = (
            tuple(step.layout.rows[span.index] for span in step.prompt_spans),
            torch.split(program.prompt_logprobs.chosen, lengths),
        )
    return seen


def _logprobs(parts: Parts, live: Sequence[LiveRow], *, max_emitted: int) -> dict[str, Output]:
    """Of every token that was emitted.  max_emitted: rows of the buffers per request."""
    buffers = parts.buffers
    starts = [row.index * max_emitted for row in live]
    spans = [slice(at, at + row.num_emitted) for at, row in zip(starts, live, strict=True)]
    return {
        "the log-probabilities": (
            _of(live),
            tuple(buffers.chosen_logprobs[span].clone() for span in spans),
        ),
        "the likeliest tokens": (_of(live), tuple(buffers.top_ids[span].clone() for span in spans)),
    }
