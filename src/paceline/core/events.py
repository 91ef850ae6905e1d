"""Events: what the engine chose or fell back to, with a reason code.  Nothing is silent."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

_LOG = logging.getLogger("paceline")


@dataclass(frozen=True, slots=True)
class Event:
    """One choice or fallback."""

    reason: str  # a stable code, e.g. "graph_reserve_short"
    detail: str  # numbers and names, for people


Notify = Callable[[Event], None]


class EventLog:
    """Keeps the first of each (reason, detail) and logs it once.  Safe in any thread."""

    def __init__(self) -> None:
        self._seen: dict[Event, int] = {}
        self._lock = Lock()

    def __call__(self, event: Event) -> None:
        with self._lock:
            self._seen[event] = self._seen.get(event, 0) + 1
            is_first = self._seen[event] == 1
        if is_first:
            _LOG.info("%s: %s", event.reason, event.detail)

    def counts(self) -> dict[Event, int]:
        """How often each event happened."""
        with self._lock:
            return dict(self._seen)
