"""Restorer: computes again what the cache held when a row was entered, into the same pages.

A record has the tokens, not the KV: that is made of them, chunk by chunk, as a prompt's is.  What
recorded steps write stays as they write it: no page or slot is computed twice, nor behind a step
that it was given to.

Pages that no later token sees, behind every window, may be another request's by then.  Their tokens
are computed all the same, since those behind are made of them, but into pages of nobody.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from paceline.core.errors import ConfigError
from paceline.core.model.cache_groups import READ, WRITE, CacheGroupSpec
from paceline.core.model.config import CacheKind
from paceline.core.model.lookback import first_visible, most_visible
from paceline.core.modes import End, MaskKind
from paceline.core.padding import PAD_PAGE
from paceline.core.request.sampling_params import SamplerTier, SamplingParams
from paceline.core.step import Delta, JoinDelta, PageDelta, Step, StepLayout
from paceline.llm.box.table_rows import TableRow

_PARAMS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True, seed=0)


def spare_pages(groups: Sequence[CacheGroupSpec], chunk: int) -> tuple[int, ...]:
    """[num_groups] pages of nobody: as many as a chunk of so many tokens sees in a window."""
    return tuple(
        0 if most is None else -(-(most + chunk) // group.page_size) + 1
        for group in groups
        for most in (most_visible(group.window),)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreSpace:
    """Where a Restorer computes."""

    groups: Sequence[CacheGroupSpec]
    chunk: int  # tokens of one step
    spare: tuple[range, ...]  # [num_groups] pages of nobody


class Restorer:
    """Owns the knowledge of which pages and slots hold what they shall."""

    def __init__(self, room: RestoreSpace, ends: frozenset[End]) -> None:
        """ends: of steps whose outputs nobody wants; a model without a head makes no logits."""
        self._room = room
        self._ends = ends
        self._held: list[set[int]] = [{PAD_PAGE} for _ in room.groups]

    def freeze(self, row: int) -> Step:
        """A step behind which the device has frozen a row.  It writes where others may: before
        anything is restored."""
        pages = []
        for index, group in enumerate(self._room.groups):
            if group.kind is CacheKind.STATE:
                pages.append(_slots(row, index, PAD_PAGE, 1))
            elif group.kind is CacheKind.TOKENS:
                pages.append(PageDelta(row=row, group=index, start=0, page_ids=(1,)))
        join = JoinDelta(
            row=row, token_ids=(0,), prompt_len=1, prefix_len=0, max_len=2, params=_PARAMS
        )
        return self._step(join, 0, 1, (join, *pages), emits=True)

    def prefix_of(self, row: TableRow, *, has_run: bool) -> Iterator[Step]:
        """Steps that compute what the cache holds of a row when it is entered.

        has_run: some step of it came before, so that the last state is in its own slot.  Raises
        ConfigError where its prefix is made of what is not in the record.
        """
        slot = WRITE if has_run else READ
        if self._is_missing(row, slot):
            yield from self._chunks(row, slot)
        for index, group in enumerate(self._room.groups):
            pages, entries = row.pages.get(index, {}), _entries(group, row.kv_len, slot)
            # Those ahead are its own to write; those behind its window are not its own any more.
            last = entries.stop if group.kind is CacheKind.STATE else max(pages, default=-1) + 1
            kept = range(entries.start, last)
            self._held[index].update(page for entry, page in pages.items() if entry in kept)

    def given(self, deltas: Sequence[Delta]) -> None:
        """A recorded step writes these pages and slots."""
        for delta in deltas:
            if isinstance(delta, PageDelta):
                self._held[delta.group].update(delta.page_ids)

    def _is_missing(self, row: TableRow, slot: int) -> bool:
        """Whether a page or state behind its prefix is not there yet."""
        return bool(row.kv_len) and any(
            row.pages[index].get(entry) not in held
            for index, (group, held) in enumerate(zip(self._room.groups, self._held, strict=True))
            for entry in _entries(group, row.kv_len, slot)
        )

    def _chunks(self, row: TableRow, slot: int) -> Iterator[Step]:
        join, start, stop = row.rejoined(), self._first(row), row.kv_len
        if any(each.start > each.source.start for each in row.overlays):
            raise ConfigError.about(
                f"the prompt_embeds of row {join.row}",
                expected="all in the record",
                got="those behind a prefix hit, which was computed before its first step",
                remedy="make the engine fail again sooner behind its start",
            )
        known = replace(
            join,
            token_ids=join.token_ids[: stop + 1],
            prompt_len=stop + 1,
            prefix_len=start,
            max_len=stop + 2,
            params=_PARAMS,
        )
        deltas: tuple[Delta, ...] = (known, *self._pages(row, slot), *row.overlays)
        while start < stop:
            length = min(self._room.chunk, stop - start)
            if join.blocks is not None:
                length = join.blocks.whole(start + length) - start
            yield self._step(join, start, length, deltas, has_overlay=bool(row.overlays))
            start, deltas = start + length, tuple(self._own_slots(row, slot))

    def _first(self, row: TableRow) -> int:
        """The token from which on its prefix is to be computed: the first whose page is missing; of
        states and windows all, since what comes later is made of what is kept nowhere."""
        first = row.kv_len
        for index, group in enumerate(self._room.groups):
            if group.kind is CacheKind.STATE or group.window is not None:
                return 0
            if group.kind is CacheKind.TOKENS:
                entries = _entries(group, row.kv_len, READ)
                missing = [e for e in entries if row.pages[index].get(e) not in self._held[index]]
                first = min([first, *(entry * group.page_size for entry in missing)])
        return first

    def _pages(self, row: TableRow, slot: int) -> Iterator[Delta]:
        """Its tables while its prefix is computed."""
        name = row.join.row
        for index, group in enumerate(self._room.groups):
            pages, spare = row.pages.get(index, {}), self._room.spare[index]
            if group.kind is CacheKind.STATE:
                yield _slots(name, index, PAD_PAGE, pages[slot])
                continue
            kept = _entries(group, row.kv_len, slot)
            if group.kind is CacheKind.ENCODER:
                kept = range(len(pages))
            ids = [spare[entry % len(spare)] for entry in range(kept.start)]
            ids += [pages[entry] for entry in kept]
            yield PageDelta(row=name, group=index, start=0, page_ids=tuple(ids))

    def _own_slots(self, row: TableRow, slot: int) -> Iterator[Delta]:
        """Behind the first chunk a state goes on where it was written."""
        for index, group in enumerate(self._room.groups):
            if group.kind is CacheKind.STATE:
                own = row.pages[index][slot]
                yield _slots(row.join.row, index, own, own)

    def _step(
        self,
        join: JoinDelta,
        start: int,
        length: int,
        deltas: tuple[Delta, ...],
        *,
        emits: bool = False,
        has_overlay: bool = False,
    ) -> Step:
        blocks = join.blocks
        sees_ahead = blocks is not None and blocks.meets(start, start + length)
        return Step(
            epoch=0,
            layout=StepLayout(rows=(join.row,), extend_lens=(length,), emits=(emits,)),
            is_ragged=True,
            mask=MaskKind.BLOCK if sees_ahead else MaskKind.CAUSAL,
            prefix_lens_bound=(start,),
            sampler=SamplerTier.GREEDY,
            logprobs=False,
            deltas=deltas,
            has_overlay=has_overlay,
            ends=self._ends,
        )


def _entries(group: CacheGroupSpec, kv_len: int, slot: int) -> range:
    """Of a request's table: what tokens behind the first `kv_len` read.  slot: of a state."""
    if group.kind is CacheKind.STATE:
        return range(slot, slot + 1)
    if group.kind is CacheKind.ENCODER:  # written when the row is entered
        return range(0)
    seen = first_visible(group.window, kv_len)
    return range(seen // group.page_size, -(-kv_len // group.page_size))


def _slots(row: int, group: int, read: int, write: int) -> PageDelta:
    """Of a STATE group, without a checkpoint."""
    return PageDelta(row=row, group=group, start=READ, page_ids=(read, write, PAD_PAGE))
