"""StepPlan: one step while the scheduler fills it."""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress
from typing import NamedTuple

from paceline.cache.groups import PageRun
from paceline.core.draft_shape import NO_DRAFTS, DraftShape
from paceline.core.modes import GENERATES, End, MaskKind
from paceline.core.request.input_rows import InputRows
from paceline.core.request.sampling_params import SamplerTier
from paceline.core.step import (
    Delta,
    GivenDrafts,
    JoinDelta,
    OverlayDelta,
    PageDelta,
    PromptSpan,
    Step,
    StepLayout,
    TokenMask,
)
from paceline.engine.request import Request

FULL = 32  # a step whose padding is at most 1/FULL of it is as good as full


class PlannedRow(NamedTuple):
    """One request's part of a step."""

    request: Request
    prefix_len: int  # at most; exact unless a round of the request was in flight
    extend_len: int
    deltas: tuple[Delta, ...]
    is_prefill: bool
    emits: bool  # the last known token is in the step, so the row samples the next one
    least: int  # tokens it adds to the KV, if the row still runs
    most: int  # more than the least of a row whose drafts are verified
    num_given: int = 0  # first drafts of its constraint that are verified

    @property
    def kv_len(self) -> int:
        return self.prefix_len + self.extend_len

    @property
    def has_drafts(self) -> bool:
        return self.most > self.least

    @property
    def reads_overlay(self) -> bool:
        """Whether it has tokens whose row the request brings; of a row of its prompt."""
        return any(
            source.start < self.kv_len and self.prefix_len < source.stop
            for source in self.request.input_rows
        )

    @property
    def sees_ahead(self) -> bool:
        """Whether some of its tokens are in a block."""
        blocks = self.request.keys.blocks
        return blocks is not None and blocks.meets(self.prefix_len, self.kv_len)

    def ending(self, extend_len: int) -> int:
        """`extend_len` of its prompt's tokens, or fewer where that would end a block in two."""
        blocks = self.request.keys.blocks
        if blocks is None:
            return extend_len
        return blocks.whole(self.prefix_len + extend_len) - self.prefix_len

    @property
    def scored(self) -> range:
        """Positions in this step whose next token is prompt and wants its log-probability."""
        request = self.request
        return range(
            max(self.prefix_len, request.score_from), min(self.kv_len, request.num_to_score)
        )


def join_delta(request: Request) -> Delta:
    """A request that has just been given its row enters it, with what it knows."""
    is_new = request.num_known == request.prompt_len
    return JoinDelta(
        row=_row_of(request),
        token_ids=request.prompt_ids if is_new else tuple(request.token_ids),
        packed_ids=request.packed_ids if is_new else None,
        prompt_len=request.prompt_len,
        prefix_len=request.kv_known,
        max_len=request.max_len,
        params=request.params,
        positions=request.positions,
        encoder=request.encoder,
        blocks=request.keys.blocks,
        second_from=request.second_from,
    )


def page_deltas(row: int, runs: Sequence[PageRun]) -> tuple[Delta, ...]:
    """Page runs as changes of one row of the request table."""
    return tuple(
        PageDelta(row=row, group=run.group, start=run.start, page_ids=run.page_ids) for run in runs
    )


def overlay_starts(request: Request) -> list[tuple[InputRows, int]]:
    """Input rows that a request must put into the overlay when it joins, each with the position of
    the first: those behind what the cache has."""
    kv_len = request.kv_known
    return [(each, max(kv_len, each.start)) for each in request.input_rows if kv_len < each.stop]


def overlay_deltas(request: Request, slots: Sequence[int]) -> Iterator[Delta]:
    """The same as changes of its row, in these slots."""
    first = 0
    for source, start in overlay_starts(request):
        stop = first + source.stop - start
        taken = tuple(slots[first:stop])
        yield OverlayDelta(row=_row_of(request), start=start, slots=taken, source=source)
        first = stop


def left_over(padded: tuple[int, ...], *, decoding: int, prompts: int) -> int:
    """Tokens of prompts to leave to the next step; 0: the step stays as it is.

    padded: ascending sizes; a step beyond the last is not padded.
    decoding: tokens of the step's rows that decode; prompts: tokens of its prompts.

    A step of 255 and 300 tokens would be padded to 768: it computes 257 of the 300 and is 512.
    Never more is left than is computed: what is left of a prompt at least halves with each step.
    Nothing is left for a size that is full but for 1/FULL: another step costs more.
    """
    index, tokens = bisect_left(padded, decoding + prompts), decoding + prompts
    if index in (0, len(padded)) or FULL * (padded[index] - tokens) <= padded[index]:
        return 0
    left = tokens - padded[index - 1]
    return left if left <= prompts - left else 0


