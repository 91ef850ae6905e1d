"""OverlaySlots: which slots of the overlay hold which request's input rows."""

from collections.abc import Iterable

from paceline.cache.pages import PagePool, PoolCounts
from paceline.core.errors import IntegrityError


class OverlaySlots:
    """Slots are the pages of a pool of their own: free + queued + owned = total.

    A request reserves all it needs when it enters its row and gives all of it back at once, so that
    no two requests wait for each other.
    """

    def __init__(self, num_slots: int) -> None:
        """num_slots: without slot 0, which is nobody's."""
        self._pool = PagePool("overlay", num_slots + 1)
        self._held: dict[str, list[int]] = {}

    @property
    def total(self) -> int:
        return self._pool.total

    def has_room(self, count: int) -> bool:
        """Whether `reserve` would find its slots."""
        return count <= self._pool.num_free

    def reserve(self, request_id: str, count: int) -> list[int]:
        """Slots for the rows of a request that holds none; in runs where these are free."""
        assert request_id not in self._held, f"{request_id} holds slots already"
        slots = self._pool.reserve(count)
        if slots:
            self._held[request_id] = slots
        return slots

    def release(self, request_id: str, *, epoch: int) -> None:
        """What a request holds, if anything, is free once `epoch` has retired: the last step that
        could read it."""
        slots = self._held.pop(request_id, None)
        if slots is not None:
            self._pool.free(slots, epoch)

    def retire(self, epoch: int) -> None:
        """Steps up to `epoch` have run to their end."""
        self._pool.retire(epoch)

    def counts(self) -> PoolCounts:
        """The books."""
        return self._pool.counts()

    def check_integrity(self, running: Iterable[str]) -> None:
        """Raise IntegrityError unless the books agree and running requests alone hold slots."""
        self._pool.check_integrity()
        held = sum(map(len, self._held.values()))
        strangers = sorted(self._held.keys() - set(running))
        if strangers or held != self._pool.counts().owned:
            raise IntegrityError.about(
                "slots of the overlay",
                expected=f"{self._pool.counts().owned} held by running requests",
                got=f"{held} held, by {', '.join(strangers) or 'running requests'}",
                remedy="release the slots of a request that leaves its row",
            )
