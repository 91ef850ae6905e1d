"""What a cache holds, without touching it."""

from collections.abc import Hashable, Sequence

from paceline.cache.manager import CacheManager


def cached_len(cache: CacheManager, tokens: Sequence[int], salt: Hashable = None) -> int:
    """Tokens a request would find in the cache; at least one is left to compute."""
    return len(cache._hit(tokens, salt)) * cache._page_size


def num_shared_pages(cache: CacheManager, request_id: str) -> int:
    """Pages this request and another one both hold."""
    return sum(
        node is not None and node.locks[group.index] > 1
        for group, holding in cache._pairs(cache._entries[request_id])
        for node in holding.nodes
    )
