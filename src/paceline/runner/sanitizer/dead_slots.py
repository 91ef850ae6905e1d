"""Which slots of the KV pools a step may read, and the others as regions to poison.

Worked example: page size 4, one row with prefix 5 and extend 2 in pages [7, 2], of which 1 is kept
(a round rejected a draft), and a padded row that reads 2 slots:

    page 7   LIVE LIVE LIVE LIVE
    page 2   LIVE WRITTEN REJECTED BEHIND_END
    page 0   PADDING PADDING PAGE_0 PAGE_0
    others   OTHER
"""

import math
from collections.abc import Iterable
from enum import IntEnum

import torch
from torch import Tensor

from paceline.cache.pool import KVPool
from paceline.core.model.lookback import Lookback, first_visible
from paceline.core.padding import PAD_PAGE
from paceline.runner.sanitizer.live_rows import LiveRow
from paceline.runner.sanitizer.poison import (
    LARGE,
    Poisoned,
    Region,
    bits_of,
    float_bits,
    same_numbers,
)

_POISONED_BYTES = 256 << 20  # of one group's pages; the pools of a GPU are much larger


class SlotUse(IntEnum):
    """What one slot is to a step."""

    LIVE = 0  # read
    WRITTEN = 1  # read once the step has written it
    REJECTED = 2  # the same, by drafts that were not accepted: what it holds then means nothing
    PADDING = 3  # of page 0: read and written by padded rows
    PAGE_0 = 4  # the rest of page 0
    BEHIND_END = 5  # of a page in the table, behind kv_len
    BEHIND_WINDOW = 6  # before the first key that any row of the step can see
    OTHER = 7  # pages of requests that are not in the step, and free ones


_NAMES = {
    SlotUse.WRITTEN: "slots this step writes, before it does",
    SlotUse.REJECTED: "slots of rejected drafts, before this step writes them",
    SlotUse.PADDING: "page 0, as padded rows read it",
    SlotUse.PAGE_0: "page 0",
    SlotUse.BEHIND_END: "slots behind kv_len",
    SlotUse.BEHIND_WINDOW: "slots behind the window",
    SlotUse.OTHER: "free pages and those of other requests",
}
_MASK = (
    "mask keys by length and window before they enter the product, or state "
    "capabilities.loads_dead_slots where masked slots are multiplied by 0"
)
_WRITE_FIRST = "write a step's K and V before attending to them"
_REMEDIES = {
    SlotUse.WRITTEN: _WRITE_FIRST,
    SlotUse.REJECTED: _WRITE_FIRST,
    SlotUse.PADDING: "let no row depend on another one, and none on the reserved page",
}


def held_bytes(groups: int) -> int:
    """At most, however large the pools are, of so many groups with pages: what the chosen ones
    held, and of a layer of one of them what is put there or compared."""
    return (groups + 2) * _POISONED_BYTES


def slot_uses(
    live: Iterable[LiveRow],
    page_table: Tensor,
    *,
    shape: tuple[int, int],
    window: Lookback | None,
    padding_reach: int,
) -> Tensor:
    """[num_pages, page_size] uint8 SlotUse, on the CPU.

    page_table: [padded_reqs, max_pages] int32, on the CPU; shape: pages and page size;
    padding_reach: slots of page 0 that padded rows read.
    """
    page_size = shape[1]
    uses = torch.full(shape, SlotUse.OTHER, dtype=torch.uint8).view(-1)
    spans: list[tuple[Tensor, LiveRow, int]] = []
    for row in live:
        slots = page_table[row.index].long().unsqueeze(1) * page_size + torch.arange(page_size)
        low = first_visible(window, row.prefix_len)
        spans.append((slots.flatten(), row, low))
    # What one row may read wins over what another has behind its end: prefix pages are shared.
    for slots, row, low in spans:
        uses[slots[row.kv_len :]] = SlotUse.BEHIND_END
        uses[slots[:low]] = SlotUse.BEHIND_WINDOW
    for slots, row, low in spans:
        uses[slots[low : row.prefix_len]] = SlotUse.LIVE
    for slots, row, _ in spans:
        uses[slots[row.prefix_len : row.kv_len]] = SlotUse.REJECTED
        uses[slots[row.prefix_len : row.kept_len]] = SlotUse.WRITTEN
    uses[:page_size] = SlotUse.PAGE_0
    uses[: min(padding_reach, page_size)] = SlotUse.PADDING
    return uses.view(shape)


