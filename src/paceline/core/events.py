"""Events: what the engine chose or fell back to, with a reason code.  Nothing is silent."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

_LOG = logging.getLogger("paceline")


@dataclass(frozen=True, slots=True)
class Event:
    """One choice or fallback."""

    reason: str  # a stable code, e.g. "graph_reserve_short"
    detail: str  # numbers and names, for people


Notify = Callable[[Event], None]


class EventLog:
    """Keeps the first of each (reason, detail) and logs it once."""

    def __init__(self) -> None:
        self._seen: dict[Event, int] = {}

    def __call__(self, event: Event) -> None:
        if event not in self._seen:
            _LOG.info("%s: %s", event.reason, event.detail)
        self._seen[event] = self._seen.get(event, 0) + 1

    def counts(self) -> dict[Event, int]:
        """How often each event happened."""
        return dict(self._seen)
