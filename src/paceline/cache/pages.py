"""PagePool: which pages of one cache group are free, and who may touch the others.

    free -> reserved -> written -> shareable -> queued -> free

A page is *reserved* for one request, *written* once a step of a known epoch has filled it,
*shareable* once that epoch has retired and the prefix tree owns it.  `free` only queues: the page
returns when the last step that could touch it has retired.  Page 0 is reserved (core.padding) and
is in none of these states.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from paceline.core.errors import ConfigError, IntegrityError
from paceline.core.padding import PAD_PAGE

_AHEAD = 64  # pages of a run that are looked at together, at first


class PageState(IntEnum):
    """Where a page is in its life."""

    FREE = 0
    RESERVED = 1
    WRITTEN = 2
    SHAREABLE = 3
    QUEUED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCounts:
    """The books of one pool, in pages; free + queued + cached + owned = total."""

    total: int
    free: int
    queued: int
    cached: int  # shareable: owned by the prefix tree
    owned: int  # reserved or written: private to one request


class PagePool:
    """Owns the life of every page of one cache group."""

    def __init__(self, name: str, num_pages: int) -> None:
        """num_pages counts page 0, which is never handed out."""
        if num_pages < 2:
            raise ConfigError.about(
                f"num_pages of cache group '{name}'",
                expected="at least 2 (page 0 is reserved)",
                got=num_pages,
                remedy="give the KV cache more memory",
            )
        self._name = name
        self._states = bytearray(num_pages)  # PageState of each; counted when idle
        self._written_epochs = [0] * num_pages
        self._none_below = PAD_PAGE + 1  # no page before this one is free
        self._num_free = num_pages - 1
        self._queue: dict[int, list[int]] = {}  # epoch -> pages
        self._retired = 0

    @property
    def total(self) -> int:
        return len(self._states) - 1

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_queued(self) -> int:
        return sum(len(pages) for pages in self._queue.values())

    def reserve(self, count: int, *, after: int = PAD_PAGE) -> list[int]:
        """Take `count` pages, continuing the run behind page `after` where that is free.

        Otherwise the lowest ids, so that a fresh pool hands out consecutive pages.
        """
        if count > self._num_free:
            raise IntegrityError.about(
                f"pages reserved in cache group '{self._name}'",
                expected=f"at most {self._num_free} (free)",
                got=count,
                remedy="check num_free before reserving",
            )
        taken: list[int] = []
        states, free, ahead = self._states, bytes([PageState.FREE]), _AHEAD
        while len(taken) < count:
            start = after + 1
            if after == PAD_PAGE or not states.startswith(free, start):
                start = self._none_below = states.index(free, self._none_below)
            run = states[start : start + min(count - len(taken), ahead)]
            after = start + len(run) - len(run.lstrip(free)) - 1
            ahead = 2 * ahead if after + 1 == start + len(run) else _AHEAD
            taken += range(start, after + 1)
            states[start : after + 1] = bytes([PageState.RESERVED]) * (after + 1 - start)
        self._num_free -= count
        return taken

    def mark_written(self, pages: Sequence[int], epoch: int) -> None:
        """The step of this epoch completes the pages."""
        written = PageState.WRITTEN
        for page in pages:
            self._require(page, PageState.RESERVED, "written")
            self._states[page] = written
            self._written_epochs[page] = epoch

    def share(self, pages: Sequence[int]) -> None:
        """Hand written pages to the prefix tree; their epochs must have retired."""
        shareable = PageState.SHAREABLE
        for page in pages:
            self._require(page, PageState.WRITTEN, "shared")
            epoch = self._written_epochs[page]
            if epoch > self._retired:
                raise IntegrityError.about(
                    f"the epoch of shared page {page} of cache group '{self._name}'",
                    expected=f"at most {self._retired} (retired)",
                    got=epoch,
                    remedy="share pages only after the step that wrote them has retired",
                )
            self._states[page] = shareable

    def free(self, pages: Sequence[int], epoch: int) -> None:
        """Queue pages until `epoch`, the last step that could touch them, retires."""
        for page in pages:
            if self._states[page] in (PageState.FREE, PageState.QUEUED) or page == PAD_PAGE:
                self._require(page, PageState.RESERVED, "freed")
            self._states[page] = PageState.QUEUED
        if not pages:
            return
        self._queue.setdefault(epoch, []).extend(pages)
        if epoch <= self._retired:
            self.retire(self._retired)

    def retire(self, epoch: int) -> None:
        """Steps up to `epoch` have run to their end: their queued pages are free."""
        self._retired = max(self._retired, epoch)
        for due in sorted(e for e in self._queue if e <= self._retired):
            pages = self._queue.pop(due)
            for page in pages:
                self._states[page] = PageState.FREE
            self._num_free += len(pages)
            self._none_below = min(self._none_below, min(pages))

    def counts(self) -> PoolCounts:
        """The books, from the queue and the states."""
        count = self._states.count
        return PoolCounts(
            total=self.total,
            free=self._num_free,
            queued=self.num_queued,
            cached=count(PageState.SHAREABLE),
            owned=count(PageState.RESERVED) + count(PageState.WRITTEN),
        )

    def check_integrity(self) -> None:
        """Raise IntegrityError unless free + queued + cached + owned = total."""
        c = self.counts()
        if c.free + c.queued + c.cached + c.owned != c.total:
            raise IntegrityError.about(
                f"pages of cache group '{self._name}'",
                expected=f"{c.total} in total",
                got=f"{c.free} free + {c.queued} queued + {c.cached} cached + {c.owned} owned",
                remedy="find the call that took or returned a page twice",
            )
        free = self._states.count(PageState.FREE) - 1  # without page 0
        if free != c.free:
            raise IntegrityError.about(
                f"free pages of cache group '{self._name}'",
                expected=f"{free} by state",
                got=f"{c.free} by count",
                remedy="find the call that took or returned a page twice",
            )

    def _require(self, page: int, state: PageState, verb: str) -> None:
        if page != PAD_PAGE and self._states[page] == state:
            return
        named = PageState(self._states[page]).name.lower()
        raise IntegrityError.about(
            f"page {page} of cache group '{self._name}', to be {verb},",
            expected=state.name.lower(),
            got="reserved for padding" if page == PAD_PAGE else named,
            remedy="each page has one owner; find the second one",
        )
