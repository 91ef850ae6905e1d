import gc

import pytest

from paceline.cache.page_keys import NO_KEYS, MediaSpan, PageKeys
from paceline.cache.prefix_tree import Node, PrefixTree
from paceline.core.errors import IntegrityError

FULL, WINDOWED = 0, 1
TOKENS = list(range(12))


def stored_path(tree: PrefixTree, tokens: list[int], first_page: int, keys: PageKeys = NO_KEYS):
    """Store every whole page of `tokens` in both groups, unlocked."""
    node, path = tree.root(keys), []
    for index in range(len(tokens) // 2):
        node = tree.child(node, tree.key(tokens, index, keys))
        for group in (FULL, WINDOWED):
            if node.pages[group] is None:
                tree.put(node, group, first_page + index)
            else:
                tree.lock(node, group)
        path.append(node)
    for node in path:
        for group in (FULL, WINDOWED):
            tree.unlock(node, group)
    return path


@pytest.fixture
def tree() -> PrefixTree:
    return PrefixTree(2, [True, False])


def test_walk_finds_the_longest_stored_path_of_whole_pages(tree):
    path = stored_path(tree, TOKENS, 1)
    assert tree.walk(TOKENS, NO_KEYS, max_pages=99) == path
    assert tree.walk(TOKENS, NO_KEYS, max_pages=2) == path[:2]
    assert tree.walk([*TOKENS[:5], 99], NO_KEYS, max_pages=99) == path[:2]
    assert tree.walk([99, *TOKENS], NO_KEYS, max_pages=99) == []


def test_salts_share_nothing(tree):
    stored_path(tree, TOKENS, 1, PageKeys("a"))
    assert (
        tree.walk(TOKENS, NO_KEYS, max_pages=9)
        == tree.walk(TOKENS, PageKeys("b"), max_pages=9)
        == []
    )
    assert len(tree.walk(TOKENS, PageKeys("a"), max_pages=9)) == 6


def test_leaf_first_group_is_evicted_from_the_leaves(tree):
    stored_path(tree, TOKENS, 1)
    assert tree.evict(FULL, 4) == [6, 5, 4, 3]
    assert tree.evict(FULL, 9) == [2, 1]


def test_windowed_group_is_evicted_anywhere_oldest_first(tree):
    stored_path(tree, TOKENS, 1)
    assert tree.evict(WINDOWED, 2) == [1, 2]


def test_least_recently_used_branch_goes_first(tree):
    first = stored_path(tree, TOKENS[:4], 1)
    stored_path(tree, [*TOKENS[:2], 50, 51], 10)
    for node in first:
        tree.lock(node, FULL)
    for node in first:
        tree.unlock(node, FULL)
    assert tree.evict(FULL, 9) == [11, 2, 1]


def test_locked_pages_are_not_evicted(tree):
    path = stored_path(tree, TOKENS, 1)
    for node in path[:3]:
        tree.lock(node, FULL)
    tree.lock(path[4], WINDOWED)
    assert tree.num_evictable(FULL) == 3
    assert tree.evict(FULL, 9) == [6, 5, 4]
    assert tree.evict(WINDOWED, 9) == [1, 2, 3, 4, 6]


def test_locks_of_a_whole_path_are_locks_of_each_node():
    trees = [PrefixTree(2, [True, False]) for _ in range(2)]
    one, other = [stored_path(tree, TOKENS, 1) for tree in trees]
    for count, group in ((4, FULL), (6, FULL), (2, WINDOWED), (4, FULL)):
        pages = [trees[0].lock(node, group) for node in one[:count]]
        assert trees[1].lock_all(other[:count], group) == pages == list(range(1, count + 1))
    assert [node.locks for node in other] == [node.locks for node in one]
    for count in (6, 4):
        for node in one[:count]:
            trees[0].unlock(node, FULL)
        trees[1].unlock_all(other[:count], FULL)
        found = [(tree.num_evictable(FULL), tree.num_evictable(WINDOWED)) for tree in trees]
        assert found == [(2, 4)] * 2
    trees[0].unlock(one[0], WINDOWED)
    trees[1].unlock_all([other[0]], WINDOWED)
    trees[1].unlock_all(other[:4], FULL)
    for node in one[:4]:
        trees[0].unlock(node, FULL)
    for group in (FULL, WINDOWED):
        evicted = [tree.evict(group, 9) for tree in trees]
        assert evicted[0] == evicted[1] != []


def test_nodes_without_pages_disappear(tree):
    stored_path(tree, TOKENS, 1)
    tree.evict(FULL, 9)
    assert len(list(tree.nodes())) == 7
    tree.evict(WINDOWED, 9)
    assert list(tree.nodes()) == []


def test_a_detached_subtree_is_found_no_more_and_its_pages_come_back(tree):
    path = stored_path(tree, TOKENS, 1)
    tree.detach(path[2])
    assert tree.walk(TOKENS, NO_KEYS, max_pages=9) == path[:2]
    tree.check_integrity()
    assert sorted(tree.evict(FULL, 9)) == [1, 2, 3, 4, 5, 6]
    assert sorted(tree.evict(WINDOWED, 9)) == [1, 2, 3, 4, 5, 6]
    assert list(tree.nodes()) == []


def test_the_eviction_order_does_not_grow_with_use(tree):
    path = stored_path(tree, TOKENS, 1)
    for _ in range(1000):
        for node in path:
            tree.lock(node, FULL)
        for node in path:
            tree.unlock(node, FULL)
    assert len(tree._orders[FULL]) == 1
    assert not tree._orders[FULL]._heap
    assert tree.evict(FULL, 9) == [6, 5, 4, 3, 2, 1]


def test_counts_that_disagree_with_nodes_are_reported(tree):
    path = stored_path(tree, TOKENS, 1)
    tree.check_integrity()
    path[1].held_children = (0, 1)
    with pytest.raises(
        IntegrityError, match=r"held children .* must be 1 by nodes, got 0 by count"
    ):
        tree.check_integrity()
    path[1].held_children = (1, 1)
    path[5].locks = (0, 1)
    with pytest.raises(IntegrityError, match=r"evictable pages .* must be \[6, 5\] by nodes"):
        tree.check_integrity()


def test_a_hole_in_a_leaf_first_path_is_reported(tree):
    path: list[Node] = stored_path(tree, TOKENS, 1)
    path[2].pages = (None, path[2].pages[WINDOWED])
    path[1].held_children = (0, 1)
    with pytest.raises(IntegrityError, match="whole leaf-first paths"):
        tree.check_integrity()


def test_a_stored_page_leaves_the_garbage_collector_one_object():
    tree, num_pages = PrefixTree(2, [True]), 400
    gc.collect()
    before = len(gc.get_objects())
    for first in range(0, num_pages, 10):
        node = tree.root(NO_KEYS)
        for index in range(10):
            node = tree.child(node, (first, index))
            tree.put(node, 0, first + index + 1)
            tree.unlock(node, 0)
    for _ in range(3):  # a tuple is let go of once what it holds has been
        gc.collect()
    assert len(gc.get_objects()) - before <= num_pages + 20


def test_a_key_says_what_of_the_media_covers_its_page():
    """The example of page_keys.py, and its placeholders without media."""
    tree, prompt = PrefixTree(4, [True]), [7, 9, 9, 9, 9, 9, 8, 8, 6]
    keys = PageKeys(media=(MediaSpan(1, 6, "m"),))
    assert tree.key(prompt, 0, keys) == (7, 9, 9, 9, "m", 1, 4)
    assert tree.key(prompt, 1, keys) == (9, 9, 8, 8, "m", -3, 2)
    assert tree.key(prompt, 0) == (7, 9, 9, 9)
    two = PageKeys(media=(MediaSpan(0, 2, "a"), MediaSpan(2, 9, "b")))
    assert tree.key(prompt, 0, two) == (7, 9, 9, 9, "a", 0, 2, "b", 2, 4)
    behind = PrefixTree(4, [True], next_token=True)
    assert behind.key(prompt, 0, keys) == (7, 9, 9, 9, 9, "m", 1, 5)
    assert behind.key(prompt, 0, PageKeys(media=(MediaSpan(4, 6, "m"),)))[5:] == ("m", 4, 5)


def test_a_key_of_media_is_no_container_to_a_collection_of_garbage():
    keys = PageKeys(media=(MediaSpan(1, 6, "m"),))
    key = PrefixTree(4, [True]).key([7, 9, 9, 9], 0, keys)
    gc.collect()
    assert not gc.is_tracked(key)


def test_paths_of_different_adapters_and_salts_have_different_roots():
    salts, adapters = (None, "a", "b"), (None, "a", "b")
    assert len({PageKeys(salt, adapter).root for salt in salts for adapter in adapters}) == 9
    assert PageKeys("a", media=(MediaSpan(0, 1, "m"),)).root == PageKeys("a").root
