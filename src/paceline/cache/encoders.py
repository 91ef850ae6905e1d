"""EncoderGroup: the pages that hold the rows of requests' encoders.

A request brings what its encoder reads, and the rows made of it neither grow nor change: pages for
all of them are taken when it is admitted, written before its first step, and come back when it
leaves.  Each request has its own: the prefix tree finds none.  Page size 4, an encoder of 6 rows:

    admitted    pages [3, 4], of which 8 rows are 6
    preempted   none; taken and written again when it is admitted again
"""

from dataclasses import dataclass

from paceline.cache.groups import CacheGroup, PageRun
from paceline.cache.prefix_tree import Node, PrefixTree
from paceline.core.model.cache_groups import CacheGroupSpec


@dataclass(slots=True)
class EncoderHolding:
    """One request's pages in one group; written by EncoderGroup alone."""

    pages: list[int]

    @property
    def num_private(self) -> int:
        """Pages that are this holding's alone."""
        return len(self.pages)

    @property
    def locked(self) -> list[Node]:
        """Nodes whose page it keeps from eviction: the tree has none."""
        return []


class EncoderGroup(CacheGroup):
    """Pages for as many rows as a request's encoder makes, from its admission to its end."""

    def __init__(
        self, spec: CacheGroupSpec, index: int, tree: PrefixTree, *, num_pages: int
    ) -> None:
        assert spec.encoder_len is not None, "an ENCODER group says how many rows there may be"
        super().__init__(spec, index, tree, num_pages=num_pages)
        self._most = spec.encoder_len

    def pages_to_fit(self, kv_len: int) -> int:
        """Most pages a request alone ever holds, whatever its length."""
        return self._num_pages(self._most)

    def can_admit(self, num_rows: int) -> bool:
        """Whether `admit` would find its pages."""
        return self._num_pages(num_rows) <= self.pool.num_free

    def admit(self, num_rows: int) -> tuple[EncoderHolding, PageRun]:
        """Take pages for all rows; `can_admit` must have said yes."""
        pages = self.pool.reserve(self._num_pages(num_rows))
        return EncoderHolding(pages), PageRun(self.index, 0, tuple(pages))

    def release(self, holding: EncoderHolding, epoch: int) -> None:
        """Return everything, once `epoch` has retired."""
        pages, holding.pages = holding.pages, []
        self._give_back(pages, [], epoch)

    def _num_pages(self, num_rows: int) -> int:
        return -(-num_rows // self._page_size)