def chosen_pages(uses: Tensor, count: int) -> Tensor:
    """[<= count] page ids to poison: those in use, page 0, their neighbours, then others."""
    in_use = (uses != SlotUse.OTHER).any(1)
    is_dead = (uses != SlotUse.LIVE).any(1)
    beside = in_use.roll(1) | in_use.roll(-1)
    order = torch.where(in_use, 0, torch.where(beside, 1, 2))
    pages: Tensor = torch.argsort(order, stable=True)
    return pages[is_dead[pages]][:count].sort().values


class DeadSlots:
    """One cache group's dead slots in a step, with what they held."""

    def __init__(self, name: str, pool: KVPool, uses: Tensor, *, loads_dead: bool) -> None:
        self._name = name
        self._parts = tuple(pool.parts)
        self._sides = [
            (f"{part}.{layer_id}", cache)
            for part, layers in pool.parts.items()
            for layer_id, cache in zip(pool.spec.layer_ids, layers, strict=True)
        ]
        self._loads_dead = loads_dead
        page_bytes = sum(cache[0].nbytes for _, cache in self._sides)
        pages = chosen_pages(uses, max(1, _POISONED_BYTES // page_bytes))
        device = self._sides[0][1].device
        self._pages = pages.to(device)
        self._uses = uses[pages].to(device)
        self._saved = [bits_of(cache)[self._pages] for _, cache in self._sides]
        is_dead = (uses[pages] >= SlotUse.BEHIND_END).all(1)
        self.dead_page = int(pages[is_dead][0]) if is_dead.any() else PAD_PAGE

    def restore(self) -> None:
        """Put back what the chosen pages held."""
        for (_, cache), saved in zip(self._sides, self._saved, strict=True):
            bits_of(cache)[self._pages] = saved

    def changed(self, tolerance: float) -> list[str]:
        """Which layers' written slots differ from what they held.

        A layer that writes nothing (a prefix alone is asked for) leaves the poison: no difference.
        tolerance: as `same_numbers`.
        """
        found = []
        is_written = self._uses == SlotUse.WRITTEN
        for (name, cache), saved in zip(self._sides, self._saved, strict=True):
            now = cache[self._pages][is_written]
            before = saved[is_written].view(cache.dtype)
            is_left = bool((bits_of(now) == self._poison(name, cache, SlotUse.WRITTEN)).all())
            if not is_left and not same_numbers(before, now, tolerance):
                found.append(f"{self._name}.{name}")
        return found

    def regions(self) -> list[Region]:
        """What to poison, by use and part."""
        return [
            self._region(use, part)
            for use in SlotUse
            if use is not SlotUse.LIVE and bool((self._uses == use).any())
            for part in self._parts
        ]

    def _region(self, use: SlotUse, part: str) -> Region:
        dead = (self._uses == use).unsqueeze(2).unsqueeze(3)
        pieces = tuple(
            Poisoned(
                tensor=cache, index=self._pages, dead=dead, poison=self._poison(part, cache, use)
            )
            for name, cache in self._sides
            if name.startswith(f"{part}.")
        )
        return Region(
            name=f"{self._name}.{part}: {_NAMES[use]}",
            pieces=pieces,
            remedy=_REMEDIES.get(use, _MASK),
            is_foreign=use >= SlotUse.PAGE_0,
            is_padding=use is SlotUse.PADDING,
        )

    def _poison(self, name: str, cache: Tensor, use: SlotUse) -> Tensor:
        """[] bits.  What is multiplied by 0 must be finite: keys of 0, values that show."""
        if use is SlotUse.PADDING or self._loads_dead:
            return float_bits(0.0 if name.startswith("k") else LARGE, cache)
        return float_bits(math.nan, cache)
