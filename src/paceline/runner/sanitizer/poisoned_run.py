"""One step's runs over poison: what is poisoned, what must come out, and what came out instead."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.attention.contract import AttentionBackend
from paceline.attention.held import tensors_in
from paceline.cache.pool import KVPool
from paceline.core.errors import PacelineError
from paceline.core.modes import End, MaskKind
from paceline.core.padding import PAD_PREFIX_LEN
from paceline.core.step import Step
from paceline.runner.extents import (
    EXTENTS,
    Extent,
    PaddedSize,
    StepUse,
)
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
from paceline.runner.sanitizer.dead_states import DeadStates
from paceline.runner.sanitizer.live_output import Output, live_output
from paceline.runner.sanitizer.live_rows import LiveRow, LiveRows, live_rows, read_alone
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
    index: int  # of the group
    pool: KVPool
    page_table: Tensor  # [max_reqs, max_pages]  int32  of the step
    live: tuple[LiveRow, ...]
    padding_reach: int  # slots of page 0 that padded rows read
    backend: AttentionBackend  # what runs its layers


class PoisonedRuns:
    """A step that has run once, and can run again from where it began."""

    def __init__(
        self,
        parts: Parts,
        checked: CheckedStep,
        named: Mapping[str, Tensor],
        before: Mapping[str, Tensor],
    ) -> None:
        """named: all but weights and pools, by name; before: copies from before the first run."""
        self._parts = parts
        self._checked = checked
        self._named = named
        self._before = before
        self._after = copies(named)
        self._prompt_logprobs = checked.program.prompt_logprobs if checked.program else None
        self._live = live_rows(parts, checked.step, checked.size)
        self._groups = _groups(parts, self._live)
        self._slots = self._dead_slots()
        self._states = self._dead_states()
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
        changed += [name for states in self._states for name in states.changed(tolerance)]
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
        torch._foreach_copy_(list(self._named.values()), [held[name] for name in self._named])

    def _output(self) -> dict[str, Output]:
        checked = self._checked
        return live_output(self._parts, checked.step, checked.program, self._live)

    def _dead_slots(self) -> list[DeadSlots]:
        """[num_groups]"""
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
                loads_dead=group.backend.capabilities.loads_dead_slots,
            )
            for group in self._groups
        ]

    def _dead_states(self) -> list[DeadStates]:
        """[num_state_groups]"""
        buffers = self._parts.buffers
        return [
            DeadStates(
                mixer,
                self._live.target,
                buffers.page_tables[mixer.group],
                buffers.state_lens,
                self._before,
            )
            for mixer in self._parts.mixers
        ]

    def _regions(self) -> list[Region]:
        parts, step, live = self._parts, self._checked.step, self._live
        most = parts.max_emitted(is_round=step.is_round)
        size, masks = self._checked.size, step.masks
        use = StepUse(
            size,
            has_tree=step.mask is MaskKind.TREE,
            max_emitted=most,
            num_sampled=0 if masks is None else size.sampled(is_round=step.is_round),
            num_masks=len(masks or ()),
            is_round=step.is_round,
            has_overlay=step.has_overlay,
            sees_ahead=step.mask is MaskKind.BLOCK,
            pools=End.POOL in step.ends,
        )
        named, proposer = parts.table.named_tensors(), parts.proposer
        regions = step_regions(parts.buffers, use, step.layout)
        of_target = tensors_in("backend", parts.backend_buffers)
        regions += backend_regions(of_target, parts.backend.kept_fields)
        if parts.encoder is not None:
            of_encoder = tensors_in("encoder", parts.encoder.backend_buffers)
            regions += backend_regions(of_encoder, parts.encoder.backend.kept_fields)
        regions += table_regions(named, step.layout, live.target)
        overlay = parts.table.overlay
        if overlay is not None:
            regions += overlay_regions(overlay, live.target, has_overlay=step.has_overlay)
        features, drafting = proposer.request_state(), proposer.named_tensors()
        for name, tensor in features.items():
            regions += feature_regions(name, tensor, live.draft, is_round=step.is_round)
        kept = frozenset(name for name, extent in EXTENTS.items() if extent is Extent.CONSTANT)
        if proposer.backend is not None:
            kept |= proposer.backend.kept_fields
        own = {name: drafting[name] for name in drafting.keys() - features.keys()}
        regions += backend_regions(dict(sorted(own.items())), kept)
        for mixer, states in zip(parts.mixers, self._states, strict=True):
            name, rows = mixer.pool.spec.name, {row.row for row in live.target}
            regions += backend_regions(tensors_in(name, mixer.buffers), mixer.backend.kept_fields)
            table = parts.table.page_tables[mixer.group]
            regions.append(states.table_region(mixer.group, table, rows))
            regions += states.regions()
        for group, slots in zip(self._groups, self._slots, strict=True):
            regions.append(
                page_table_region(
                    group.index,
                    parts.table.page_tables[group.index],
                    group.live,
                    page_size=group.pool.spec.page_size,
                    window=group.pool.spec.window,
                    dead_page=slots.dead_page,
                )
            )
            regions += slots.regions()
        return regions


def _groups(parts: Parts, live: LiveRows) -> list[_Group]:
    """The target's, then the drafter's, then those of encoders."""
    tables, num = parts.buffers.page_tables, len(parts.pools)
    unlike = {mixer.group for mixer in parts.mixers} | set(parts.buffers.encoder_groups)
    paged = [(index, table) for index, table in enumerate(tables) if index not in unlike]
    own, drafts = parts.backend, parts.proposer.backend or parts.backend
    of_tokens = [
        _Group(f"kv.{index}", index, pool, table, live.target, live.target_padding, own)
        if index < num
        else _Group(f"draft.kv.{index}", index, pool, table, live.draft, live.draft_padding, drafts)
        for pool, (index, table) in zip(parts.all_pools, paged, strict=True)
    ]
    if parts.encoder is None:
        return of_tokens
    lens = parts.buffers.encoder_lens.tolist()
    read = tuple([read_alone(row, lens[row.index]) for row in live.target])
    padding, reads = PAD_PREFIX_LEN if live.target_padding else 0, parts.encoder.backend
    return of_tokens + [
        _Group(f"encoder.kv.{index}", index, pool, tables[index], read, padding, reads)
        for index, pool in zip(parts.encoder.groups, parts.encoder.pools, strict=True)
    ]


def copies(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What they hold now."""
    return {name: tensor.clone() for name, tensor in named.items()}


def restored(parts: Parts) -> dict[str, Tensor]:
    """All but weights and pages, by name: what a step may read and write over.  A slot of KV is
    written once, one of states again and again."""
    states = [mixer.pool.named_tensors() for mixer in parts.mixers]
    return parts.named_tensors() | {n: t for pool in states for n, t in pool.items()}
