"""A drafter's cache groups: what a hit may take where KV depends on the token behind it."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from cache_probe import cached_len
from paceline.cache.manager import CacheManager
from paceline.cache.page_keys import NO_KEYS
from paceline.core.errors import IntegrityError
from paceline.core.model.cache_groups import CacheGroupSpec
from paceline.core.model.config import kv_parts


def make_cache(page_size: int, *, next_token: bool) -> CacheManager:
    specs = [
        CacheGroupSpec(
            name="draft-full" if draft else "full",
            layer_ids=(0,),
            window=None,
            page_size=page_size,
            parts=kv_parts(1, 8, 8),
            draft=draft,
            next_token=next_token and draft,
        )
        for draft in (False, True)
    ]
    return CacheManager(specs, [401, 401], max_extend_len=16)


def run_request(
    cache: CacheManager, name: str, tokens: list[int], *, kv_len: int, epoch: int
) -> int:
    """A request that knows `tokens` in the end, with the KV of the first `kv_len`; its hit."""
    admission = cache.admit(name, tokens, reserve_to=len(tokens))
    assert admission is not None
    cache.retire(epoch)
    if kv_len > admission.prefix_len:
        cache.written(name, tokens, kv_len, epoch=epoch)
        cache.check_integrity()
    cache.release(name, tokens, max(kv_len, admission.prefix_len), epoch=epoch)
    cache.check_integrity()
    return admission.prefix_len


class Oracle:
    """Every prefix whose KV somebody computed, with the tokens that KV depends on."""

    def __init__(self, page_size: int, *, next_token: bool) -> None:
        self._page_size = page_size
        self._behind = int(next_token)
        self._known: set[tuple[int, ...]] = set()

    def note(self, tokens: list[int], kv_len: int) -> None:
        for end in range(self._page_size, kv_len + 1, self._page_size):
            if end + self._behind <= len(tokens):
                self._known.add(tuple(tokens[: end + self._behind]))

    def hit(self, tokens: list[int]) -> int:
        end = 0
        while end + self._page_size < len(tokens):
            if tuple(tokens[: end + self._page_size + self._behind]) not in self._known:
                break
            end += self._page_size
        return end


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(
    page_size=st.integers(1, 4),
    next_token=st.booleans(),
    requests=st.lists(st.tuples(TOKENS, st.integers(0, 3)), min_size=1, max_size=8),
)
def test_a_hit_is_the_longest_prefix_computed_with_the_same_tokens(
    page_size: int, next_token: bool, requests: list[tuple[list[int], int]]
) -> None:
    cache = make_cache(page_size, next_token=next_token)
    oracle = Oracle(page_size, next_token=next_token)
    for number, (tokens, unwritten) in enumerate(requests):
        kv_len = max(0, len(tokens) - unwritten)  # 0 unwritten: the token behind is cut off
        wanted = oracle.hit(tokens)
        assert cached_len(cache, tokens) == wanted
        got = run_request(cache, f"r{number}", tokens, kv_len=kv_len, epoch=number + 1)
        assert got == wanted
        oracle.note(tokens, max(kv_len, got))
    for group in cache.stats().groups:
        assert group.owned == group.queued == 0
        assert group.free + group.cached == group.total


def test_another_continuation_ends_one_page_earlier_and_can_be_found_again() -> None:
    cache = make_cache(4, next_token=True)
    first, other = [*range(8), 50, 51], [*range(8), 60, 61]
    assert run_request(cache, "a", first, kv_len=9, epoch=1) == 0
    assert cached_len(cache, [*range(8), 50]) == 8
    assert run_request(cache, "b", other, kv_len=9, epoch=2) == 4
    assert cached_len(cache, [*range(8), 60]) == 8
    assert cached_len(cache, [*range(8), 50]) == 8


def test_without_such_a_group_the_token_behind_does_not_matter() -> None:
    cache = make_cache(4, next_token=False)
    run_request(cache, "a", [*range(8), 50], kv_len=8, epoch=1)
    assert cached_len(cache, [*range(8), 60]) == 8


def test_a_page_whose_next_token_was_cut_off_is_not_shared() -> None:
    cache = make_cache(4, next_token=True)
    run_request(cache, "a", list(range(8)), kv_len=8, epoch=1)
    assert cached_len(cache, [*range(8), 8]) == 4


def test_a_tree_whose_pages_do_not_continue_each_other_is_reported() -> None:
    cache = make_cache(4, next_token=True)
    run_request(cache, "a", list(range(13)), kv_len=12, epoch=1)
    (node, _, _) = cache._tree.walk(list(range(13)), NO_KEYS, max_pages=3)
    node.key = (0, 1, 2, 3, 99)
    with pytest.raises(IntegrityError, match=r"the token behind a page of the prefix tree must be"):
        cache.check_integrity()
