import pytest

from paceline.cache.groups import PagedGroup, PageRun
from paceline.cache.page_keys import NO_KEYS
from paceline.cache.prefix_tree import PrefixTree
from paceline.core.errors import IntegrityError
from paceline.core.model.cache_groups import CacheGroupSpec
from paceline.core.model.config import kv_parts
from paceline.core.model.lookback import Chunk, Lookback


def make_group(
    window: Lookback | None, *, page_size: int = 4, num_pages: int = 33, max_extend_len: int = 8
) -> PagedGroup:
    spec = CacheGroupSpec(
        name="full" if window is None else f"window-{window}",
        layer_ids=(0,),
        window=window,
        page_size=page_size,
        parts=kv_parts(1, 8, 8),
    )
    tree = PrefixTree(page_size, [window is None])
    return PagedGroup(spec, 0, tree, num_pages=num_pages, max_extend_len=max_extend_len)


def path_of(group: PagedGroup, present: list[bool]):
    """A tree path that stores a page where `present` says so."""
    tree = group._tree
    node, path = tree.root(NO_KEYS), []
    for index, has_page in enumerate(present):
        node = tree.child(node, (index,))
        if has_page:
            tree.put(node, 0, group.pool.reserve(1)[0])
            tree.unlock(node, 0)
        path.append(node)
    return path


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
@pytest.mark.parametrize("window", [None, 1, 2, 5, 16, 17])
def test_first_visible_page_holds_the_lowest_key_of_the_mask(window, page_size):
    group = make_group(window, page_size=page_size)
    for query in range(60):
        visible = [key for key in range(query + 1) if window is None or key > query - window]
        assert group.first_visible_page(query) == visible[0] // page_size


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
@pytest.mark.parametrize("size", [1, 5, 16])
def test_pages_behind_a_chunk_return_and_no_others(size, page_size):
    group = make_group(Chunk(size), page_size=page_size)
    most = 0
    for query in range(60):
        visible = [key for key in range(query + 1) if key // size == query // size]
        assert group.first_visible_page(query) == visible[0] // page_size
        most = max(most, (query + 7) // page_size - visible[0] // page_size + 1)
    assert most <= group.pages_to_fit(10_000) <= most + 1


def test_a_hit_that_ends_with_a_chunk_needs_no_stored_page():
    group = make_group(Chunk(8))
    assert group.usable_prefix(path_of(group, [False, False, True, False]), 4) == 4
    group = make_group(Chunk(8))
    assert group.usable_prefix(path_of(group, [False, False, True, False]), 3) == 3
    group = make_group(Chunk(16))
    assert group.usable_prefix(path_of(group, [False, True, True, False]), 3) == 0


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
@pytest.mark.parametrize("window", [1, 2, 5, 16, 17])
@pytest.mark.parametrize("extend", [1, 7, 8])
def test_pages_to_fit_covers_one_step_at_every_alignment(window, page_size, extend):
    group = make_group(window, page_size=page_size, max_extend_len=extend)
    spans = [
        (prefix + extend - 1) // page_size - group.first_visible_page(prefix) + 1
        for prefix in range(200)
    ]
    assert group.pages_to_fit(10_000) == max(spans)
    assert group.pages_to_fit(1) == 1


def test_full_group_uses_the_prefix_up_to_the_first_hole():
    group = make_group(None)
    assert group.usable_prefix(path_of(group, [True, True, False, True]), 4) == 2
    group = make_group(None)
    assert group.usable_prefix(path_of(group, [False, True]), 2) == 0


@pytest.mark.parametrize("stored", [1, 2, 3])
def test_every_length_of_hit_is_found(stored):
    group = make_group(None)
    assert group.usable_prefix(path_of(group, [True] * stored + [False]), stored + 1) == stored


def test_windowed_group_uses_a_prefix_whose_last_window_is_stored():
    group = make_group(6)  # a hit of n pages of 4 tokens sees keys from 4n - 5: two pages
    path = path_of(group, [False, False, True, True, False, True])
    assert group.usable_prefix(path, 6) == 4
    assert group.usable_prefix(path, 3) == 0


def test_a_window_of_one_needs_no_stored_page():
    group = make_group(1)
    assert group.usable_prefix(path_of(group, [False, False]), 2) == 2


def test_reserving_ahead_leaves_a_tight_pool_alone():
    group = make_group(None, num_pages=33)
    holding, run = group.admit([], 10)
    assert run == PageRun(0, 0, (1, 2, 3))
    assert group.reserve(holding, 12, 0) is None
    assert group.reserve(holding, 13, 8) == PageRun(0, 3, (4, 5, 6))
    other, _ = group.admit([], 4 * 22)
    assert group.pool.num_free == 4
    assert group.reserve(other, 4 * 22 + 1, 8) == PageRun(0, 22, (29,))


def test_windowed_group_returns_pages_behind_the_lowest_query():
    group = make_group(6)
    holding, _ = group.admit([], 8)
    group.reserve(holding, 20, 0)
    group.advance(holding, 8, 3)
    assert (holding.first, group.pool.num_queued) == (0, 0)
    group.advance(holding, 9, 3)
    assert (holding.first, group.pool.num_queued) == (1, 1)
    group.retire(3)
    assert group.pool.num_queued == 0
    assert group.pool.counts().owned == 4


def test_windowed_admission_reserves_for_one_step_only():
    group = make_group(6, max_extend_len=8)
    _, run = group.admit([], 100)
    assert len(run.page_ids) == 2


def test_committing_more_than_is_reserved_is_refused():
    group = make_group(None)
    holding, _ = group.admit([], 4)
    with pytest.raises(IntegrityError, match=r"must be at most 4 \(reserved\), got 5"):
        group.commit(holding, 5, 1)


def test_an_admission_holds_pages_ahead_only_while_half_of_the_pool_stays_free():
    group = make_group(None, num_pages=33)
    _, run = group.admit([], 4 * 4, ahead=4 * 8)
    assert len(run.page_ids) == 12
    _, run = group.admit([], 4 * 2, ahead=4 * 8)
    assert len(run.page_ids) == 4  # 20 were free, 16 are
    _, run = group.admit([], 4 * 2, ahead=4 * 8)
    assert len(run.page_ids) == 2
