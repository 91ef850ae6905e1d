import pytest

from cache_probe import cached_len, num_shared_pages
from paceline.cache.manager import CacheManager
from paceline.cache.page_keys import NO_KEYS, MediaSpan, PageKeys
from paceline.core.errors import ConfigError, IntegrityError
from paceline.core.model.cache_groups import CacheGroupSpec
from paceline.core.model.config import kv_parts

TOKENS = list(range(100, 140))


def spec(window: int | None = None, page_size: int = 4) -> CacheGroupSpec:
    return CacheGroupSpec(
        name="full" if window is None else f"window-{window}",
        layer_ids=(0,),
        window=window,
        page_size=page_size,
        parts=kv_parts(1, 8, 8),
    )


def make_cache(*windows: int | None, num_pages: int = 21, enable: bool = True) -> CacheManager:
    return CacheManager(
        [spec(window) for window in windows],
        [num_pages] * len(windows),
        max_extend_len=16,
        enable_prefix_cache=enable,
    )


def run_request(
    cache: CacheManager, name: str, tokens: list[int], epoch: int, keys: PageKeys = NO_KEYS
) -> int:
    """Admit, compute in one step and release; returns the hit."""
    admission = cache.admit(name, tokens, reserve_to=len(tokens), keys=keys)
    assert admission is not None
    for kv_len in range(admission.prefix_len, len(tokens) + 1, 8):
        assert cache.reserve(name, kv_len, ahead=0) is not None
        cache.retire(epoch)
        cache.written(name, tokens, kv_len, epoch=epoch)
        cache.advance_window(name, kv_len, epoch=epoch)
    cache.reserve(name, len(tokens), ahead=0)
    cache.release(name, tokens, len(tokens), epoch=epoch)
    cache.check_integrity()
    return admission.prefix_len


def test_a_fully_cached_prompt_leaves_a_token_to_compute():
    cache = make_cache(None)
    assert run_request(cache, "a", TOKENS[:16], 1) == 0
    assert cached_len(cache, TOKENS[:16]) == 12
    assert cached_len(cache, TOKENS[:17]) == 16
    assert run_request(cache, "b", TOKENS[:16], 2) == 12
    assert cache.stats().hit_tokens == 12
    assert cache.stats().queried_tokens == 32


def test_hit_is_the_longest_every_group_can_use():
    cache = make_cache(None, 6)
    run_request(cache, "a", TOKENS[:32], 1)
    assert cached_len(cache, TOKENS) == 32
    windowed = cache._groups[1]
    windowed.pool.free(cache._tree.evict(1, 6), 1)  # the oldest: pages 0..5 of 8
    assert cached_len(cache, TOKENS) == 32
    assert cached_len(cache, TOKENS[:28]) == 0
    cache.check_integrity()


def test_admission_gives_a_windowed_group_only_the_pages_its_queries_see():
    cache = make_cache(None, 6)
    run_request(cache, "a", TOKENS[:24], 1)
    admission = cache.admit("b", TOKENS[:24], reserve_to=24)
    assert admission is not None
    assert admission.prefix_len == 20
    full, windowed = admission.page_runs
    assert (full.start, len(full.page_ids)) == (0, 6)
    assert (windowed.start, len(windowed.page_ids)) == (3, 3)  # keys from 15, and page 5


def test_a_refused_admission_changes_nothing():
    cache = make_cache(None, None, num_pages=8)
    run_request(cache, "a", TOKENS[:12], 1)
    before = cache.stats()
    assert cache.admit("b", TOKENS[:32], reserve_to=32) is None
    assert cache.stats() == before
    cache.check_integrity()


def test_the_second_of_two_equal_requests_keeps_its_pages_private():
    cache = make_cache(None)
    for name in "ab":
        cache.admit(name, TOKENS[:10], reserve_to=10)
    cache.retire(1)
    cache.written("a", TOKENS[:10], 10, epoch=1)
    cache.written("b", TOKENS[:10], 10, epoch=1)
    counts = cache.stats().groups[0]
    assert (counts.cached, counts.owned) == (2, 4)
    assert num_shared_pages(cache, "b") == 0
    cache.release("b", TOKENS[:10], 10, epoch=1)
    cache.release("a", TOKENS[:10], 10, epoch=1)
    counts = cache.stats().groups[0]
    assert (counts.cached, counts.owned, counts.free) == (2, 0, 18)
    cache.check_integrity()


