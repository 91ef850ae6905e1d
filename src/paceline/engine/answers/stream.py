"""OutputStream: snapshots of requests as they grow."""

from collections.abc import Callable, Generator, Iterator, Sequence

from paceline.engine.answers.outputs import RequestOutput
from paceline.engine.answers.tracker import Tracker


class OutputStream(Iterator[RequestOutput]):
    """Snapshots of some requests, whoever turns the loop.  Owns their end: closed or dropped, even
    before its first snapshot, it aborts those that still run.

    turn: one turn of the loop; abort: ends requests, and leaves alone what has ended.
    refused: outputs that come first.
    """

    def __init__(
        self,
        trackers: Sequence[Tracker],
        *,
        turn: Callable[[], object],
        abort: Callable[[Sequence[Tracker]], None],
        refused: Sequence[RequestOutput] = (),
    ) -> None:
        self._trackers = trackers
        self._abort = abort
        # Holds no reference to self: see __del__.
        self._snapshots = _follow(trackers, turn, abort, refused)

    def __next__(self) -> RequestOutput:
        return next(self._snapshots)

    def stop(self) -> None:
        """End what still runs; its last snapshots are still to come."""
        self._abort(self._trackers)

    def close(self) -> None:
        """Abort what still runs; there is nothing more to come."""
        self._snapshots.close()
        self._abort(self._trackers)  # for a generator that never started

    def __del__(self) -> None:
        self.close()


def _follow(
    trackers: Sequence[Tracker],
    turn: Callable[[], object],
    abort: Callable[[Sequence[Tracker]], None],
    refused: Sequence[RequestOutput],
) -> Generator[RequestOutput, None, None]:
    """Turn the loop until every request has ended; interrupted, abort the rest at once."""
    left = dict.fromkeys(trackers, 0)  # tokens shown
    try:
        yield from refused
        while left:
            grown = [each for each, shown in left.items() if _has_news(each, shown)]
            if not grown:
                turn()
            for tracker in grown:
                left[tracker] = tracker.num_tokens
                if tracker.is_finished:
                    del left[tracker]
                yield tracker.snapshot()
    finally:
        abort(trackers)


def _has_news(tracker: Tracker, num_shown: int) -> bool:
    return tracker.is_finished or tracker.num_tokens > num_shown
