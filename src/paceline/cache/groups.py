"""PagedGroup: the pages requests hold in one cache group, full or windowed.

A windowed group differs in one fact, the first page a query still sees; full attention is the
window that never ends, and a chunk one that moves by its own size.  With window w (keys visible,
itself included) a query at position p sees keys j > p - w.  For page size 4 and window 6:

    query position            0  5  6  9 10
    first visible key         0  0  1  4  5
    first visible page        0  0  0  1  1
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.cache.pages import PagePool
from paceline.cache.prefix_tree import Node, PrefixTree
from paceline.core.errors import IntegrityError
from paceline.core.model.cache_groups import CacheGroupSpec
from paceline.core.model.lookback import first_visible, most_visible
from paceline.core.padding import PAD_PAGE

ROOMY_SHARE = 8  # reserving ahead leaves at least total // ROOMY_SHARE pages free


class PageRun(NamedTuple):
    """Page ids that enter one request's page table."""

    group: int
    start: int  # first entry
    page_ids: tuple[int, ...]


@dataclass(slots=True)
class Holding:
    """One request's pages in one group; written by PagedGroup alone.

    Pages [0, first) have been returned, [first, len(pages)) are held.  Each held page is private,
    or belongs to a node of the prefix tree that this holding has locked.
    """

    committed: int = 0  # tokens whose KV exists, by retired steps
    first: int = 0
    pages: list[int] = field(default_factory=list)  # by page index; PAD_PAGE where returned
    nodes: list[Node | None] = field(default_factory=list)  # by page index; None: private
    most_shared: int | None = None  # pages that may ever be offered to the tree; None: all

    @property
    def num_private(self) -> int:
        """Pages that are this holding's alone."""
        return sum(node is None for node in self.nodes[self.first :])

    @property
    def locked(self) -> list[Node]:
        """Nodes whose page it keeps from eviction."""
        return [node for node in self.nodes if node is not None]


class CacheGroup:
    """The pages, or slots, of one cache group: its pool, and the tree that holds what is shared.

    What requests give back is free, and unlocked, once the last step that may read it has retired.
    """

    def __init__(
        self, spec: CacheGroupSpec, index: int, tree: PrefixTree, *, num_pages: int
    ) -> None:
        self._spec = spec
        self.index = index  # of the group
        self._tree = tree
        self._page_size = spec.page_size
        self.pool = PagePool(spec.name, num_pages)
        self._unlocks: dict[int, list[Node]] = {}  # epoch -> nodes
        self._retired = 0

    @property
    def name(self) -> str:
        return self._spec.name

    def retire(self, epoch: int) -> None:
        """Steps up to `epoch` have run to their end."""
        self._retired = max(self._retired, epoch)
        self.pool.retire(epoch)
        for due in sorted(e for e in self._unlocks if e <= self._retired):
            self._tree.unlock_all(self._unlocks.pop(due), self.index)

    def pending_locks(self) -> list[Node]:
        """Locks that wait for an epoch, one entry each."""
        return [node for nodes in self._unlocks.values() for node in nodes]

    def _give_back(self, pages: list[int], nodes: list[Node], epoch: int) -> None:
        """Pages of a request alone, and nodes that it locks, once `epoch` has retired."""
        self.pool.free(pages, epoch)
        if nodes:
            self._unlocks.setdefault(epoch, []).extend(nodes)
        if epoch <= self._retired:
            self.retire(self._retired)

    def _make_room(self, count: int) -> None:
        """Evict until `count` pages are free, or nothing more may go."""
        short = count - self.pool.num_free
        if short > 0:
            # Unlocked pages have no reader in flight: they are free at once.
            self.pool.free(self._tree.evict(self.index, short), self._retired)

    def _available(self) -> int:
        return self.pool.num_free + self._tree.num_evictable(self.index)


