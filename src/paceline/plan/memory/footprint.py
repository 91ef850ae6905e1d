"""Footprint: pages and bytes of KV that requests hold.  No torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.core.model.cache_groups import CacheGroupSpec
from paceline.core.model.config import CacheKind
from paceline.core.model.lookback import most_visible

SHORTEST = 2  # tokens of a request: one of the prompt, one that is new


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBudget:
    """One cache group's share of the KV budget."""

    name: str
    window: int | None  # keys visible at most; None = all
    num_layers: int
    page_size: int  # tokens
    page_bytes: int  # of one page, or slot, over all layers of the group
    num_pages: int  # the reserved page included
    bytes: int
    state_every: int | None  # tokens between the states that are kept; None: it holds none
    encoder_len: int | None  # rows of a request's encoder at most; None: it holds no such rows

    @property
    def tokens(self) -> int | None:
        """Tokens the group can hold; None: it holds something else."""
        if self.state_every or self.encoder_len:
            return None
        return (self.num_pages - 1) * self.page_size

    @property
    def slots(self) -> int | None:
        """States the group can hold; None: it holds something else."""
        return self.num_pages - 1 if self.state_every else None


def request_pages(spec: CacheGroupSpec, length: int) -> int:
    """Pages a request of `length` tokens holds in a group between steps.

    A windowed group keeps its window, whose ends need not fall on page borders.  Of states it holds
    its own slot, and another that it starts from or leaves to others, and of an encoder all rows
    that there may be.
    """
    if spec.kind is CacheKind.STATE:
        return 2
    length = spec.encoder_len or length
    most = most_visible(spec.window)
    tokens = length if most is None else min(length, most + spec.page_size)
    return -(-tokens // spec.page_size)


def standing_pages(spec: CacheGroupSpec, step_tokens: int) -> int:
    """Pages a group needs besides those of its requests: the reserved page, and in a windowed one
    the tokens of two steps, because pages behind a window return only once a step has retired."""
    if spec.window is None:
        return 1
    return 1 + -(-2 * step_tokens // spec.page_size)


def request_bytes(specs: Sequence[CacheGroupSpec], length: int, element: int) -> int:
    """KV bytes of one request of `length` tokens over all groups."""
    return sum(request_pages(spec, length) * spec.page_bytes(element) for spec in specs)


def standing_bytes(specs: Sequence[CacheGroupSpec], element: int, step_tokens: int) -> int:
    """KV bytes that no request owns for long; see `standing_pages`."""
    return sum(standing_pages(spec, step_tokens) * spec.page_bytes(element) for spec in specs)


def longest_request(spare: Callable[[int], int], *, limit: int, page_size: int, reach: int) -> int:
    """The longest request, up to `limit` tokens, that fits, to a page; 0 when none does.

    spare: bytes left beside one of so many tokens, below 0 where it does not fit.  It falls nearly
    in a line, so that few lengths are asked: regula falsi, the Illinois variant.
    reach: tokens behind the request, which belong to its pages.
    """

    def length(pages: int) -> int:
        return min(pages * page_size - reach, limit)

    low, high = -(-(SHORTEST + reach) // page_size), -(-(limit + reach) // page_size)
    missing = spare(limit)
    if missing >= 0:
        return limit
    left = spare(length(low))
    if left < 0:
        return 0
    moved = 0  # the end that moved last
    while low + 1 < high:
        middle = low + (high - low) * left // (left - missing)
        middle = min(max(middle, low + 1), high - 1)
        value = spare(length(middle))
        if value >= 0:
            missing = missing // 2 if moved == 1 else missing
            low, left, moved = middle, value, 1
        else:
            left = left // 2 if moved == -1 else left
            high, missing, moved = middle, value, -1
    return length(low)