def test_what_follows_pages_that_another_stored_first_is_found_once_its_request_has_left():
    cache = make_cache(None)
    for name in "ab":
        cache.admit(name, TOKENS[:8], reserve_to=20)
    cache.retire(1)
    for name in "ab":  # both computed the same two pages: b's stay private
        cache.written(name, TOKENS[:8], 8, epoch=1)
    cache.retire(2)
    cache.written("b", TOKENS[:17], 16, epoch=2)
    assert cached_len(cache, TOKENS[:17]) == 8
    cache.release("b", TOKENS[:17], 16, epoch=2)
    assert cached_len(cache, TOKENS[:17]) == 16
    cache.check_integrity()


def test_pages_are_shared_before_their_owner_ends():
    cache = make_cache(None)
    cache.admit("a", TOKENS[:10], reserve_to=10)
    cache.retire(1)
    cache.written("a", TOKENS[:10], 10, epoch=1)
    cache.admit("b", TOKENS[:10], reserve_to=10)
    assert num_shared_pages(cache, "a") == num_shared_pages(cache, "b") == 2


@pytest.mark.parametrize("window", [None, 64])
def test_a_path_evicted_under_a_running_request_is_built_again(window):
    cache = make_cache(window)
    for name in "ab":
        cache.admit(name, TOKENS[:12], reserve_to=20)
        cache.reserve(name, 20, ahead=0)
    cache.retire(1)
    for name in "ab":
        cache.written(name, TOKENS[:20], 12, epoch=1)  # pages of b stay private: a was first
    cache.release("a", TOKENS[:20], 12, epoch=1)
    cache.offer_written()
    group = cache._groups[0]
    group.pool.free(cache._tree.evict(0, 9), 1)
    cache.written("b", TOKENS[:20], 16, epoch=1)
    cache.check_integrity()
    assert cached_len(cache, TOKENS) == 16


def test_a_host_end_limits_what_enters_the_tree():
    cache = make_cache(None)
    cache.admit("a", TOKENS[:4], reserve_to=16)
    cache.retire(1)
    cache.release("a", TOKENS[:9], 9, epoch=1)  # the tokens behind 9 were cut
    assert cached_len(cache, TOKENS[:16]) == 8


def test_discarded_kv_is_found_no_more_but_the_hit_before_it_is():
    cache = make_cache(None)
    run_request(cache, "a", TOKENS[:8], 1)
    cache.admit("b", TOKENS[:20], reserve_to=20)
    cache.retire(2)
    cache.written("b", TOKENS[:20], 16, epoch=2)
    assert cached_len(cache, TOKENS[:20]) == 16
    cache.discard("b", TOKENS[:20], epoch=2)
    assert cached_len(cache, TOKENS[:20]) == 8
    cache.check_integrity()
    assert run_request(cache, "c", TOKENS[:20], 3) == 8
    assert cached_len(cache, TOKENS) == 20


def test_eviction_spares_locked_pages_and_takes_the_rest():
    cache = make_cache(None, num_pages=11)
    run_request(cache, "a", TOKENS[:16], 1)
    run_request(cache, "b", [*TOKENS[20:36]], 2)
    cache.admit("c", TOKENS[:10], reserve_to=10)  # locks two pages of a
    assert cache.admit("d", [7] * 28, reserve_to=28) is not None
    assert cached_len(cache, TOKENS[:16]) == 8
    assert cache.stats().evicted_pages == 6
    assert cache.admit("e", [8], reserve_to=1) is None


def test_released_pages_wait_for_their_epoch():
    cache = make_cache(None, num_pages=5)
    cache.admit("a", TOKENS[:16], reserve_to=16)
    cache.admit("b", [1], reserve_to=1)
    cache.release("a", TOKENS[:16], 0, epoch=5)
    assert cache.admit("b", [1], reserve_to=1) is None
    cache.retire(5)
    assert cache.admit("b", [1], reserve_to=1) is not None


