"""Scheduler: which requests run in a step, and how many tokens each brings.

The loop it serves launches step t + 1 before it processes the outputs of step t, so decisions use
bounds.  A turn:

    schedule(epoch)        decode rows, then chunks of running prompts, then new requests
    (run the step)
    process(step, outputs) tokens and ends of an earlier step; its epoch retires

A request that runs out of pages waits while pages are on their way back; otherwise the running
request that arrived last is preempted and computed again later, from the tokens it has by then.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from paceline.cache.manager import CacheManager
from paceline.cache.overlay_slots import OverlaySlots
from paceline.core.draft_shape import NO_DRAFTS
from paceline.core.errors import IntegrityError, RequestError
from paceline.core.modes import End
from paceline.core.step import (
    NO_ROW_DRAFTS,
    FinishCode,
    RowDrafts,
    RowLogprobs,
    Step,
    StepOutputs,
)
from paceline.engine.admissions import Admissions
from paceline.engine.ends import PooledRows
from paceline.engine.request import FinishReason, HostNeed, Request, RequestState
from paceline.engine.roster import Roster
from paceline.engine.round_policy import RoundPolicy
from paceline.engine.scheduler_config import SchedulerConfig
from paceline.engine.step_plan import (
    PlannedRow,
    StepPlan,
    page_deltas,
)
from paceline.engine.steps_in_flight import StepsInFlight

_FINISH_REASONS = {
    FinishCode.STOP_TOKEN: FinishReason.STOP,
    FinishCode.LENGTH: FinishReason.LENGTH,
    FinishCode.NON_FINITE: FinishReason.ERROR,
}


class RequestUpdate(NamedTuple):
    """What a processed step brought to one request."""

    request: Request
    new_token_ids: tuple[int, ...]
    logprobs: tuple[RowLogprobs, ...]  # one per new token when asked for, else empty
    finish: FinishReason | None
    prompt_logprobs: tuple[RowLogprobs, ...] = ()  # of the next prompt tokens, when asked for
    num_drafted: int = 0  # first tokens of new_token_ids that a drafter proposed
    drafts: RowDrafts | None = None  # of the round that brought them, when the step asked


class Scheduler:
    """Owns the decisions; the roster owns states and rows, `StepsInFlight` what is launched."""

    def __init__(
        self, config: SchedulerConfig, cache: CacheManager, overlay: OverlaySlots | None = None
    ) -> None:
        """overlay: None: no request brings input rows."""
        self._config = config
        self._cache = cache
        self._overlay = overlay
        self._roster = Roster(config.max_running)
        self._admissions = Admissions(config, cache, overlay, self._roster)
        self._in_flight = StepsInFlight()
        self._is_mixed = config.is_mixed
        self._last_had_prefill = False
        self._rounds = RoundPolicy(config, cache)

    @property
    def has_work(self) -> bool:
        return bool(len(self._roster) or self._in_flight)

    @property
    def num_waiting(self) -> int:
        return len(self._roster.waiting) + self._roster.num_draining

    @property
    def num_running(self) -> int:
        return len(self._roster.running)

    @property
    def running(self) -> Sequence[Request]:
        """By arrival; for who looks on."""
        return self._roster.running

    @property
    def cache(self) -> CacheManager:
        """Who holds which pages."""
        return self._cache

    def add(self, request: Request) -> None:
        """Queue a request.  Raises CapacityError when it could never run to its end, RequestError
        where its encoder would have more rows than the model's has."""
        self._admissions.require_fits(request)
        if request.end is End.POOL:
            assert self._config.pooling is not None, "admission refuses what nothing would pool"
            request.pooled = PooledRows(self._config.pooling)
        request.host_needs = self._config.host_needs
        if request.constraint is not None:
            request.host_needs |= {HostNeed.GRAMMAR}
        self._roster.add(request, leader=self._admissions.leader_to_await(request))

    def abort(self, request_id: str) -> bool:
        """End a request now; False when it is unknown or has ended already."""
        request = self._roster.get(request_id)
        if request is None:
            return False
        self._finish(request, FinishReason.ABORT)
        return True

    def finish_on_host(self, request_id: str, keep_tokens: int) -> bool:
        """End a request behind `keep_tokens` generated tokens (stop strings, grammars).

        What was generated past them is dropped and does not enter the prefix tree.  False when the
        request is unknown or has ended already.
        """
        request = self._roster.get(request_id)
        if request is None:
            return False
        self._cache.offer_written()  # by tokens that are there
        del request.token_ids[request.prompt_len + keep_tokens :]
        self._finish(request, FinishReason.STOP)
        return True

    def limit_drafting(self, most: int | None) -> None:
        """From the next step on draft while at most so many requests decode; None: always."""
        self._rounds.limit(most)

    def schedule(self, epoch: int) -> Step | None:
        """The next step, or None when nothing can run before earlier outputs are processed."""
        self._cache.offer_written()
        is_free = not self._roster.num_needy
        is_awaited = not (self._in_flight or self._config.whole_prompts)
        budget = self._config.max_batched_tokens
        plan = StepPlan(budget, is_free=is_free, is_awaited=is_awaited)
        if self._is_mixed:
            self._plan_decodes(plan)
            self._plan_prefills(plan)
        else:
            phases = [self._plan_prefills, self._plan_decodes]
            for phase in reversed(phases) if self._last_had_prefill else phases:
                if not plan.rows:
                    phase(plan)
        if not plan.rows:
            self._require_progress()
            return None
        has_prefill = True in [row.is_prefill for row in plan.rows.values()]
        if has_prefill and not self._config.whole_prompts:
            is_last = not (self._roster.waiting or self._roster.num_draining)
            plan.end_on_size(self._config.padded_tokens, is_last=is_last)
        if self._cache.has_states:
            self._plan_slots(plan, epoch)
        self._in_flight.launch(epoch, plan.rows.values())
        self._last_had_prefill = has_prefill
        return plan.build(epoch, is_crowded=self._cache.is_crowded, has_prefill=has_prefill)

    def process(self, step: Step, outputs: StepOutputs) -> list[RequestUpdate]:
        """Take in the outputs of the oldest launched step; its epoch retires."""
        rows = self._in_flight.land(step, outputs)
        self._cache.retire(outputs.epoch)
        if self._overlay is not None:
            self._overlay.retire(outputs.epoch)
        updates: list[RequestUpdate] = []
        share = 0
        if self._roster.num_needy:  # others have no grammar
            num_forms = sum(row.request.constraint is not None for row in rows)
            share = self._config.mask_share(num_forms)  # in the step after, of as many
        is_plain = not (
            step.is_round
            or step.logprobs
            or self._roster.num_needy
            or self._cache.has_states
            or self._cache.has_windows
        )
        running, running_code = RequestState.RUNNING, FinishCode.RUNNING
        for index, row in enumerate(rows):
            request = row.request
            goes_on = outputs.finish[index] is running_code and request.state is running
            if is_plain and goes_on and not row.is_prefill:
                updates.append(self._receive_token(request, outputs, index))
                continue
            if goes_on and request.pooled is not None:
                update = self._receive_pooled(row, outputs, index)
            else:
                update = self._receive(row, outputs, index, share)
            if update is not None:
                updates.append(update)
            if request.state is not running:
                self._roster.settle(request)
        return updates

    def check_integrity(self) -> None:
        """Raise IntegrityError unless rows, states, steps in flight and the cache agree."""
        self._roster.check_integrity(self._in_flight.requests())
        self._cache.check_integrity()
        if self._overlay is not None:
            self._overlay.check_integrity(each.request_id for each in self._roster.running)

    def _plan_decodes(self, plan: StepPlan) -> None:
        """One token of every request that can, or a round where one of them takes drafts."""
        ready = [request for request in self._roster.running if request.can_decode]
        if self._roster.num_needy:
            ready = [request for request in ready if not self._awaits_host(request)]
        if self._config.draft.has_drafts:
            self._rounds.plan(plan, ready)
        extend_len = plan.draft.num_draft_tokens
        num_slots = max(extend_len, plan.draft.reach)
        is_plain, holds = num_slots == 1, self._cache.holds
        for request in ready:
            if request.state is not RequestState.RUNNING:
                continue
            prefix_len = request.kv_bound
            if is_plain and holds(request.request_id, prefix_len + 1):  # as in most steps
                plan.add_decode(request, prefix_len)
            else:
                self._plan_row(plan, request, extend_len, num_slots)
        if not plan.rows:
            plan.draft, plan.observed = NO_DRAFTS, True

    def _awaits_host(self, request: Request) -> bool:
        """Whether outputs in flight tell what its next step is made of; if so, it is noted why."""
        missing = request.missing
        request.acceptance.fallbacks |= missing
        return bool(missing)

    def _plan_prefills(self, plan: StepPlan) -> None:
        running = self._roster.running
        if len(plan.rows) == len(running):  # all decode, as in most steps
            running = []
        for request in [r for r in running if r.is_prefilling]:
            chunk = self._admissions.chunk(plan, request)
            if chunk > 0 and request.state is RequestState.RUNNING:
                self._plan_row(plan, request, chunk, max(chunk, plan.draft.reach))
        if self._roster.waiting:
            self._admissions.plan(plan)

    def _plan_slots(self, plan: StepPlan, epoch: int) -> None:
        """Say of each row, once its tokens are settled, which slots of states change."""
        for request, row in plan.rows.items():
            runs = self._cache.slots(
                request.request_id,
                least=request.kv_least + row.least,
                most=row.prefix_len + row.most,
                epoch=epoch,
            )
            if runs:
                plan.note(request, runs)

    def _leave_overlay(self, request: Request, epoch: int) -> None:
        """Its slots come back when `epoch` retires, the last step that may read them."""
        if self._overlay is not None:
            self._overlay.release(request.request_id, epoch=epoch)

    def _plan_row(self, plan: StepPlan, request: Request, extend_len: int, num_slots: int) -> None:
        """Give a running request its place, if pages for `num_slots` more can be had now or by
        preemption."""
        prefix_len = request.kv_bound
        kv_bound = prefix_len + num_slots
        if self._cache.holds(request.request_id, kv_bound):
            plan.add(request, prefix_len, extend_len, ())
            return
        ahead = min(self._config.reserve_ahead, self._config.kv_limit(request.max_len) - kv_bound)
        while request.state is RequestState.RUNNING:
            runs = self._cache.reserve(request.request_id, kv_bound, ahead=ahead)
            if runs is not None:
                assert request.row is not None, f"{request.request_id} runs without a row"
                plan.add(request, prefix_len, extend_len, page_deltas(request.row, runs))
                return
            plan.is_stalled = True
            if self._must_wait(request, kv_bound):
                return
            self._preempt(self._roster.running[-1], plan)

    def _must_wait(self, request: Request, kv_bound: int) -> bool:
        """Whether pages come back, or turn out not to be needed, without a preemption."""
        running = self._roster.running
        name, next_query = request.request_id, request.kv_least
        if self._cache.relief_pending(name, kv_bound, next_query=next_query):
            return True
        if not request.is_exact or any(other.is_complete for other in running):
            return True
        if len(running) == 1:
            raise IntegrityError.about(
                f"pages for the only running request '{request.request_id}'",
                expected=f"enough for {kv_bound} tokens",
                got="too few, with none on their way back",
                remedy="a page is lost; run check_integrity()",
            )
        return False

    def _preempt(self, request: Request, plan: StepPlan) -> None:
        plan.remove(request)
        kv_len = request.kv_known
        self._leave_overlay(request, request.last_epoch)
        self._cache.release(request.request_id, request.token_ids, kv_len, epoch=request.last_epoch)
        self._roster.preempt(request)

    def _receive_token(self, request: Request, outputs: StepOutputs, index: int) -> RequestUpdate:
        """What `_receive` does for one that decodes a token and goes on, as most rows do, where
        nothing but its pages and its caller hears of it."""
        tokens, known = outputs.token_ids[index], request.token_ids
        known += tokens
        kv_len = request.kv_known = len(known) - 1
        self._cache.written(request.request_id, known, kv_len, epoch=outputs.epoch)
        return RequestUpdate(request, tokens, (), None)

    def _receive_pooled(
        self, row: PlannedRow, outputs: StepOutputs, index: int
    ) -> RequestUpdate | None:
        """What `_receive` does for one whose end is a vector: it has no tokens, drafts, scores,
        grammar and input rows."""
        request, pooled = row.request, row.request.pooled
        assert pooled is not None, "its end is a vector"
        assert outputs.pooled is not None, "the step has a row that pools"
        kv_len = request.kv_known = row.prefix_len + row.extend_len
        state_len = 0 if outputs.state_lens is None else outputs.state_lens[index]
        name, epoch = request.request_id, outputs.epoch
        self._cache.written(name, request.token_ids, kv_len, epoch=epoch, state_len=state_len)
        pooled.take(outputs.pooled[index], first=row.prefix_len, num_tokens=row.extend_len)
        if kv_len < request.prompt_len:
            self._cache.advance_window(name, kv_len, epoch=epoch)
            return None
        reason = FinishReason.LENGTH if pooled.is_finite else FinishReason.ERROR
        self._finish(request, reason)
        return RequestUpdate(request, (), (), reason)

    def _receive(
        self, row: PlannedRow, outputs: StepOutputs, index: int, share: int
    ) -> RequestUpdate | None:
        """One row's outputs.  A request that has ended takes nothing more."""
        request = row.request
        if request.state is RequestState.FINISHED:
            return None
        tokens = outputs.token_ids[index]
        request.token_ids.extend(tokens)
        if row.is_prefill:
            if tokens:
                self._roster.release(request)
            if request.input_rows and row.kv_len >= request.input_rows[-1].stop:
                self._leave_overlay(request, outputs.epoch)
        is_running, has_drafts = request.state is RequestState.RUNNING, row.has_drafts
        if is_running:
            request.kv_known = request.num_known - 1 if row.emits else row.kv_len
        if has_drafts:
            constraint = request.constraint
            request.acceptance.note(
                drafted=row.extend_len - 1 if constraint is None else row.num_given,
                emitted=len(tokens),
                num_steps=row.most - 1,
                forced=0 if constraint is None else constraint.num_forced(tokens),
            )
        code, reason = outputs.finish[index], None
        if code is not FinishCode.RUNNING:
            reason = _FINISH_REASONS[code]
            self._finish(request, reason)
        elif is_running:
            name, kv_len = request.request_id, request.kv_known
            state_len = 0 if outputs.state_lens is None else outputs.state_lens[index]
            self._cache.written(
                name, request.token_ids, kv_len, epoch=outputs.epoch, state_len=state_len
            )
            self._cache.advance_window(name, kv_len, epoch=outputs.epoch)
        drafts = outputs.drafts.get(index)
        if request.constraint is not None:
            told, drafts = drafts, request.constraint.drafts.first(row.num_given)
            if tokens and reason is None:
                reason = self._follow(request, tokens, told or NO_ROW_DRAFTS, share)
        prompt_logprobs: tuple[RowLogprobs, ...] = ()
        if outputs.prompt_logprobs:
            prompt_logprobs = outputs.prompt_logprobs.get(index, ())
            request.num_scored += len(prompt_logprobs)
        if is_running and request.end is End.SCORE:
            reason = self._conclude(row, outputs, index)
        if not tokens and reason is None and not prompt_logprobs:
            return None
        logprobs: tuple[RowLogprobs, ...] = ()
        if tokens and request.params.logprobs is not None and outputs.logprobs is not None:
            logprobs = outputs.logprobs[index]
        drafted = max(0, len(tokens) - 1) if has_drafts else 0
        drafts = drafts if has_drafts else None
        return RequestUpdate(request, tokens, logprobs, reason, prompt_logprobs, drafted, drafts)

    def _conclude(self, row: PlannedRow, outputs: StepOutputs, index: int) -> FinishReason | None:
        """Of a row that is scored: why its request ends there, if it does."""
        request = row.request
        scored = outputs.prompt_logprobs.get(index, ())
        is_finite = all(math.isfinite(each.chosen) for each in scored)
        reason = FinishReason.LENGTH if row.kv_len >= request.prompt_len else None
        if not is_finite:
            reason = FinishReason.ERROR
        if reason is not None:
            self._finish(request, reason)
        return reason

    def _follow(
        self, request: Request, tokens: tuple[int, ...], told: RowDrafts, share: int
    ) -> FinishReason | None:
        """A grammar hears what was said, and looks ahead: to what it forces, and along what a
        drafter would have said there.  Why its request ends there, if it does."""
        assert request.constraint is not None, f"{request.request_id} has no grammar"
        try:
            request.constraint.accept(tokens)
        except RequestError as error:
            request.error = str(error)
            self._finish(request, FinishReason.ERROR)
            return FinishReason.ERROR
        if not request.constraint.is_done:
            drafts = request.params.speculative and request.is_followed
            shape = (
                self._config.draft
                if drafts and self._rounds.may_draft(self.num_running)
                else NO_DRAFTS
            )
            request.constraint.foresee(told.below(tokens), shape, share=share)
            return None
        self._finish(request, FinishReason.STOP)
        return FinishReason.STOP

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """End a request; its pages come back when the last step that holds it retires."""
        name, tokens, epoch = request.request_id, request.token_ids, request.last_epoch
        is_broken = reason is FinishReason.ERROR and request.error is None
        if is_broken:
            request.fail()
        if request.state is RequestState.RUNNING:
            self._leave_overlay(request, epoch)
            if is_broken:
                self._cache.discard(name, tokens, epoch=epoch)
            else:
                self._cache.release(name, tokens, request.kv_known, epoch=epoch)
        self._roster.finish(request, reason)

    def _require_progress(self) -> None:
        if len(self._roster) and not self._in_flight:
            raise IntegrityError.about(
                "the scheduler",
                expected="able to run one of its requests while no step is in flight",
                got=f"{self.num_waiting} waiting, {self.num_running} running",
                remedy="a page or row is lost; run check_integrity()",
            )
