"""PrefixTree: token prefixes whose KV is in the cache, one node per page of tokens.

A node holds, per cache group, the page with that group's KV (None: never stored or evicted), and a
count of locks: requests whose page tables name the page.  A *leaf-first* group (full attention)
needs every page of a prefix, so its pages are stored from the root down, locked as whole paths and
evicted from the leaves up.  A windowed group needs only the last pages, so its pages come and go
anywhere.  Eviction takes the least recently used page that may go (`EvictionOrder`).

Where the KV of a token depends on the token behind it (an EAGLE head's), a node's key is the tokens
of its page and the one behind them, its `draft_next_token`: another continuation is another node.
So a hit with it ends one page earlier, and what it computes can be found again.  Behind the ids a
key has what of a request's media covers them (`PageKeys`).

A collection of garbage walks every container, and nothing else runs meanwhile.  A page leaves it
one, its node: tuples of integers are none to it, and children stand in one table of the tree, by
their parent's number and their key.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from itertools import count
from typing import TypeVar

from paceline.cache.eviction_order import EvictionOrder
from paceline.cache.page_keys import NO_KEYS, PageKeys
from paceline.core.errors import IntegrityError

T = TypeVar("T")


class Node:
    """One page of tokens below its parent; written by the tree alone."""

    __slots__ = (
        *("alive", "held_children", "key", "locks", "num_children"),
        *("number", "pages", "parent", "stamps"),
    )

    def __init__(
        self, number: int, key: Hashable, parent: "Node | None", zeros: tuple[int, ...]
    ) -> None:
        """zeros: [num_groups]."""
        self.number = number  # no other node of the tree has or had it
        self.key = key  # as PrefixTree.key; of a root: PageKeys.root
        self.parent = parent  # None: a root, or detached
        self.num_children = 0
        self.pages: tuple[int | None, ...] = (None,) * len(zeros)
        self.locks = zeros
        self.stamps = zeros  # when it was last unlocked
        self.held_children = zeros  # children that hold a page of the group
        self.alive = True  # False once pruned


class PrefixTree:
    """Owns the shareable pages of all groups."""

    def __init__(
        self, page_size: int, leaf_first: Sequence[bool], *, next_token: bool = False
    ) -> None:
        """leaf_first: [num_groups] whether a group needs every page of a prefix.

        next_token: in some group, the KV of a token depends on the token behind it.
        """
        self._page_size = page_size
        self._num_behind = int(next_token)  # tokens behind its page that a node depends on
        self._leaf_first = tuple(leaf_first)
        groups = len(self._leaf_first)
        self._zeros = (0,) * groups
        self._numbers = count()
        self._roots: dict[Hashable, Node] = {}
        self._children: dict[tuple[int, Hashable], Node] = {}  # (parent's number, key) -> node
        self._detached: set[Node] = set()
        self._orders = tuple(EvictionOrder[Node]() for _ in range(groups))
        self._evictable = [0] * groups
        self._clock = count(1)
        self.num_evicted = 0

    def key(
        self, tokens: Sequence[int], index: int, keys: PageKeys = NO_KEYS
    ) -> tuple[int | str, ...]:
        """What the KV of page `index` depends on, behind the page before it: token ids, and what of
        the request's media covers them."""
        start = index * self._page_size
        stop = start + self._page_size + self._num_behind
        ids = tuple(tokens[start:stop])
        return ids + keys.media_within(start, stop) if keys.media else ids

    def num_whole(self, num_tokens: int) -> int:
        """Pages of `num_tokens` tokens whose key is known."""
        return max(0, num_tokens - self._num_behind) // self._page_size

    def walk(self, tokens: Sequence[int], keys: PageKeys, *, max_pages: int) -> list[Node]:
        """The nodes of the longest stored path, whatever pages they hold; changes nothing."""
        node = self._roots.get(keys.root)
        path: list[Node] = []
        if node is None:
            return path
        tokens, key, find = tuple(tokens), self.key, self._children.get  # of a tuple keys are parts
        for index in range(max_pages):
            node = find((node.number, key(tokens, index, keys)))
            if node is None:
                break
            path.append(node)
        return path

    def root(self, keys: PageKeys) -> Node:
        """The root of a request's path, made where missing; prune it if nothing is put below."""
        key = keys.root
        if key not in self._roots:
            self._roots[key] = Node(next(self._numbers), key, None, self._zeros)
        return self._roots[key]

    def child(self, parent: Node, key: tuple[int | str, ...]) -> Node:
        """The child for one page of tokens, made where missing; prune it if nothing is put in."""
        place = (parent.number, key)
        node = self._children.get(place)
        if node is None:
            node = self._children[place] = Node(next(self._numbers), key, parent, self._zeros)
            parent.num_children += 1
        return node

    def put(self, node: Node, group: int, page: int) -> None:
        """Store a page in a node that has none, locked once for the caller."""
        assert node.pages[group] is None, f"node already holds page {node.pages[group]}"
        node.pages = _with(node.pages, group, page)
        node.locks = _with(node.locks, group, 1)
        parent = node.parent
        if parent is not None:
            parent.held_children = _with(
                parent.held_children, group, parent.held_children[group] + 1
            )
            if self._leaf_first[group]:
                self._orders[group].discard(parent)

    def lock(self, node: Node, group: int) -> int:
        """Keep a node's page from eviction; returns the page."""
        page = node.pages[group]
        assert page is not None, "only a stored page can be locked"
        if node.locks[group] == 0:
            self._evictable[group] -= 1
            self._orders[group].discard(node)
        node.locks = _with(node.locks, group, node.locks[group] + 1)
        return page

    def lock_all(self, nodes: Sequence[Node], group: int) -> list[int]:
        """`lock` of each: many requests may hold the thousands of pages of one prompt."""
        for node in nodes:
            locks = node.locks[group]
            if locks:
                node.locks = _with(node.locks, group, locks + 1)
            else:
                self.lock(node, group)
        return [page for node in nodes if (page := node.pages[group]) is not None]

    def unlock(self, node: Node, group: int) -> None:
        """Undo one lock; no step in flight may still read the page for that locker."""
        locks = node.locks[group]
        assert locks > 0, "unlocked more often than locked"
        node.locks = _with(node.locks, group, locks - 1)
        if locks == 1:
            self._evictable[group] += 1
            stamp = next(self._clock)
            node.stamps = _with(node.stamps, group, stamp)
            if self._may_go(node, group):
                self._orders[group].add_youngest(node, stamp)

    def unlock_all(self, nodes: Sequence[Node], group: int) -> None:
        """`unlock` of each, in order."""
        for node in nodes:
            locks = node.locks[group]
            if locks > 1:
                node.locks = _with(node.locks, group, locks - 1)
            else:
                self.unlock(node, group)

    def num_evictable(self, group: int) -> int:
        """Pages `evict` could return: locks of leaf-first groups cover whole paths."""
        return self._evictable[group]

    def evict(self, group: int, num_pages: int) -> list[int]:
        """Give up to `num_pages` pages, least recently used first; the caller frees them."""
        pages: list[int] = []
        while len(pages) < num_pages:
            node = self._orders[group].pop()
            if node is None:
                break
            page = node.pages[group]
            assert page is not None, "a node without a page cannot give one"
            node.pages = _with(node.pages, group, None)
            self._evictable[group] -= 1
            self.num_evicted += 1
            pages.append(page)
            if node.parent is not None:
                self._lost_child(node.parent, group)
            self.prune(node)
        return pages

    def prune(self, node: Node) -> None:
        """Remove a node that holds nothing, and its ancestors that hold nothing else."""
        while node.alive and not node.num_children and all(page is None for page in node.pages):
            node.alive = False
            self._detached.discard(node)
            if node.parent is None:
                if self._roots.get(node.key) is node:
                    del self._roots[node.key]
                return
            self._part(node.parent, node)
            node = node.parent

    def detach(self, node: Node) -> None:
        """Cut a subtree off: no later walk finds it; its pages go when unlocked and evicted."""
        parent = node.parent
        assert parent is not None, "a root is not detached"
        self._part(parent, node)
        node.parent = None
        self._detached.add(node)
        for group, page in enumerate(node.pages):
            if page is not None:
                self._lost_child(parent, group)
        self.prune(parent)

    def nodes(self) -> Iterator[Node]:
        """Every node, roots and detached subtrees included."""
        yield from self._roots.values()
        yield from self._detached
        yield from self._children.values()

    def check_integrity(self) -> None:
        """Raise IntegrityError unless counts agree with nodes and leaf-first paths are whole."""
        evictable = [0] * len(self._evictable)
        children = Counter(child.parent for child in self._children.values())
        held: Counter[tuple[Node | None, int]] = Counter(
            (child.parent, group)
            for child in self._children.values()
            for group, page in enumerate(child.pages)
            if page is not None
        )
        for node in self.nodes():
            self._check_behind(node)
            self._compare("children", children[node], node.num_children)
            for group, page in enumerate(node.pages):
                evictable[group] += page is not None and node.locks[group] == 0
                self._compare("held children", held[node, group], node.held_children[group])
                if self._leaf_first[group] and page is not None and node.parent is not None:
                    is_root = node.parent.parent is None and node.parent not in self._detached
                    whole = is_root or node.parent.locks[group] >= node.locks[group]
                    whole = whole and (is_root or node.parent.pages[group] is not None)
                    self._compare("whole leaf-first paths", True, whole)
        self._compare("evictable pages", evictable, self._evictable)
        places = [(node.parent.number, node.key) for node in self.nodes() if node.parent]
        self._compare("places of nodes", places, list(self._children))
        for group, order in enumerate(self._orders):
            may_go = [node for node in self.nodes() if self._may_go(node, group)]
            self._compare("pages in the eviction order", len(may_go), len(order))
            self._compare("the eviction order", True, all(node in order for node in may_go))

    def _check_behind(self, node: Node) -> None:
        """The token behind a node's page is known, and the first of its children's pages."""
        if node.parent is None or not self._num_behind:
            return
        assert isinstance(node.key, tuple), "token ids"
        width = self._page_size + self._num_behind  # behind the ids: media
        self._compare("ids in a key", width, sum(type(part) is int for part in node.key[:width]))
        if node.parent.parent is not None:
            assert isinstance(node.parent.key, tuple), "token ids"
            behind = node.parent.key[self._page_size : width]
            self._compare("the token behind a page", behind, node.key[: self._num_behind])

    def _part(self, parent: Node, child: Node) -> None:
        """The child is its parent's no longer."""
        del self._children[parent.number, child.key]
        parent.num_children -= 1

    def _may_go(self, node: Node, group: int) -> bool:
        """Whether a node has a page that may be evicted."""
        if node.pages[group] is None or node.locks[group]:
            return False
        return not (self._leaf_first[group] and node.held_children[group])

    def _lost_child(self, node: Node, group: int) -> None:
        """A child of the node holds its page no longer, or is its child no longer."""
        node.held_children = _with(node.held_children, group, node.held_children[group] - 1)
        if self._leaf_first[group] and self._may_go(node, group):
            self._orders[group].add(node, node.stamps[group])

    def _compare(self, name: str, expected: object, got: object) -> None:
        if expected != got:
            raise IntegrityError.about(
                f"{name} of the prefix tree",
                expected=f"{expected} by nodes",
                got=f"{got} by count",
                remedy="find the call that changed one side only",
            )


def _with(values: tuple[T, ...], group: int, value: T) -> tuple[T, ...]:
    """The values with another one for a group."""
    if len(values) == 1:  # as in most models
        return (value,)
    return (*values[:group], value, *values[group + 1 :])