def test_reserve_is_silent_in_steady_decode_and_grows_ahead():
    cache = make_cache(None, num_pages=101)
    cache.admit("a", TOKENS[:5], reserve_to=8)
    grown = [n for n in range(6, 60) if cache.reserve("a", n, ahead=32)]
    assert grown == [9, 45]


def test_relief_is_pending_only_while_pages_are_on_their_way():
    cache = make_cache(None, num_pages=5)
    cache.admit("a", TOKENS[:8], reserve_to=8)
    cache.admit("b", TOKENS[20:28], reserve_to=8)
    assert cache.reserve("a", 9, ahead=0) is None
    assert not cache.relief_pending("a", 9, next_query=8)
    cache.release("b", TOKENS[20:28], 0, epoch=3)
    assert cache.relief_pending("a", 9, next_query=8)
    cache.retire(3)
    assert cache.reserve("a", 9, ahead=0)


def test_capacity_reports_both_numbers_per_group():
    cache = make_cache(None, 6, num_pages=11)
    assert cache.can_ever_fit(40) == (True, (10, 6), (10, 10))
    assert cache.can_ever_fit(41) == (False, (11, 6), (10, 10))


def test_a_disabled_prefix_cache_stores_nothing():
    cache = make_cache(None, enable=False)
    assert run_request(cache, "a", TOKENS[:16], 1) == 0
    assert run_request(cache, "b", TOKENS[:16], 2) == 0
    assert cache.stats().groups[0].free == 20


def test_salts_do_not_share():
    cache = make_cache(None)
    run_request(cache, "a", TOKENS[:16], 1, PageKeys("x"))
    assert cached_len(cache, TOKENS[:16]) == 0
    assert cached_len(cache, TOKENS[:16], PageKeys("x")) == 12


def test_kv_of_an_unretired_epoch_is_refused():
    cache = make_cache(None)
    cache.admit("a", TOKENS[:8], reserve_to=8)
    with pytest.raises(IntegrityError, match=r"at most 0 \(retired\), got 2; call retire before"):
        cache.written("a", TOKENS[:8], 8, epoch=2)


def test_groups_of_different_page_sizes_are_refused():
    with pytest.raises(ConfigError, match=r"must be one size for all, got \[4, 8\]"):
        CacheManager([spec(None, 4), spec(6, 8)], [9, 9], max_extend_len=8)


def test_books_that_disagree_with_requests_are_reported():
    cache = make_cache(None)
    cache.admit("a", TOKENS[:8], reserve_to=8)
    cache._entries.clear()
    with pytest.raises(
        IntegrityError, match="owned pages of cache group 'full' must be 0 by requests and tree"
    ):
        cache.check_integrity()


def test_locks_that_wait_for_their_epoch_are_relief_and_spare_their_pages():
    cache = make_cache(None, num_pages=5)
    run_request(cache, "a", TOKENS[:8], 1)
    cache.admit("b", TOKENS[:9], reserve_to=8)  # two pages of the tree, and none of its own
    cache.admit("c", [7] * 8, reserve_to=8)
    assert cache.reserve("c", 9, ahead=0) is None
    assert not cache.relief_pending("c", 9, next_query=8)
    cache.release("b", TOKENS[:8], 8, epoch=5)
    assert cache.stats().groups[0].queued == 0
    assert cache.relief_pending("c", 9, next_query=8)
    cache.retire(4)
    assert cache.reserve("c", 9, ahead=0) is None  # a step in flight still reads them
    cache.retire(5)
    assert cache.reserve("c", 9, ahead=0)
    cache.check_integrity()


@pytest.mark.parametrize("enable", [False, True])
@pytest.mark.parametrize("asks", ["admit", "reserve", "relief", "stats"])
def test_what_a_request_held_is_taken_back_once_somebody_asks(asks, enable):
    """Not by `release`: the tokens that its caller waits for leave first."""
    cache = make_cache(None, num_pages=5, enable=enable)
    cache.admit("a", TOKENS[:8], reserve_to=8)
    cache.admit("b", [7] * 8, reserve_to=8)
    cache.retire(1)
    cache.written("a", TOKENS[:8], 8, epoch=1)
    cache.release("a", TOKENS[:8], 8, epoch=1)
    pool, held = cache._groups[0].pool, 8 // 4
    assert (pool.num_free, pool.counts().owned) == (0, 2 * held)
    if asks == "admit":
        assert cache.admit("c", [8] * 8, reserve_to=8)
    elif asks == "reserve":
        assert cache.reserve("b", 16, ahead=0)
    elif asks == "relief":
        assert not cache.relief_pending("b", 17, next_query=8)
        assert pool.counts().owned == held
    else:
        assert cache.stats().groups[0].cached == (held if enable else 0)
    cache.check_integrity()


