"""One step's runs over poison: what is poisoned, what must come out, and what came out instead."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.attention.held import tensors_in
from paceline.core.errors import PacelineError
from paceline.core.padding import PAD_ROW
from paceline.core.step import Step
from paceline.runner.buffers import PaddedSize
from paceline.runner.dead_bytes import (
    Extent,
    backend_regions,
    page_table_region,
    step_regions,
    table_regions,
)
from paceline.runner.dead_slots import DeadSlots, LiveRow, slot_uses
from paceline.runner.poison import Region, same_numbers
from paceline.runner.program import Parts, StepProgram
from paceline.runner.round_program import RoundProgram

Program = StepProgram | RoundProgram
OVERWRITES = "overwrites"  # how a finding begins that is about poison that is gone
# Rows of the request table, and [num_rows, ...] or a tensor of each.
Output = tuple[tuple[int, ...], Tensor | tuple[Tensor, ...]]

# What code may raise of a wrong number that it reads.
_RAISED = (PacelineError, ArithmeticError, AssertionError, LookupError, RuntimeError, ValueError)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedStep:
    """A step that can be run again and again."""

    step: Step
    size: PaddedSize
    run: Callable[[], None]  # host plan and replay, or the eager functions
    program: Program | None  # what `run` leaves beside the buffers, where it is known
    explain: Callable[[], None]  # the same functions, executed by Python


class PoisonedRuns:
    """A step that has run once, and can run again from where it began."""

    def __init__(self, parts: Parts, checked: CheckedStep, before: Mapping[str, Tensor]) -> None:
        """before: copies of `small_tensors` from before the first run."""
        self._parts = parts
        self._checked = checked
        self._before = before
        self._after = copies(parts)
        self._prompt_logprobs = checked.program.prompt_logprobs if checked.program else None
        self._live, padding_reach = _live_rows(parts, checked)
        self._slots = self._dead_slots(padding_reach)
        self._expected = self._observe()
        self.regions = self._regions()

    def findings(self, regions: Sequence[Region], *, tolerance: float = 0.0) -> list[str]:
        """What another run does differently when it begins over the poison of `regions`.

        tolerance: relative to the largest number of an output; 0: every bit must be the same.
        """
        self._load(self._before)
        for slots in self._slots:
            slots.restore()
        for region in regions:
            region.write()
        try:
            self._checked.run()
            written = [r.name for r in regions if r.is_foreign and not r.is_intact()]
            found = [f"{OVERWRITES} {name}" for name in written]
            now = self._observe()
        except _RAISED as error:
            return [f"raises {type(error).__name__}: {error}"]
        for name, (rows, expected) in self._expected.items():
            pairs = zip(rows, expected, now[name][1], strict=True)
            differing = [row for row, was, is_ in pairs if not same_numbers(was, is_, tolerance)]
            if differing:
                found.append(f"changes {name} of rows {', '.join(map(str, differing))}")
        changed = [name for slots in self._slots for name in slots.changed(tolerance)]
        return found + ([f"changes {' and '.join(changed)}"] if changed else [])

    def finish(self) -> None:
        """Leave everything as the first run left it."""
        self._load(self._after)
        if self._checked.program is not None:
            self._checked.program.prompt_logprobs = self._prompt_logprobs
        for slots in self._slots:
            slots.restore()

    def rewind(self) -> None:
        """Leave everything as it was before the first run; the slots it wrote are written."""
        self.findings(())
        self._load(self._before)

    def _load(self, held: Mapping[str, Tensor]) -> None:
        for name, tensor in small_tensors(self._parts).items():
            tensor.copy_(held[name])

    def _observe(self) -> dict[str, Output]:
        """The live output of a run: what the host or a later step will read."""
        parts, step = self._parts, self._checked.step
        buffers, table, rows = parts.buffers, parts.table, step.layout.rows
        results = buffers.results[: len(rows)].clone()
        results[:, 1] *= results[:, 0]  # a token that is not emitted means nothing
        state = table.named_tensors()["table.state"][list(rows)]
        seen: dict[str, Output] = {
            "the results": (rows, results),
            "the table's state": (rows, state),
        }
        if not self._live:
            return seen
        index = [row.index for row in self._live]
        live = tuple(row.row for row in self._live)
        device = results.device
        lens = torch.tensor([[row.kv_len] for row in self._live], device=device)
        columns = torch.arange(table.token_ids.shape[1], device=device)
        known = columns < lens + results[index, :1]
        seen["the tokens"] = live, table.token_ids[list(live)] * known
        program = self._checked.program
        if program is not None and program.logits is not None:
            seen["the logits"] = live, program.logits[index]
        if program is not None and program.prompt_logprobs is not None:
            lengths = [span.length for span in step.prompt_spans]
            seen["the prompt's log-probabilities"] = (
                tuple(rows[span.index] for span in step.prompt_spans),
                torch.split(program.prompt_logprobs.chosen, lengths),
            )
        if step.logprobs:
            seen["the log-probabilities"] = live, buffers.chosen_logprobs[index].unsqueeze(1)
            seen["the likeliest tokens"] = live, buffers.top_ids[index]
        return seen

    def _dead_slots(self, padding_reach: int) -> list[DeadSlots]:
        """[num_groups]"""
        made = []
        for group, table in enumerate(self._parts.buffers.page_tables):
            layers = [layer for layer in self._parts.layers if layer.spec.group == group]
            shape = layers[0].k_cache.shape
            uses = slot_uses(
                self._live,
                table.cpu(),
                shape=(shape[0], shape[1]),
                window=layers[0].spec.window,
                padding_reach=padding_reach,
            )
            loads_dead = self._parts.backend.capabilities.loads_dead_slots
            made.append(DeadSlots(f"kv.{group}", layers, uses, loads_dead=loads_dead))
        return made

    def _regions(self) -> list[Region]:
        parts, checked = self._parts, self._checked
        layout = checked.step.layout
        named = parts.table.named_tensors()
        regions = step_regions(parts.buffers.named_tensors(), Extent(layout, checked.size))
        regions += backend_regions(
            tensors_in("backend", parts.backend_buffers), parts.backend.kept_fields
        )
        regions += table_regions(
            named,
            layout,
            self._live,
            known_behind=1 if checked.step.prompt_spans else 0,
        )
        for group, slots in enumerate(self._slots):
            regions.append(
                page_table_region(
                    group,
                    parts.table.page_tables[group],
                    self._live,
                    page_size=parts.page_sizes[group],
                    window=next(x.spec.window for x in parts.layers if x.spec.group == group),
                    dead_page=slots.dead_page,
                )
            )
            regions += slots.regions()
        return regions


def small_tensors(parts: Parts) -> dict[str, Tensor]:
    """Table, step and backend buffers by name: all that a run changes but the pools."""
    return {
        **parts.table.named_tensors(),
        **parts.buffers.named_tensors(),
        **tensors_in("backend", parts.backend_buffers),
    }


def copies(parts: Parts) -> dict[str, Tensor]:
    """What `small_tensors` hold now."""
    return {name: tensor.clone() for name, tensor in small_tensors(parts).items()}


def _live_rows(parts: Parts, checked: CheckedStep) -> tuple[list[LiveRow], int]:
    """The rows that a step computes for somebody, and how many slots its other rows read."""
    buffers, reqs = parts.buffers, checked.size.reqs
    facts = zip(
        buffers.row_ids[:reqs].tolist(),
        buffers.prefix_lens[:reqs].tolist(),
        buffers.kv_lens[:reqs].tolist(),
        strict=True,
    )
    live, reach = [], 0
    for index, (row, prefix_len, kv_len) in enumerate(facts):
        if row == PAD_ROW or index >= checked.step.layout.num_reqs:
            reach = max(reach, kv_len)
        else:
            live.append(LiveRow(index, row, prefix_len, kv_len))
    return live, reach
