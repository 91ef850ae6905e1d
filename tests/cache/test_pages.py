import random

import pytest

from paceline.cache.pages import PagePool, PageState
from paceline.core.errors import ConfigError, IntegrityError


def test_page_zero_is_never_handed_out():
    pool = PagePool("full", 5)
    assert pool.reserve(4) == [1, 2, 3, 4]
    assert pool.num_free == 0


def test_fresh_pages_are_a_run_and_growth_continues_it():
    pool = PagePool("full", 20)
    first, second = pool.reserve(3), pool.reserve(3)
    assert (first, second) == ([1, 2, 3], [4, 5, 6])
    pool.free(first, 0)
    assert pool.reserve(2, after=6) == [7, 8]
    assert pool.reserve(1) == [1]


def test_freed_pages_return_only_when_their_epoch_retires():
    pool = PagePool("full", 5)
    pages = pool.reserve(4)
    pool.free(pages[:2], 7)
    pool.free(pages[2:], 8)
    pool.retire(6)
    assert (pool.num_free, pool.num_queued) == (0, 4)
    pool.retire(7)
    assert (pool.num_free, pool.num_queued) == (2, 2)
    pool.retire(8)
    assert (pool.num_free, pool.num_queued) == (4, 0)


def test_pages_of_a_retired_epoch_are_free_at_once():
    pool = PagePool("full", 3)
    pool.retire(5)
    pool.free(pool.reserve(2), 5)
    assert pool.num_free == 2


def test_sharing_a_page_before_its_epoch_retires_is_refused():
    pool = PagePool("full", 3)
    (page,) = pool.reserve(1)
    pool.mark_written([page], 4)
    with pytest.raises(
        IntegrityError, match=r"epoch of shared page 1 .* must be at most 0 \(retired\), got 4"
    ):
        pool.share([page])
    pool.retire(4)
    pool.share([page])
    assert pool.counts().cached == 1


def test_sharing_an_unwritten_page_is_refused():
    pool = PagePool("full", 3)
    (page,) = pool.reserve(1)
    with pytest.raises(IntegrityError, match="to be shared, must be written, got reserved"):
        pool.share([page])


def test_freeing_a_page_twice_is_refused():
    pool = PagePool("full", 3)
    pages = pool.reserve(1)
    pool.free(pages, 9)
    with pytest.raises(
        IntegrityError, match=r"page 1 .* to be freed, must be reserved, got queued"
    ):
        pool.free(pages, 9)


def test_freeing_the_reserved_page_is_refused():
    with pytest.raises(IntegrityError, match="got reserved for padding"):
        PagePool("full", 3).free([0], 0)


def test_reserving_more_than_is_free_names_both_numbers():
    with pytest.raises(IntegrityError, match=r"must be at most 2 \(free\), got 3; check num_free"):
        PagePool("full", 3).reserve(3)


def test_a_pool_without_usable_pages_is_refused():
    with pytest.raises(ConfigError, match="num_pages of cache group 'full' must be at least 2"):
        PagePool("full", 1)


def test_books_that_do_not_balance_report_both_sides():
    pool = PagePool("full", 5)
    pool.reserve(1)
    pool._states[1] = PageState.FREE
    with pytest.raises(
        IntegrityError, match="must be 4 in total, got 3 free \\+ 0 queued \\+ 0 cached \\+ 0 owned"
    ):
        pool.check_integrity()
    pool._num_free += 1
    pool.check_integrity()
    pool._states[2] = PageState.WRITTEN
    pool._num_free -= 1
    pool._states[3] = PageState.QUEUED
    pool._states[4] = PageState.QUEUED
    pool._states[2] = PageState.FREE
    pool._queue[1] = [3]
    with pytest.raises(IntegrityError, match=r"free pages .* must be 2 by state, got 3 by count"):
        pool.check_integrity()


def test_no_page_is_ever_held_twice():
    rng = random.Random(0)
    pool = PagePool("full", 40)
    held: list[list[int]] = []
    for epoch in range(1, 600):
        if pool.num_free and rng.random() < 0.6:
            after = held[-1][-1] if held else 0
            held.append(pool.reserve(rng.randint(1, min(5, pool.num_free)), after=after))
        elif held:
            pool.free(held.pop(rng.randrange(len(held))), epoch + rng.randint(-2, 2))
        pool.retire(epoch - 1)
        pages = [page for run in held for page in run]
        assert len(set(pages)) == len(pages) == pool.counts().owned
        pool.check_integrity()


def test_an_epoch_told_late_takes_nothing_back():
    pool = PagePool("full", 3)
    pages = pool.reserve(2)
    pool.retire(5)
    pool.retire(3)
    pool.free(pages, 5)
    assert pool.num_free == 2


def test_a_run_goes_on_page_by_page_and_jumps_where_it_is_broken():
    pool = PagePool("full", 12)
    pool.reserve(8)
    pool.free([2, 3, 5], 0)
    assert pool.reserve(4, after=8) == [9, 10, 11, 2]
    assert pool.reserve(2, after=2) == [3, 5]