def test_pages_that_fall_behind_the_window_are_relief():
    cache = make_cache(6, num_pages=4)
    cache.admit("a", TOKENS[:8], reserve_to=8)
    cache.reserve("a", 12, ahead=0)
    assert cache.reserve("a", 13, ahead=0) is None
    assert not cache.relief_pending("a", 13, next_query=8)  # sees keys from 3 on
    assert cache.relief_pending("a", 13, next_query=9)


def test_a_hit_that_one_group_shortens_is_asked_of_the_others_again():
    """Of 8 pages, window 6 lacks page 4 and window 10 lacks page 6.

    The second ends the hit at 6 pages, where the first would see pages 4 and 5: so it ends at 4.
    """
    cache = make_cache(6, 10)
    run_request(cache, "a", TOKENS[:32], 1)
    path = cache._tree.walk(TOKENS, NO_KEYS, max_pages=8)
    for group, lost in ((0, 4), (1, 6)):
        for index, node in enumerate(path):
            if index != lost:  # used since
                cache._tree.lock(node, group)
                cache._tree.unlock(node, group)
        cache._groups[group].pool.free(cache._tree.evict(group, 1), 1)
        assert path[lost].pages[group] is None
    assert cached_len(cache, TOKENS[:33]) == 16


def test_a_group_that_is_short_keeps_all_from_growing():
    cache = CacheManager([spec(None), spec(6)], [21, 4], max_extend_len=8)
    cache.admit("a", TOKENS[:8], reserve_to=8)
    assert cache.reserve("a", 12, ahead=0) is not None
    before = cache.stats()
    assert cache.reserve("a", 13, ahead=0) is None
    assert cache.stats() == before


def test_a_group_with_less_room_is_grown_though_another_has_enough():
    cache = CacheManager([spec(None), spec(6)], [21, 9], max_extend_len=4)
    cache.admit("a", TOKENS[:16], reserve_to=16)  # the windowed group: for one step
    assert [run.group for run in cache.reserve("a", 8, ahead=0)] == [1]


def test_a_hit_may_be_bounded_to_what_need_not_be_computed():
    cache = make_cache(None)
    run_request(cache, "a", TOKENS[:16], 1)
    for most, hit in ((0, 0), (3, 0), (7, 4), (8, 8), (99, 12)):
        name = f"b{most}"
        assert cache.admit(name, TOKENS[:16], reserve_to=16, max_hit=most).prefix_len == hit
        cache.release(name, TOKENS[:16], hit, epoch=1)


def test_a_prompt_longer_than_a_page_may_be_shared():
    assert [make_cache(None).shares(num) for num in (3, 4, 5)] == [False, False, True]
    assert not make_cache(None, enable=False).shares(99)


def test_nothing_a_discarded_request_computed_is_found_whatever_its_length():
    cache = make_cache(None)
    cache.admit("a", TOKENS[:12], reserve_to=12)
    cache.retire(1)
    cache.written("a", TOKENS[:12], 12, epoch=1)
    cache.discard("a", TOKENS[:12], epoch=1)
    assert cached_len(cache, TOKENS[:12]) == 0
    cache.check_integrity()


def test_salts_are_kept_through_written_and_release():
    cache = make_cache(None)
    for name, keys in (("a", PageKeys("x")), ("b", PageKeys("y"))):
        cache.admit(name, TOKENS[:12], reserve_to=12, keys=keys)
        cache.retire(1)
        cache.written(name, TOKENS[:12], 8, epoch=1)
        assert cached_len(cache, TOKENS[:12], keys) == 8
        cache.release(name, TOKENS[:12], 12, epoch=1)
        assert cached_len(cache, [*TOKENS[:12], 1], keys) == 12
    assert cached_len(cache, TOKENS[:12]) == 0


