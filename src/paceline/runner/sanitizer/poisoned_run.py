"""One step's runs over poison: what is poisoned, what must come out, and what came out instead."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from paceline.attention.held import tensors_in
from paceline.cache.pool import KVPool
from paceline.core.errors import PacelineError
from paceline.core.modes import MaskKind
from paceline.core.step import Step
from paceline.runner.buffers import EXTENTS, Extent, PaddedSize, StepUse
from paceline.runner.program import Parts, StepProgram
from paceline.runner.sanitizer.dead_bytes import (
    backend_regions,
    feature_regions,
    overlay_regions,
    page_table_region,
    step_regions,
    table_regions,
)
from paceline.runner.sanitizer.dead_slots import DeadSlots, slot_uses
from paceline.runner.sanitizer.live_output import Output, live_output
from paceline.runner.sanitizer.live_rows import LiveRow, LiveRows, live_rows
from paceline.runner.sanitizer.poison import Region, same_numbers

OVERWRITES = "overwrites"  # how a finding begins that is about poison that is gone

# What code may raise of a wrong number that it reads.
_RAISED = (PacelineError, ArithmeticError, AssertionError, LookupError, RuntimeError, ValueError)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedStep:
    """A step that can be run again and again."""

    step: Step
    size: PaddedSize
    run: Callable[[], None]  # host plan and replay, or the eager functions
    program: StepProgram | None  # what `run` leaves beside the buffers, where it is known
    explain: Callable[[], None]  # the same functions, executed by Python


@dataclass(frozen=True, slots=True)
class _Group:
    """One cache group in the step that is checked."""

    name: str
    pool: KVPool
    page_table: Tensor  # [max_reqs, max_pages]  int32  of the step
    live: tuple[LiveRow, ...]
    padding_reach: int  # slots of page 0 that padded rows read


class PoisonedRuns:
    """A step that has run once, and can run again from where it began."""

    def __init__(self, parts: Parts, checked: CheckedStep, before: Mapping[str, Tensor]) -> None:
        """before: copies from before the first run."""
        self._parts = parts
        self._checked = checked
        self._before = before
        self._after = copies(parts)
        self._prompt_logprobs = checked.program.prompt_logprobs if checked.program else None
        self._live = live_rows(parts, checked.step, checked.size)
        self._groups = _groups(parts, self._live)
        self._slots = self._dead_slots()
        self._expected = self._output()
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
            now = self._output()
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
        for name, tensor in self._parts.named_tensors().items():
            tensor.copy_(held[name])

    def _output(self) -> dict[str, Output]:
        checked = self._checked
        return live_output(self._parts, checked.step, checked.program, self._live)

    def _dead_slots(self) -> list[DeadSlots]:
        """[num_groups]"""
        loads_dead = self._parts.backend.capabilities.loads_dead_slots  # the drafter's is like it
        return [
            DeadSlots(
                group.name,
                group.pool,
                slot_uses(
                    group.live,
                    group.page_table.cpu(),
                    shape=(group.pool.num_pages, group.pool.spec.page_size),
                    window=group.pool.spec.window,
                    padding_reach=group.padding_reach,
                ),
                loads_dead=loads_dead,
            )
            for group in self._groups
        ]

    def _regions(self) -> list[Region]:
        parts, step, live = self._parts, self._checked.step, self._live
        most = parts.max_emitted(is_round=step.is_round)
        use = StepUse(self._checked.size, step.mask is MaskKind.TREE, most, step.has_overlay)
        named, kept = parts.table.named_tensors(), parts.backend.kept_fields
        regions = step_regions(parts.buffers, use, step.layout)
        regions += backend_regions(tensors_in("backend", parts.backend_buffers), kept)
        regions += table_regions(named, step.layout, live.target)
        overlay = parts.table.overlay
        if overlay is not None:
            regions += overlay_regions(overlay, live.target, has_overlay=step.has_overlay)
        features, drafting = parts.proposer.request_state(), parts.proposer.named_tensors()
        for name, tensor in features.items():
            regions += feature_regions(name, tensor, live.draft, is_round=step.is_round)
        constants = {name for name, extent in EXTENTS.items() if extent is Extent.CONSTANT}
        own = {name: drafting[name] for name in drafting.keys() - features.keys()}
        regions += backend_regions(dict(sorted(own.items())), kept | constants)
        for index, (group, slots) in enumerate(zip(self._groups, self._slots, strict=True)):
            regions.append(
                page_table_region(
                    index,
                    parts.table.page_tables[index],
                    group.live,
                    page_size=group.pool.spec.page_size,
                    window=group.pool.spec.window,
                    dead_page=slots.dead_page,
                )
            )
            regions += slots.regions()
        return regions


def _groups(parts: Parts, live: LiveRows) -> list[_Group]:
    """The target's, then the drafter's."""
    tables, num = parts.buffers.page_tables, len(parts.pools)
    return [
        _Group(f"kv.{index}", pool, table, live.target, live.target_padding)
        if index < num
        else _Group(f"draft.kv.{index}", pool, table, live.draft, live.draft_padding)
        for index, (pool, table) in enumerate(zip(parts.all_pools, tables, strict=True))
    ]


def copies(parts: Parts) -> dict[str, Tensor]:
    """What all but weights and pools hold now, by name."""
    return {name: tensor.clone() for name, tensor in parts.named_tensors().items()}
