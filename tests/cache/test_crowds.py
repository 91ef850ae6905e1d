"""Crowds: requests that found the same long prefix, as they are admitted and leave."""

from paceline.cache.manager import CacheManager
from paceline.cache.page_keys import PageKeys
from paceline.core.model.cache_groups import CacheGroupSpec
from paceline.core.model.config import kv_parts
from paceline.core.sharing import MIN_SHARED_KEYS, MIN_SHARERS

PAGE = MIN_SHARED_KEYS // 2
PROMPT = list(range(2 * PAGE + 3))


def crowded_cache() -> CacheManager:
    """One that holds PROMPT."""
    spec = CacheGroupSpec(
        name="full", layer_ids=(0,), window=None, page_size=PAGE, parts=kv_parts(1, 8, 8)
    )
    cache = CacheManager([spec], [64], max_extend_len=len(PROMPT))
    assert cache.admit("first", PROMPT, reserve_to=len(PROMPT)) is not None
    cache.retire(1)
    cache.written("first", PROMPT, len(PROMPT), epoch=1)
    cache.release("first", PROMPT, len(PROMPT), epoch=1)
    return cache


def join(cache: CacheManager, name: str, tokens: list[int]) -> None:
    assert cache.admit(name, tokens, reserve_to=len(tokens)) is not None


def test_a_crowd_is_enough_requests_behind_one_page() -> None:
    cache = crowded_cache()
    for index in range(MIN_SHARERS):
        assert not cache.is_crowded
        join(cache, str(index), [*PROMPT, index])
    assert cache.is_crowded
    cache.release("3", PROMPT, 0, epoch=1)
    assert not cache.is_crowded
    join(cache, "again", PROMPT)
    join(cache, "one more", PROMPT)
    assert cache.is_crowded
    cache.release("again", PROMPT, 0, epoch=1)
    assert cache.is_crowded
    cache.discard("one more", PROMPT, epoch=1)
    assert not cache.is_crowded


def test_a_short_hit_and_another_salt_count_for_nobody() -> None:
    cache = crowded_cache()
    other = PageKeys("other")
    for index in range(2 * MIN_SHARERS):
        join(cache, f"short {index}", PROMPT[: 2 * PAGE])  # a token is left: one page of hit
        assert cache.admit(f"salt {index}", PROMPT, reserve_to=PAGE, keys=other) is not None
        if index < MIN_SHARERS - 1:
            join(cache, f"long {index}", PROMPT)
    assert not cache.is_crowded