def deal(requests: Sequence[Request], num_masks: int) -> dict[Request, int]:
    """How many of the drafts of its constraint each is given; who is given none is left out.

    num_masks: for all of them.  One each in turn; who was given some longest ago goes first.
    """
    dealt: dict[Request, int] = {}
    wanting = deque(sorted(filter(_num_drafts, requests), key=lambda each: each.given_epoch))
    while wanting and num_masks:
        request = wanting.popleft()
        dealt[request] = dealt.get(request, 0) + 1
        num_masks -= 1
        if dealt[request] < _num_drafts(request):
            wanting.append(request)
    return dealt


@dataclass(slots=True)
class StepPlan:
    """Rows chosen so far, and what is left of the token budget."""

    budget: int  # tokens
    is_free: bool = True  # no request has a grammar
    is_awaited: bool = False  # the device has nothing to do before it
    rows: dict[Request, PlannedRow] = field(default_factory=dict)  # in the order of the step
    joined_tokens: int = 0  # known tokens of the requests admitted so far
    is_stalled: bool = False  # a running request waits for pages: admit nobody
    draft: DraftShape = NO_DRAFTS  # with drafts the step is a round
    observed: bool = True  # False: no row of it drafts again
    dealt: dict[Request, int] = field(default_factory=dict)  # of a round: drafts given to each

    def take_drafts(self, ready: Sequence[Request], draft: DraftShape, *, max_masks: int) -> None:
        """Make it a round of those that decode, where one of them drafts.

        Of forms alone only where each could be given a draft, or a quarter of all are given some:
        a round computes the rows of drafts for every request, whoever has any.
        """
        drafting = [request for request in ready if request.params.speculative]
        forms = [] if self.is_free else [r for r in ready if r.constraint is not None]
        num_spare = max_masks - len(forms)
        dealt = deal(forms, num_spare)
        is_worth_it = (
            any(request.constraint is None for request in drafting)
            or len(forms) <= num_spare
            or 4 * len(dealt) >= len(ready)
        )
        if drafting and is_worth_it:
            self.draft, self.dealt = draft, dealt

    def add(
        self, request: Request, prefix_len: int, extend_len: int, deltas: tuple[Delta, ...]
    ) -> None:
        """Give a running request its place in the step: behind all others.  prefix_len: its
        `kv_bound`, which who adds it knows."""
        least, most, num_given = extend_len, extend_len, 0
        if self.draft.num_steps > 0:  # has_drafts, without a call for every row
            least, most = 1, self.draft.max_path if request.params.speculative else 1
            if request.constraint is not None:
                num_given = self.dealt.get(request, 0)
                most = 1 + request.constraint.drafts.first(num_given).depth
        is_prefill = request.is_prefilling
        emits = prefix_len + extend_len >= request.join_len and request.end is End.GENERATE
        self.rows[request] = PlannedRow(
            request, prefix_len, extend_len, deltas, is_prefill, emits, least, most, num_given
        )
        self.budget -= extend_len

    def add_decode(self, request: Request, prefix_len: int) -> None:
        """The same of one that decodes a token, in a step without drafts, into pages it holds."""
        self.rows[request] = PlannedRow(request, prefix_len, 1, (), False, True, 1, 1)
        self.budget -= 1

    def note(self, request: Request, runs: Sequence[PageRun]) -> None:
        """More of a planned request's tables changes."""
        row = self.rows[request]
        deltas = (*row.deltas, *page_deltas(_row_of(request), runs))
        self.rows[request] = row._replace(deltas=deltas)

    def remove(self, request: Request) -> None:
        """Take a preempted request out again, if it is in."""
        row = self.rows.pop(request, None)
        if row is not None:
            self.budget += row.extend_len

    def end_on_size(self, padded: tuple[int, ...], *, is_last: bool) -> None:
        """Leave to the next step what would pad this one, the tokens of its last prompts first.

        padded: ascending sizes that steps with prompts are padded to.  is_last: nobody waits; where
        nobody decodes either, a next step would come for what is left alone, so nothing is.
        """
        prompts = [row for row in reversed(self.rows.values()) if row.is_prefill] if padded else []
        if not prompts or (is_last and len(prompts) == len(self.rows)):
            return
        num_tokens = sum(row.extend_len for row in prompts)
        decoding = sum(row.extend_len for row in self.rows.values()) - num_tokens
        left = left_over(padded, decoding=decoding, prompts=num_tokens)
        if left > num_tokens - len(prompts):  # every row keeps a token
            return
        for row in prompts:
            kept = row.ending(row.extend_len - min(left, row.extend_len - 1))
            cut = row.extend_len - kept
            if cut and kept:
                left = max(0, left - cut)
                shorter = row._replace(extend_len=kept, emits=False, least=kept, most=kept)
                self.rows[row.request] = shorter
                self.budget += cut

    def build(self, epoch: int, *, is_crowded: bool = False, has_prefill: bool = True) -> Step:
        """The frozen step.  is_crowded: many admitted requests found the same prefix.  has_prefill:
        some row computes known tokens."""
        rows, is_round = self.rows.values(), self.draft.has_drafts
        # By columns: every turn pays for every row.
        requests, prefix_lens, extend_lens, deltas, _, emits, *_ = zip(*rows, strict=True)
        # A last prompt chunk of one token is computed as a decode step is.
        is_decode = max(extend_lens) == 1 and all(emits)
        sees_ahead = has_prefill and any(row.is_prefill and row.sees_ahead for row in rows)
        emitting = list(compress(requests, emits))
        return Step(
            epoch=epoch,
            layout=StepLayout(
                rows=tuple([_row_of(request) for request in requests]),
                extend_lens=extend_lens,
                emits=emits,
            ),
            is_ragged=not (is_round or is_decode),
            mask=MaskKind.BLOCK if sees_ahead else self.draft.mask,
            is_round=is_round,
            prefix_lens_bound=prefix_lens,
            sampler=max([request.tier for request in emitting], default=SamplerTier.GREEDY),
            logprobs=True in [request.params.logprobs is not None for request in emitting],
            deltas=tuple(chain.from_iterable(deltas)),
            prompt_spans=tuple(self._prompt_spans()) if has_prefill else (),
            observed=self.observed,
            tells_drafts=self._asked() if is_round else (),
            shares_prefix=is_crowded and is_decode and not is_round,
            masks=None if self.is_free else self._masks(),
            given=() if self.is_free or not is_round else self._given(),
            has_overlay=has_prefill
            and any(row.request.input_rows and row.reads_overlay for row in rows),
            ends=frozenset([request.end for request in requests]) if has_prefill else GENERATES,
        )

    def _masks(self) -> tuple[TokenMask, ...] | None:
        """Of a round at the roots, and behind each draft that is given.  None: no row has one."""
        sampled = self.draft.num_draft_tokens
        masks = tuple(
            TokenMask(index * sampled + place, words)
            for index, row in enumerate(self.rows.values())
            if row.emits and row.request.constraint is not None
            for place, words in enumerate(row.request.constraint.path_words(row.num_given))
        )
        return masks or None

    def _given(self) -> tuple[GivenDrafts, ...]:
        """Who has a grammar takes no drafts but those whose masks the step has, or none."""
        return tuple(
            GivenDrafts(index, drafts.token_ids, drafts.parents)
            for index, row in enumerate(self.rows.values())
            if row.request.constraint is not None
            for drafts in [row.request.constraint.drafts.first(row.num_given)]
        )

    def _asked(self) -> tuple[int, ...]:
        """Rows whose drafts the host wants to know: for who reads them, and where none were given:
        what of these lies behind its next token may be given to the round after."""
        return tuple(
            index
            for index, row in enumerate(self.rows.values())
            if row.request.params.trace_tokens
            or (row.request.constraint is not None and row.request.params.speculative)
            if not row.num_given
        )

    def _prompt_spans(self) -> Iterator[PromptSpan]:
        first_token = 0  # of the row, in the step
        for index, row in enumerate(self.rows.values()):
            top = row.request.params.prompt_logprobs
            if top is not None and row.scored:
                start = first_token + row.scored.start - row.prefix_len
                yield PromptSpan(index, start, len(row.scored), top)
            first_token += row.extend_len


def _num_drafts(request: Request) -> int:
    """Drafts that the host knows of it."""
    return 0 if request.constraint is None else len(request.constraint.drafts.token_ids)


def _row_of(request: Request) -> int:
    assert request.row is not None, f"{request.request_id} is scheduled without a row"
    return request.row
