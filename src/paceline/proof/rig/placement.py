"""Where a batch's requests lie: rows of the request table, and page ids of every cache group.

Each batch of a case lies elsewhere, within one pool and one table that suit all of them.  A layout
that shall not be contiguous is asserted not to be.  Imports torch nowhere.
"""

from dataclasses import dataclass
from random import Random

from paceline.core.model.cache_groups import NUM_SLOT_COLUMNS
from paceline.core.model.lookback import Lookback, first_visible, in_order
from paceline.core.padding import PAD_PAGE
from paceline.proof.suite.case import Batch, Case, PageLayout

SPARE_PAGES = 5  # of each pool, never used by a batch
ATTEMPTS = 100  # at a shuffle that leaves no request's pages in order
SPARE_ROWS = 2  # of the request table, beyond row 0 and the rows of the largest batch
RETURNED = -1  # the slot of a position whose page was returned


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlacement:
    """One batch's place in the table and the pools."""

    page_size: int
    rows: tuple[int, ...]  # [num_reqs] rows of the request table, distinct, never 0
    num_rows: int  # rows of the table with row 0, the same for every batch of the case
    # [num_groups][num_reqs][pages of kv_len] page ids; PAD_PAGE: behind the window, returned.  Of
    # layers that keep states: slots, in the order of a STATE group's page table
    pages: tuple[tuple[tuple[int, ...], ...], ...]
    pool_pages: tuple[int, ...]  # [num_groups] with page 0, the same for every batch of the case


def groups(case: Case) -> tuple[Lookback | None, ...]:
    """[num_groups] windows of the case's cache groups, in the order of a model's: None first."""
    windows = {layer.window for layer in case.layers}
    return tuple(sorted(windows, key=in_order))


def place(case: Case, index: int) -> BatchPlacement:
    """The place of batch `index`.  Raises AssertionError where a layout would be contiguous."""
    batch = case.batches[index]
    first = index
    while case.batches[first].goes_on:
        first -= 1
    random = Random(f"{case.name} {case.seed} {first} rows")
    num_rows = 1 + SPARE_ROWS + max(case.captured_reqs, *(b.num_reqs for b in case.batches))
    pages: tuple[tuple[tuple[int, ...], ...], ...]
    pool_pages: tuple[int, ...]
    if case.both_ways:
        pages, pool_pages = (), ()  # nothing is cached
    elif case.state_every is None:
        windows = groups(case)
        pages = tuple(
            _group_pages(case, index, number, window) for number, window in enumerate(windows)
        )
        pool_pages = tuple(_pool_pages(case, window) for window in windows)
    else:
        pages, pool_pages = (_state_slots(case, index),), (_num_slots(case),)
    return BatchPlacement(
        page_size=case.page_size,
        rows=tuple(random.sample(range(1, num_rows), batch.num_reqs)),
        num_rows=num_rows,
        pages=pages,
        pool_pages=pool_pages,
    )


def slots(placement: BatchPlacement, group: int, request: int) -> list[int]:
    """[pages of the request * page_size] slot of each position, the last page's tail too;
    RETURNED where the page is."""
    return [
        RETURNED if page == PAD_PAGE else page * placement.page_size + offset
        for page in placement.pages[group][request]
        for offset in range(placement.page_size)
    ]


def shared_pages(case: Case, batch: Batch) -> int:
    """Full pages at the start of every request that are one copy."""
    if case.layout is not PageLayout.SHARED_PREFIX or batch.num_reqs < 2:
        return 0
    return min(batch.prefix_lens) // case.page_size


def _num_slots(case: Case) -> int:
    return 1 + NUM_SLOT_COLUMNS * max(batch.num_reqs for batch in case.batches) + SPARE_PAGES


def _state_slots(case: Case, index: int) -> tuple[tuple[int, ...], ...]:
    """[num_reqs] slots that a request reads, writes and may keep a state in, one group's.

    Every other request goes on in the slot that it reads; nothing is read where nothing is before
    the step.
    """
    batch = case.batches[index]
    num = NUM_SLOT_COLUMNS * batch.num_reqs
    ids = list(range(1 + index % SPARE_PAGES, num + 1 + index % SPARE_PAGES))
    if case.layout is not PageLayout.CONTIGUOUS:
        ids = Random(f"{case.name} {case.seed} {index} slots").sample(
            range(1, _num_slots(case)), num
        )
    found = []
    for request, prefix in enumerate(batch.prefix_lens):
        read, write, checkpoint = ids[NUM_SLOT_COLUMNS * request :][:NUM_SLOT_COLUMNS]
        if (request + index) % 2:
            read = write
        found.append((read if prefix else PAD_PAGE, write, checkpoint))
    return tuple(found)