def test_no_page_is_shared_below_one_that_stayed_private():
    """`b` holds nothing of the path that `a` shared first, so what it adds would outlive it."""
    cache = make_cache(None)
    for name in "ab":
        cache.admit(name, TOKENS[:12], reserve_to=12)
    cache.retire(1)
    cache.written("a", TOKENS[:12], 8, epoch=1)
    cache.written("b", TOKENS[:12], 12, epoch=1)
    assert cache.stats().groups[0].cached == 2
    cache.release("a", TOKENS[:8], 8, epoch=1)
    cache.check_integrity()


def test_a_host_end_before_kv_that_is_written_shares_nothing_behind_it():
    cache = make_cache(None)
    for name in "ab":
        cache.admit(name, TOKENS[:16], reserve_to=16)
    cache.retire(1)
    for name in "ab":
        cache.written(name, TOKENS[:16], 16, epoch=1)
    cache.release("b", TOKENS[:9], 16, epoch=1)
    cache.release("a", TOKENS[:16], 16, epoch=1)
    counts = cache.stats().groups[0]
    assert (counts.cached, counts.owned, counts.free) == (4, 0, 16)
    cache.check_integrity()


def pictured(*spans: tuple[int, int, str]) -> PageKeys:
    return PageKeys(media=tuple(MediaSpan(*span) for span in spans))


@pytest.mark.parametrize(
    ("first", "second", "hit"),
    [
        pytest.param(pictured((6, 14, "m")), pictured((6, 14, "m")), 20, id="the same"),
        pytest.param(pictured((6, 14, "m")), pictured((6, 14, "n")), 4, id="other media"),
        pytest.param(pictured((6, 14, "m")), NO_KEYS, 4, id="ids that stand for themselves"),
        pytest.param(NO_KEYS, pictured((6, 14, "m")), 4, id="ids that stand for something"),
        pytest.param(pictured((6, 14, "m")), pictured((5, 14, "m")), 4, id="one token earlier"),
        pytest.param(pictured((6, 14, "m")), pictured((6, 13, "m")), 12, id="one token shorter"),
        pytest.param(pictured((6, 14, "m"), (16, 18, "n")), pictured((6, 14, "m")), 16, id="fewer"),
        pytest.param(PageKeys(adapter="x"), PageKeys(adapter="y"), 0, id="other adapter"),
        pytest.param(PageKeys(adapter="x"), PageKeys("x"), 0, id="a salt that is called alike"),
        pytest.param(PageKeys("s", "x"), PageKeys("s", "x"), 20, id="the same adapter and salt"),
    ],
)
def test_equal_ids_share_what_depends_on_equal_things(first, second, hit):
    cache = make_cache(None)
    run_request(cache, "a", TOKENS[:24], 1, first)
    assert run_request(cache, "b", TOKENS[:24], 2, second) == hit


def test_a_hit_may_end_within_media_whose_begin_is_in_the_keys():
    """Pages of 4 and media of tokens 2 to 14: a prompt of 11 tokens of it finds two pages."""
    cache = make_cache(None)
    run_request(cache, "a", TOKENS[:24], 1, pictured((2, 14, "m")))
    assert cached_len(cache, TOKENS[:11], pictured((2, 14, "m"))) == 8
    assert cached_len(cache, TOKENS[:11], pictured((2, 14, "n"))) == 0


def test_what_not_finite_media_made_is_found_by_nobody_and_other_media_stay():
    cache = make_cache(None)
    keys, others = pictured((2, 6, "m")), pictured((2, 6, "n"))
    run_request(cache, "others", TOKENS[:12], 1, others)
    cache.admit("a", TOKENS[:12], reserve_to=12, keys=keys)
    cache.retire(2)
    cache.written("a", TOKENS[:12], 8, epoch=2)
    assert cached_len(cache, TOKENS[:12], keys) == 8
    cache.discard("a", TOKENS[:12], epoch=2)
    assert cached_len(cache, TOKENS[:12], keys) == 0
    assert cached_len(cache, TOKENS[:12], others) == 8
    cache.check_integrity()
