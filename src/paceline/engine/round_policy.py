"""RoundPolicy: whether a step is a round of speculation, and whom the drafter follows."""

from collections.abc import Sequence

from paceline.cache.manager import CacheManager
from paceline.engine.request import Request
from paceline.engine.scheduler_config import SchedulerConfig
from paceline.engine.step_plan import StepPlan


class RoundPolicy:
    """Owns how many requests may draft."""

    def __init__(self, config: SchedulerConfig, cache: CacheManager) -> None:
        self._config = config
        self._cache = cache
        self._max_drafting = config.max_drafting  # requests of a round; None: always

    def limit(self, most: int | None) -> None:
        """From the next step on draft while at most so many requests decode; None: always."""
        self._max_drafting = most

    def plan(self, plan: StepPlan, ready: Sequence[Request]) -> None:
        """Whether the step is a round, and whether the drafter observes it."""
        most, is_allowed = self._max_drafting, self.may_draft(len(ready))
        if not is_allowed and most is not None and most <= 1:
            self._stop_following(ready)
        plan.observed = all(request.is_followed for request in ready)
        if is_allowed and plan.observed:
            plan.take_drafts(ready, self._config.draft, max_masks=self._config.max_masks)

    def may_draft(self, num_running: int) -> bool:
        """Whether the next step may be a round, with so many requests."""
        return self._max_drafting is None or num_running <= self._max_drafting

    def _stop_following(self, requests: Sequence[Request]) -> None:
        """The drafter follows them no further: they draft no more, and what it lacks of them
        nobody finds in the cache."""
        for request in requests:
            if request.is_followed:
                request.is_followed = False
                self._cache.stop_following(request.request_id, request.kv_least)
