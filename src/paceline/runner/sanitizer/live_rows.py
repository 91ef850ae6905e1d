"""The rows that a step computes for somebody: what each may read and write, and what of it lasts.

Worked example: a tree of 6 rows per request, whose drafter writes 9 slots at most; the row had 7
tokens committed and emitted 2.

                prefix_len  kv_len  kept_len  known_len  first_emitted  num_emitted
    target               7      13         9          8              8            2
    drafter              7      16         9          8              8            2
"""

from dataclasses import dataclass, replace

from paceline.core.padding import PAD_PREFIX_LEN, PAD_ROW
from paceline.core.step import Step
from paceline.runner.extents import PaddedSize
from paceline.runner.program import Parts


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRow:
    """One row of a step that is neither padded nor frozen, in the cache groups of one model."""

    index: int  # in the step
    row: int  # of the request table
    prefix_len: int
    kv_len: int  # the step writes the slots from prefix_len to here
    kept_len: int  # those behind hold drafts that were not accepted, or what nobody reads again
    known_len: int  # tokens of its history that the step may read before it emits
    first_emitted: int  # where in the history the first token that it emits stands
    num_emitted: int


@dataclass(frozen=True, slots=True)
class LiveRows:
    """The live rows of a step that has run once, in the order of the step."""

    target: tuple[LiveRow, ...]
    draft: tuple[LiveRow, ...]  # the same, in the drafter's cache groups; none: not observed
    target_padding: int  # slots of page 0 that padded rows read
    draft_padding: int


def live_rows(parts: Parts, step: Step, size: PaddedSize) -> LiveRows:
    """Read off the buffers which rows a step was for, and what they emitted."""
    buffers = parts.buffers
    num_sampled = size.max_extend_len if step.is_round else 1
    results = buffers.results_of(size.reqs, parts.max_emitted(is_round=step.is_round))
    facts = zip(
        buffers.row_ids[: size.reqs].tolist(),
        buffers.prefix_lens[: size.reqs].tolist(),
        buffers.kv_lens[: size.reqs].tolist(),
        results[:, 0].tolist(),
        strict=True,
    )
    target: list[LiveRow] = []
    padding = 0
    for index, (row, prefix_len, kv_len, num_emitted) in enumerate(facts):
        if row == PAD_ROW or index >= step.layout.num_reqs:
            padding = max(padding, kv_len)
            continue
        wants_token = step.layout.emits[index]
        first = kv_len - num_sampled  # committed, whatever is sampled
        follows = _is_followed(parts, step) and not wants_token
        target.append(
            LiveRow(
                index=index,
                row=row,
                prefix_len=prefix_len,
                kv_len=kv_len,
                kept_len=first + num_emitted if wants_token else kv_len,
                known_len=first + 1 + bool(step.prompt_spans or follows),
                first_emitted=first + 1,
                num_emitted=num_emitted,
            )
        )
    follow = target if _is_followed(parts, step) else []
    reach = parts.proposer.shape.reach if step.is_round else 0  # a round's passes go further
    draft = tuple(replace(row, kv_len=max(row.kv_len, row.prefix_len + reach)) for row in follow)
    draft_padding = max(padding, PAD_PREFIX_LEN + reach) if padding else 0
    return LiveRows(tuple(target), draft, padding, draft_padding)


def read_alone(row: LiveRow, num_rows: int) -> LiveRow:
    """The row in a cache group of which a step reads so many rows, and writes none."""
    return replace(row, prefix_len=num_rows, kv_len=num_rows, kept_len=num_rows)


def _is_followed(parts: Parts, step: Step) -> bool:
    return parts.proposer.observes and step.observed
