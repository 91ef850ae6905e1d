"""Admissions: which waiting requests join a step, and how much of a prompt a step computes."""

from paceline.cache.manager import CacheManager
from paceline.cache.overlay_slots import OverlaySlots
from paceline.core.step import Delta
from paceline.engine.never_fits import require_fits
from paceline.engine.request import Request
from paceline.engine.roster import Roster
from paceline.engine.scheduler_config import SchedulerConfig
from paceline.engine.step_plan import (
    StepPlan,
    join_delta,
    overlay_deltas,
    overlay_starts,
    page_deltas,
)

# With so many requests and tokens an idle device begins, while the host admits the others: of
# requests that find long prompts in the cache it admits some six in a millisecond.
START_REQUESTS, START_TOKENS = 32, 1024


class Admissions:
    """Decides who joins; rows, pages and slots are those of the scheduler's owners."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheManager,
        overlay: OverlaySlots | None,
        roster: Roster,
    ) -> None:
        """overlay: None: no request brings input rows."""
        self._config = config
        self._cache = cache
        self._overlay = overlay
        self._roster = roster

    def require_fits(self, request: Request) -> None:
        """Raise CapacityError when it could never run to its end, RequestError where its encoder
        would have more rows than the model's has."""
        require_fits(
            request,
            self._cache,
            kv_limit=self._config.kv_limit(request.max_len),
            num_slots=0 if self._overlay is None else self._overlay.total,
            max_block=self._config.max_block,
        )

    def leader_to_await(self, request: Request) -> Request | None:
        """Who computes the prompt that a request will share; None where waiting gains nothing."""
        leader = request.leader
        if leader is None or leader.has_prompt_kv or not self._cache.shares(request.prompt_len):
            return None
        return leader

    def plan(self, plan: StepPlan) -> None:
        """In the order of the waiting queue, nobody overtakes: not even a preempted request that
        still drains.

        Only a request whose leader is computing the prompt that it will share lets others pass.
        """
        while self._roster.has_free_row and plan.budget:
            request = self._roster.waiting.first
            if request is None or plan.is_stalled or self._roster.num_draining:
                return
            if plan.is_awaited and self._may_start(plan):
                return
            joined = plan.joined_tokens + request.num_known
            if plan.joined_tokens and joined > self._config.max_join_tokens:
                return
            if request.input_rows and not self._has_slots(request):
                return
            if not self._has_room(plan, request):
                return
            limit = self._config.kv_limit(request.max_len)
            margin = self._config.admission_margin + self._config.draft.reach
            reserve_to = min(request.num_known + margin, limit)
            admission = self._cache.admit(
                request.request_id,
                request.token_ids,
                reserve_to=reserve_to,
                ahead=min(self._config.reserve_ahead, limit - reserve_to),
                keys=request.keys,
                max_hit=request.max_hit,
                encoder_len=request.encoder_len,
            )
            if admission is None:
                return
            row = self._roster.join(request, admission.prefix_len)
            deltas = (join_delta(request), *page_deltas(row, admission.page_runs))
            if request.input_rows:
                deltas += self._overlay_deltas(request)
            plan.joined_tokens = joined
            plan.add(request, request.kv_bound, self.chunk(plan, request), deltas)

    def _may_start(self, plan: StepPlan) -> bool:
        """Whether a step that a device waits for has enough to begin with."""
        num_tokens = self._config.max_batched_tokens - plan.budget
        return len(plan.rows) >= START_REQUESTS and num_tokens >= START_TOKENS

    def chunk(self, plan: StepPlan, request: Request) -> int:
        """Tokens of its prompt that a step computes; 0: it waits for a step with more room."""
        num_left = request.join_len - request.kv_least
        chunk = min(num_left, self._config.chunked_prefill_size, plan.budget)
        chunk = self._cache.chunk_len(request.kv_least, chunk)
        blocks = request.keys.blocks
        if blocks is None:
            return chunk
        return blocks.whole(request.kv_least + chunk) - request.kv_least

    def _has_slots(self, request: Request) -> bool:
        """Whether the overlay has room for all rows of a request; behind a hit it needs fewer."""
        return self._overlay is not None and self._overlay.has_room(request.num_input_rows)

    def _has_room(self, plan: StepPlan, request: Request) -> bool:
        """Whether what is left of a step holds the longest block of a prompt, or all of one that
        must be whole."""
        if self._config.whole_prompts:
            return plan.budget >= request.num_known
        blocks = request.keys.blocks
        return blocks is None or plan.budget >= blocks.longest

    def _overlay_deltas(self, request: Request) -> tuple[Delta, ...]:
        """The rows of a request that has joined, as far as the cache lacks their KV."""
        assert self._overlay is not None, "add refuses rows where there is no overlay"
        count = sum(source.stop - start for source, start in overlay_starts(request))
        return tuple(overlay_deltas(request, self._overlay.reserve(request.request_id, count)))