def _spans(case: Case, batch: Batch, window: Lookback | None) -> list[tuple[int, int]]:
    """[num_reqs] (first page held, pages of all rows): the step's first query sees none before."""
    spans = []
    for prefix, kv_len in zip(batch.prefix_lens, batch.key_lens, strict=True):
        first_key = first_visible(window, prefix)
        spans.append((first_key // case.page_size, -(-kv_len // case.page_size)))
    return spans


def _pool_pages(case: Case, window: Lookback | None) -> int:
    """Pages of a group's pool: what the largest batch takes in any layout, page 0, and spares."""
    most = 0
    for batch in case.batches:
        held = [end - first for first, end in _spans(case, batch, window)]
        most = max(most, sum(held) + max(held))  # an interleaved batch leaves a gap in each round
    pages = 1 + most + SPARE_PAGES
    return 2 * pages if case.layout is PageLayout.HIGH_IDS else pages


def _group_pages(
    case: Case, index: int, group: int, window: Lookback | None
) -> tuple[tuple[int, ...], ...]:
    """[num_reqs][pages of kv_len] page ids of one group."""
    spans = _spans(case, case.batches[index], window)
    pool = _pool_pages(case, window)
    random = Random(f"{case.name} {case.seed} {index} {group}")
    for _ in range(ATTEMPTS):
        held = _held_pages(case, index, spans, pool, random)
        if case.layout is PageLayout.CONTIGUOUS or not any(map(_is_in_order, held)):
            break
    for (first, end), ids in zip(spans, held, strict=True):
        assert len(ids) == end - first, f"{case.name}: {len(ids)} pages for {end - first}"
        assert all(PAD_PAGE < page < pool for page in ids), f"{case.name}: {ids} of {pool} pages"
        assert case.layout is PageLayout.CONTIGUOUS or not _is_in_order(ids), (
            f"{case.name}: batch {index} is {case.layout.value}, but its pages {ids} are in order"
        )
    return tuple(
        (PAD_PAGE,) * first + tuple(ids) for (first, _), ids in zip(spans, held, strict=True)
    )


def _is_in_order(ids: list[int]) -> bool:
    return len(ids) > 1 and ids == list(range(ids[0], ids[0] + len(ids)))


def _held_pages(
    case: Case, index: int, spans: list[tuple[int, int]], pool: int, random: Random
) -> list[list[int]]:
    """[num_reqs] ids of the pages a request holds, in the order of its tokens."""
    counts = [end - first for first, end in spans]
    start = 1 + index % SPARE_PAGES
    if case.layout is PageLayout.CONTIGUOUS:
        return _ascending(counts, start=start)
    if case.layout is PageLayout.REVERSED:
        return [ids[::-1] for ids in _ascending(counts, start=start)]
    if case.layout is PageLayout.INTERLEAVED:
        return _interleaved(counts, start=start)
    shared = shared_pages(case, case.batches[index])
    base = min(shared, *(first for first, _ in spans))  # pages nobody holds lie before
    owned = [end - max(first, shared) for first, end in spans]
    total = shared - base + sum(owned)
    lowest = pool - total - index % 2 if case.layout is PageLayout.HIGH_IDS else 1
    ids = random.sample(range(lowest, pool), total)
    common, ids = ids[: shared - base], ids[shared - base :]
    held = []
    for (first, _), own in zip(spans, owned, strict=True):
        held.append(common[min(first, shared) - base :] + ids[:own])
        ids = ids[own:]
    return held


def _ascending(counts: list[int], *, start: int) -> list[list[int]]:
    """[num_reqs][counts[r]] request after request, ascending."""
    ids = []
    for count in counts:
        ids.append(list(range(start, start + count)))
        start += count
    return ids


def _interleaved(counts: list[int], *, start: int) -> list[list[int]]:
    """[num_reqs][counts[r]] round robin; each round leaves a page free, so none ascends by one."""
    ids: list[list[int]] = [[] for _ in counts]
    for turn in range(max(counts)):
        for request, count in enumerate(counts):
            if turn < count:
                ids[request].append(start)
                start += 1
        start += 1
    return ids
