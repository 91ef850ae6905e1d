"""KnownRows: what the rows of the request table hold, as steps and their outputs tell it.

A host's twin of `runner.table.request_table`, of what must be known to begin anew in the middle: a
row that joined with 20 tokens, 16 of them found in the cache, and said 3 since, is a row that joins
with 23 tokens of which 22 are in the cache.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from paceline.core.step import Delta, FinishCode, JoinDelta, OverlayDelta, PageDelta, Step


@dataclass(slots=True)
class TableRow:
    """One request since it entered its row; written by KnownRows alone."""

    join: JoinDelta
    overlays: list[OverlayDelta] = field(default_factory=list)  # as far as not computed
    pages: dict[int, dict[int, int]] = field(default_factory=dict)  # group -> entry -> page id
    said: list[int] = field(default_factory=list)  # tokens
    computed: int = 0  # tokens of what it joined with, while it said nothing
    has_ended: bool = False  # the device has frozen it

    @property
    def kv_len(self) -> int:
        """Tokens whose KV is in the cache."""
        if self.said:
            return len(self.join.token_ids) + len(self.said) - 1
        return self.join.prefix_len + self.computed

    def rejoined(self) -> JoinDelta:
        """It enters its row with what it knows."""
        known = (*self.join.token_ids, *self.said)
        return replace(self.join, token_ids=known, packed_ids=None, prefix_len=self.kv_len)

    def deltas(self) -> Iterator[Delta]:
        """What makes an empty row this one, but for what is in the cache."""
        yield self.rejoined()
        for group, entries in self.pages.items():
            for start, page_ids in _runs(entries):
                yield PageDelta(row=self.join.row, group=group, start=start, page_ids=page_ids)
        yield from self.overlays

    @property
    def holds_tensors(self) -> bool:
        return bool(self.overlays) or self.join.encoder is not None

    def let_go(self) -> None:
        """Nobody enters it again as it is."""
        self.overlays = []
        if self.join.encoder is not None:
            self.join = replace(self.join, encoder=None)

    def copy(self) -> "TableRow":
        pages = {group: dict(entries) for group, entries in self.pages.items()}
        return replace(self, overlays=list(self.overlays), pages=pages, said=list(self.said))


def _runs(entries: Mapping[int, int]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Neighbouring entries together: (the first, their pages)."""
    start, pages = 0, list[int]()
    for entry, page in sorted(entries.items()):
        if pages and entry != start + len(pages):
            yield start, tuple(pages)
            pages = []
        if not pages:
            start = entry
        pages.append(page)
    if pages:
        yield start, tuple(pages)


class KnownRows:
    """Owns what is known of every row."""

    def __init__(self, rows: Mapping[int, TableRow] | None = None) -> None:
        self._rows = {} if rows is None else {name: row.copy() for name, row in rows.items()}

    def copy(self) -> "KnownRows":
        return KnownRows(self._rows)

    def __getitem__(self, row: int) -> TableRow:
        return self._rows[row]

    def holding(self) -> set[int]:
        """Rows that keep tensors from being freed."""
        return {name for name, row in self._rows.items() if row.holds_tensors}

    def let_go(self, row: int) -> None:
        """No step enters or holds it again before the next request does."""
        self._rows[row].let_go()

    def change(self, deltas: tuple[Delta, ...]) -> None:
        """What a step brings to the table."""
        rows = self._rows
        for delta in deltas:
            if isinstance(delta, JoinDelta):
                rows[delta.row] = TableRow(delta)
            elif isinstance(delta, PageDelta):
                pages = rows[delta.row].pages.setdefault(delta.group, {})
                pages.update(enumerate(delta.page_ids, start=delta.start))
            else:
                rows[delta.row].overlays.append(delta)

    def apply(
        self, step: Step, token_ids: tuple[tuple[int, ...], ...], finish: tuple[FinishCode, ...]
    ) -> None:
        """A step has run; token_ids, finish: of its outputs."""
        if step.deltas:
            self.change(step.deltas)
        layout, rows = step.layout, self._rows
        for name, extend_len, said, code in zip(
            layout.rows, layout.extend_lens, token_ids, finish, strict=True
        ):
            row = rows[name]
            if said:
                row.said += said
            else:
                row.computed += extend_len
            if row.overlays:
                row.overlays = [each for each in row.overlays if each.source.stop > row.kv_len]
            if code:
                row.has_ended = True
                row.let_go()
