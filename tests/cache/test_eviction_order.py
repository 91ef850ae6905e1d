"""Who goes first, whatever joined and left the order before."""

import hypothesis.strategies as st
from hypothesis import given

from paceline.cache.eviction_order import EvictionOrder

ACTIONS = st.sampled_from(["youngest", "older", "discard", "pop"])


@given(st.lists(st.tuples(ACTIONS, st.integers(0, 7)), max_size=60))
def test_the_node_with_the_lowest_stamp_goes_first(actions):
    order: EvictionOrder[int] = EvictionOrder()
    stamps: dict[int, int] = {}
    for index, (action, node) in enumerate(actions, start=10):
        if action == "discard":
            order.discard(node)
            stamps.pop(node, None)
        elif action == "pop":
            expected = min(stamps, key=stamps.__getitem__, default=None)
            assert order.pop() == expected
            stamps.pop(expected, None)
        elif node not in stamps and action == "youngest":
            stamps[node] = 100 * index
            order.add_youngest(node, stamps[node])
        elif node not in stamps:
            stamps[node] = 100 * (index // 2) + index
            order.add(node, stamps[node])
        assert len(order) == len(stamps)
        assert all(node in order for node in stamps)


def test_a_node_that_left_and_came_back_is_as_old_as_it_was_last():
    order: EvictionOrder[str] = EvictionOrder()
    order.add("a", 1)
    order.discard("a")
    order.add("b", 2)
    order.add("a", 3)
    assert [order.pop(), order.pop(), order.pop()] == ["b", "a", None]