class PagedGroup(CacheGroup):
    """Reserve by upper bound, release by lower bound."""

    def __init__(
        self,
        spec: CacheGroupSpec,
        index: int,
        tree: PrefixTree,
        *,
        num_pages: int,
        max_extend_len: int,
    ) -> None:
        """max_extend_len: most tokens one step adds to a request."""
        super().__init__(spec, index, tree, num_pages=num_pages)
        self._window = spec.window
        self._max_extend_len = max_extend_len

    @property
    def is_draft(self) -> bool:
        """Whether a drafter's layers use it."""
        return self._spec.draft

    def first_visible_page(self, position: int) -> int:
        """The first page that holds a key visible to a query at `position` or later."""
        return first_visible(self._window, position) // self._page_size

    def pages_to_fit(self, kv_len: int) -> int:
        """Most pages a request alone ever holds on its way to `kv_len` tokens.

        A windowed one spans window - 1 keys and one step: n tokens touch (n - 2) // page_size + 2
        pages at the worst alignment.
        """
        every, most = self._num_pages(kv_len), most_visible(self._window)
        if most is None:
            return every
        span = most - 1 + self._max_extend_len
        return min(every, (span - 2) // self._page_size + 2 if span > 1 else 1)

    def usable_prefix(self, path: Sequence[Node], limit: int) -> int:
        """The longest hit of at most `limit` pages whose next query finds all keys it sees."""
        if None not in [node.pages[self.index] for node in path[:limit]]:
            return limit  # as nearly always
        runs = [0]  # runs[n]: stored pages in a row that end with page n - 1
        for node in path[:limit]:
            runs.append(0 if node.pages[self.index] is None else runs[-1] + 1)
        for length in range(limit, 0, -1):
            if runs[length] >= length - self.first_visible_page(length * self._page_size):
                return length
        return 0

    def can_admit(self, path: Sequence[Node], reserve_to: int) -> bool:
        """Whether `admit` would find its pages."""
        seen = path[self.first_visible_page(len(path) * self._page_size) :]
        newly_locked = [node.locks[self.index] for node in seen].count(0)
        need = self._admit_pages(path, reserve_to) - len(path)
        return need <= self._available() - newly_locked

    def admit(
        self, path: Sequence[Node], reserve_to: int, ahead: int = 0
    ) -> tuple[Holding, PageRun]:
        """Lock a hit and reserve behind it; `can_admit` must have said yes.

        A full group holds `ahead` more tokens while the pool is roomy.
        """
        first = self.first_visible_page(len(path) * self._page_size)
        seen = path[first:]
        holding = Holding(
            committed=len(path) * self._page_size,
            first=first,
            pages=[PAD_PAGE] * first + self._tree.lock_all(seen, self.index),
            nodes=[*[None] * first, *seen],
        )
        need = self._admit_pages(path, reserve_to) - len(path)
        wish = self._admit_pages(path, reserve_to + ahead) - len(path)
        # What is held ahead keeps others out: only while half of the pool stays free.
        roomy = self.pool.num_free - self.pool.total // 2
        self._grow(holding, max(need, min(wish, roomy)))
        return holding, PageRun(self.index, first, tuple(holding.pages[first:]))

    def reserved(self, holding: Holding) -> int:
        """Tokens the held pages have room for."""
        return len(holding.pages) * self._page_size

    def shortage(self, holding: Holding, kv_bound: int) -> bool:
        """Whether `kv_bound` tokens need more pages than there are."""
        return self._num_pages(kv_bound) - len(holding.pages) > self._available()

    def reserve(self, holding: Holding, kv_bound: int, ahead: int) -> PageRun | None:
        """Hold pages for `kv_bound` tokens, and for `ahead` more while the pool is roomy.

        None: it already does.  `shortage` must have said no.
        """
        start = len(holding.pages)
        need = self._num_pages(kv_bound) - start
        if need <= 0:
            return None
        wish = self._num_pages(kv_bound + ahead) - start
        roomy = self.pool.num_free - self.pool.total // ROOMY_SHARE
        self._grow(holding, max(need, min(wish, roomy)))
        return PageRun(self.index, start, tuple(holding.pages[start:]))

    def commit(self, holding: Holding, kv_len: int, epoch: int) -> None:
        """The KV of `kv_len` tokens, no fewer than before, exists once `epoch` retires."""
        if kv_len > self.reserved(holding):
            raise IntegrityError.about(
                f"committed tokens in cache group '{self.name}'",
                expected=f"at most {self.reserved(holding)} (reserved)",
                got=kv_len,
                remedy="reserve by upper bound before a step is launched",
            )
        full_before, full = holding.committed // self._page_size, kv_len // self._page_size
        self.pool.mark_written(holding.pages[max(full_before, holding.first) : full], epoch)
        holding.committed = kv_len

    def share(
        self, holding: Holding, start: int, path: Sequence[Node], *, adopt: int | None = None
    ) -> None:
        """Offer written pages from `start` on to their tree nodes, locked for this holding.

        path: the node before page `start`, then one node per page.

        Where a node has another request's page, ours stays private; with `adopt` (the last epoch
        that touches it) it is freed, and the node's page is locked in its place, so that a holding
        about to be released locks whole paths.
        """
        stop = len(holding.pages) if holding.most_shared is None else holding.most_shared
        shared: list[int] = []
        for index in range(max(start, holding.first), min(stop, start + len(path) - 1)):
            if holding.nodes[index] is not None:
                continue
            parent, node = path[index - start], path[index - start + 1]
            if self._window is None and index and holding.nodes[index - 1] is not parent:
                break
            page = holding.pages[index]
            if node.pages[self.index] is None:
                shared.append(page)
                self._tree.put(node, self.index, page)
            elif adopt is None:
                continue
            else:
                holding.pages[index] = self._tree.lock(node, self.index)
                self.pool.free([page], adopt)
            holding.nodes[index] = node
        self.pool.share(shared)

    def has_private(self, holding: Holding, stop: int) -> bool:
        """Whether a page before `stop` is this holding's alone."""
        return None in holding.nodes[holding.first : stop]

    def keep_private(self, holding: Holding, kv_len: int) -> None:
        """Pages that are not full with the first `kv_len` tokens stay this holding's alone."""
        holding.most_shared = kv_len // self._page_size

    def advance(self, holding: Holding, lowest_query: int, epoch: int) -> None:
        """Return pages no query at `lowest_query` or later sees, once `epoch` has retired."""
        stop = min(self.first_visible_page(lowest_query), len(holding.pages))
        if stop > holding.first:
            self._return(holding, range(holding.first, stop), epoch)
            holding.first = stop

    def release(self, holding: Holding, epoch: int) -> None:
        """Return everything, once `epoch` has retired."""
        self._return(holding, range(holding.first, len(holding.pages)), epoch)
        holding.first = len(holding.pages)

    def relief_pending(self, holding: Holding, next_query: int) -> bool:
        """Whether pages or locks wait for an epoch, or fall behind this holding's window soon."""
        behind = self.first_visible_page(next_query) > holding.first
        return behind or bool(self._unlocks) or self.pool.num_queued > 0

    def _return(self, holding: Holding, indices: range, epoch: int) -> None:
        part, count = slice(indices.start, indices.stop), len(indices)
        pages, nodes = holding.pages[part], holding.nodes[part]
        holding.pages[part], holding.nodes[part] = [PAD_PAGE] * count, [None] * count
        private = [page for page, node in zip(pages, nodes, strict=True) if node is None]
        self._give_back(private, [node for node in nodes if node is not None], epoch)

    def _grow(self, holding: Holding, count: int) -> None:
        self._make_room(count)
        last = holding.pages[-1] if holding.pages else PAD_PAGE
        taken = self.pool.reserve(count, after=last)
        holding.pages.extend(taken)
        holding.nodes.extend([None] * count)

    def _admit_pages(self, path: Sequence[Node], reserve_to: int) -> int:
        if self._window is not None:
            reserve_to = min(reserve_to, len(path) * self._page_size + self._max_extend_len)
        return max(len(path), self._num_pages(reserve_to))

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)
