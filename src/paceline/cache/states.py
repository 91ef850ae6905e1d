"""StateGroup: the slots requests hold in a cache group of recurrent states.

A state stands for every token so far, so a request has one slot of its own, whatever its length,
and a prefix is found where somebody kept the state behind it: at lengths divisible by
`state_every`.  Slots are pages of a PagePool.  A request's row of the group's page table has three
of them:

    READ        the state behind the tokens before the step; 0: of none, zeros
    WRITE       the request's own: the state behind the step
    CHECKPOINT  where it goes as well, where its length is then divisible by state_every

Worked example: state_every 4, a prompt of 10 tokens whose state behind the first 4 is in slot 3:

    step            kv_len   read write checkpoint
    join, 4 tokens   4 -> 8   3    5     6          copied on write: nobody touches slot 3
    chunk            8 -> 10  5    5     -          6 went to the prefix tree, at 8 tokens
    decode          10 -> 11  5    5     -
    decode          11 -> 12  5    5     7          taken ahead, by bound

Each step that may end on such a length brings a slot of its own for that.  The device knows whether
it did, and says which length the slot stands for; a slot it did not use is free again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.cache.groups import CacheGroup, PageRun
from paceline.cache.prefix_tree import Node, PrefixTree
from paceline.core.errors import IntegrityError
from paceline.core.model.cache_groups import CHECKPOINT, READ, CacheGroupSpec
from paceline.core.padding import PAD_PAGE


@dataclass(slots=True)
class StateHolding:
    """One request's slots in one group; written by StateGroup alone."""

    slot: int | None  # its own; None: returned
    hit: Node | None  # whose slot its first step reads, locked until that has retired
    has_joined: bool = False  # its first step is planned
    reads_own: bool = False  # and so is the one behind it, from which on it reads its own slot
    taken: dict[int, int] = field(default_factory=dict)  # epoch of a step -> its checkpoint slot
    landed: dict[int, int] = field(default_factory=dict)  # page whose end it stands for -> slot

    @property
    def num_private(self) -> int:
        """Slots that are this holding's alone."""
        return (self.slot is not None) + len(self.taken) + len(self.landed)

    @property
    def locked(self) -> list[Node]:
        """Nodes whose slot it keeps from eviction."""
        return [] if self.hit is None else [self.hit]


class StateGroup(CacheGroup):
    """A slot for each request; those of the prefix tree are all others can start from.

    A growing length asks nothing of it.
    """

    def __init__(
        self, spec: CacheGroupSpec, index: int, tree: PrefixTree, *, num_pages: int, keeps: bool
    ) -> None:
        """keeps: states for others to start from; False: without a prefix cache."""
        assert spec.state_every is not None, "a STATE group says where its states are kept"
        super().__init__(spec, index, tree, num_pages=num_pages)
        self._every = spec.state_every
        self._keeps = keeps

    def pages_to_fit(self, kv_len: int) -> int:
        """Most slots a request alone must have: its own, and the one that it starts from."""
        return 1 + self._keeps

    def usable_prefix(self, path: Sequence[Node], limit: int) -> int:
        """The longest hit of at most `limit` pages behind which a state was kept."""
        for length in range(limit, 0, -1):
            if path[length - 1].pages[self.index] is not None:
                return length
        return 0

    def can_admit(self, path: Sequence[Node], reserve_to: int) -> bool:
        """Whether `admit` would find a slot."""
        newly_locked = bool(path) and path[-1].locks[self.index] == 0
        return self._available() - newly_locked >= 1

    def admit(self, path: Sequence[Node], reserve_to: int) -> tuple[StateHolding, PageRun]:
        """Lock the state of a hit and take a slot; `can_admit` must have said yes."""
        hit = path[-1] if path else None
        read = PAD_PAGE if hit is None else self._tree.lock(hit, self.index)
        slot = self._take()
        assert slot is not None, "can_admit has found a slot"
        return StateHolding(slot, hit), PageRun(self.index, READ, (read, slot))

    def slots(self, holding: StateHolding, *, least: int, most: int, epoch: int) -> PageRun | None:
        """What the step `epoch` changes, behind which `least` to `most` tokens are computed.

        Called for each of its steps, in order.  A checkpoint is taken where a slot can be had.
        """
        assert holding.slot is not None, "a request that runs has a slot"
        turns, holding.has_joined = holding.has_joined and not holding.reads_own, True
        holding.reads_own = holding.reads_own or turns
        if not (self._keeps and most // self._every * self._every >= least):
            return PageRun(self.index, READ, (holding.slot,)) if turns else None
        checkpoint = self._take()
        if checkpoint is not None:
            holding.taken[epoch] = checkpoint
        last = PAD_PAGE if checkpoint is None else checkpoint
        if turns:
            return PageRun(self.index, READ, (holding.slot, holding.slot, last))
        return PageRun(self.index, CHECKPOINT, (last,))

    def landed(self, holding: StateHolding, *, kv_len: int, state_len: int, epoch: int) -> None:
        """The retired step `epoch` left the request with `kv_len` tokens, and its checkpoint slot,
        as the device says, with the state behind `state_len`; 0: unused."""
        if holding.hit is not None:
            self._tree.unlock(holding.hit, self.index)
            holding.hit = None
        slot = holding.taken.pop(epoch, None)
        if not state_len:
            self.pool.free([] if slot is None else [slot], epoch)
            return
        if slot is None or state_len != kv_len or kv_len % self._every:
            raise IntegrityError.about(
                f"the length that checkpoint slot {slot} of cache group '{self.name}' stands for",
                expected=f"{kv_len}, a multiple of {self._every}, where the step had such a slot",
                got=state_len,
                remedy="publish a state under the length whose tokens it has seen, and no other",
            )
        self.pool.mark_written([slot], epoch)
        holding.landed[kv_len // self._page_size - 1] = slot

    def share(
        self, holding: StateHolding, start: int, path: Sequence[Node], *, adopt: int | None = None
    ) -> None:
        """Hand the states behind pages from `start` on to their nodes; where one has another
        request's, ours is free.

        path: the node before page `start`, then one node per page.
        """
        known = [index for index in holding.landed if index < start + len(path) - 1]
        for index in known:
            slot = holding.landed.pop(index)
            node = path[index - start + 1] if index >= start else None
            if node is None or node.pages[self.index] is not None:
                self.pool.free([slot], self._retired)
                continue
            self.pool.share([slot])
            self._tree.put(node, self.index, slot)
            self._tree.unlock(node, self.index)

    def release(self, holding: StateHolding, epoch: int) -> None:
        """Return everything, once `epoch` has retired."""
        own = [] if holding.slot is None else [holding.slot]
        slots, nodes = [*own, *holding.taken.values(), *holding.landed.values()], holding.locked
        holding.slot = holding.hit = None
        holding.taken.clear()
        holding.landed.clear()
        self._give_back(slots, nodes, epoch)

    def _take(self) -> int | None:
        """A slot, of a state that nobody starts from where none is free; None: there is none."""
        self._make_room(1)
        return self.pool.reserve(1)[0] if self.pool.num_free else None
