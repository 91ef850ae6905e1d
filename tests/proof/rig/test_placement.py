"""Where a batch lies: distinct, elsewhere each time, and never in order by chance."""

from collections import Counter
from dataclasses import replace

import pytest
from oracle_cases import PLAIN

from paceline.proof.rig import placement as module
from paceline.proof.rig.placement import RETURNED, groups, place, shared_pages, slots
from paceline.proof.suite.case import Batch, Layer, PageLayout

LONG = replace(
    PLAIN,
    batches=(Batch((18, 9, 33, 0), (5, 1, 2, 3)), Batch((18, 9, 33, 0), (5, 1, 2, 3))),
)
NOT_IN_ORDER = [layout for layout in PageLayout if layout is not PageLayout.CONTIGUOUS]


@pytest.mark.parametrize("layout", PageLayout)
def test_no_two_requests_hold_one_page_but_of_the_shared_prefix(layout: PageLayout) -> None:
    case = replace(LONG, layout=layout, batches=(Batch((18, 9, 33), (5, 1, 2)),))
    placed = place(case, 0)
    shared = shared_pages(case, case.batches[0])
    held = Counter(page for pages in placed.pages[0] for page in pages)
    common = placed.pages[0][0][:shared]
    assert [page for page, count in held.items() if count > 1] == list(common)
    assert all(0 < page < placed.pool_pages[0] for page in held)
    assert (shared > 0) == (layout is PageLayout.SHARED_PREFIX)


@pytest.mark.parametrize("layout", NOT_IN_ORDER)
def test_no_request_of_two_pages_lies_in_order(layout: PageLayout) -> None:
    for seed in range(40):
        case = replace(LONG, layout=layout, seed=seed, batches=(Batch((5, 4, 30), (1, 1, 1)),))
        for pages in place(case, 0).pages[0]:
            assert len(pages) > 1
            assert list(pages) != list(range(pages[0], pages[0] + len(pages)))


def test_one_interleaved_request_is_not_contiguous() -> None:
    case = replace(LONG, layout=PageLayout.INTERLEAVED, batches=(Batch((9,), (1,)),))
    first, second, third = place(case, 0).pages[0][0]
    assert (second - first, third - second) == (2, 2)


def test_a_layout_that_is_in_order_after_all_is_an_assertion(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = replace(LONG, name="orderly", layout=PageLayout.REVERSED)
    monkeypatch.setattr(module, "_held_pages", lambda *_: [[1, 2, 3, 4, 5, 6]] * 4)
    with pytest.raises(AssertionError, match="orderly: batch 0 is reversed, but its pages"):
        place(replace(case, batches=(Batch((20,) * 4, (1,) * 4),)), 0)


@pytest.mark.parametrize("layout", PageLayout)
def test_every_batch_lies_elsewhere_in_one_pool(layout: PageLayout) -> None:
    case = replace(LONG, layout=layout)
    first, second = place(case, 0), place(case, 1)
    assert first.pages != second.pages
    assert first.rows != second.rows
    assert (first.pool_pages, first.num_rows) == (second.pool_pages, second.num_rows)
    assert first == place(case, 0)


def test_rows_are_distinct_and_never_the_reserved_one() -> None:
    placed = place(LONG, 0)
    assert len(set(placed.rows)) == 4
    assert all(0 < row < placed.num_rows for row in placed.rows)


def test_high_ids_lie_at_the_end_of_a_larger_pool() -> None:
    placed = place(replace(LONG, layout=PageLayout.HIGH_IDS), 0)
    held = [page for pages in placed.pages[0] for page in pages]
    assert max(held) == placed.pool_pages[0] - 1
    assert min(held) > placed.pool_pages[0] // 2


def test_pages_behind_the_window_of_the_first_query_are_returned() -> None:
    # page size 4, window 6: the query at 18 sees keys from 13 on, page 3; at 9 from 4 on, page 1
    case = replace(LONG, layers=(Layer(6), Layer(None)))
    placed = place(case, 0)
    assert groups(case) == (None, 6)
    assert [pages.count(0) for pages in placed.pages[0]] == [0, 0, 0, 0]
    assert [pages.count(0) for pages in placed.pages[1]] == [3, 1, 7, 0]
    assert placed.pages[1][0][:3] == (0, 0, 0)


def test_slots_follow_the_pages() -> None:
    placed = place(replace(LONG, layers=(Layer(6),)), 0)
    found = slots(placed, 0, 1)
    page = placed.pages[0][1][1]
    assert found[:4] == [RETURNED] * 4
    assert found[4:8] == [4 * page, 4 * page + 1, 4 * page + 2, 4 * page + 3]
    assert len(found) == 12


def test_free_pages_remain_in_every_pool() -> None:
    placed = place(LONG, 0)
    for pages, num_pages in zip(placed.pages, placed.pool_pages, strict=True):
        held = {page for of_request in pages for page in of_request}
        assert held < set(range(1, num_pages))


def test_windowed_shared_pages_are_one_copy_where_both_still_hold_them() -> None:
    case = replace(
        LONG,
        layout=PageLayout.SHARED_PREFIX,
        layers=(Layer(6),),
        batches=(Batch((16, 24), (2, 2)),),
    )
    one, other = place(case, 0).pages[0]
    assert one[:2] == (0, 0)
    assert other[:4] == (0, 0, 0, 0)
    assert not set(one[2:]) & set(other[4:])
    both = place(replace(case, batches=(Batch((16, 17), (2, 2)),)), 0).pages[0]
    assert both[0][3] == both[1][3] != 0
