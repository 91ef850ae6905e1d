"""What a cache holds."""

from collections.abc import Sequence

from paceline.cache.manager import CacheManager
from paceline.cache.page_keys import NO_KEYS, PageKeys


def cached_len(cache: CacheManager, tokens: Sequence[int], keys: PageKeys = NO_KEYS) -> int:
    """Tokens a request would find in the cache; at least one is left to compute."""
    return len(cache._hit(tokens, keys)) * cache._page_size


def num_shared_pages(cache: CacheManager, request_id: str) -> int:
    """Pages this request and another one both hold."""
    cache.offer_written()
    return sum(
        node is not None and node.locks[group.index] > 1
        for group, holding in cache._pairs(cache._entries[request_id])
        for node in holding.nodes
    )
