"""Engine: requests in, snapshots out; owns the loop's state between turns."""

from collections.abc import Hashable, Sequence

from paceline.cache.page_keys import PageKeys, media_of
from paceline.core.errors import PacelineError, RequestError
from paceline.core.modes import End
from paceline.core.request.blocks import Blocks
from paceline.core.request.input_rows import EncoderInput, InputRows
from paceline.core.request.sampling_params import SamplingParams
from paceline.core.step import PromptPositions, Step
from paceline.engine.answers.receipt import EngineFacts, ReceiptLog
from paceline.engine.answers.tracker import Tracker
from paceline.engine.grammar import Constraint
from paceline.engine.loop import IdlingRunner, Launched, TurnFunction
from paceline.engine.request import ALIKE, FinishReason, Request, Share
from paceline.engine.scheduler import Scheduler
from paceline.text.tokenizer import Tokenizer


class Engine:
    """One scheduler, one runner, one loop.  Not thread-safe.

    turn: `overlapped_turn` or `twin_turn`, or one of them as `TurnLog.around` has it.
    sanitize: whenever nothing is left to do, see that rows, pages and the prefix tree agree; it
        looks at every page.
    rope_axes: of the model, which positions of a prompt must have.
    facts: what receipts say of every request; None: nothing.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: IdlingRunner,
        tokenizer: Tokenizer | None,
        *,
        turn: TurnFunction,
        context_len: int,
        sanitize: bool = False,
        rope_axes: int = 1,
        facts: EngineFacts | None = None,
    ) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._tokenizer = tokenizer
        self._turn = turn
        self._context_len = context_len
        self._sanitize = sanitize
        self._rope_axes = rope_axes
        self._facts = facts
        self._trackers: dict[str, Tracker] = {}
        self._noted: set[Tracker] = set()  # of these, those with a receipt
        self._in_flight: Launched | None = None
        self._failure: BaseException | None = None  # what ended a turn half-way
        self._epoch = 0

    @property
    def has_work(self) -> bool:
        """Whether a turn would do anything."""
        return self.scheduler.has_work or self._in_flight is not None

    @property
    def runner(self) -> IdlingRunner:
        """What launches its steps, for tools that launch their own while nothing runs."""
        return self._runner

    @property
    def in_flight(self) -> Step | None:
        """The step whose outputs the next turn brings."""
        return None if self._in_flight is None else self._in_flight.step

    def add(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        packed_ids: bytes | None = None,
        prompt: str | None = None,
        salt: Hashable = None,
        constraint: Constraint | None = None,
        input_rows: tuple[InputRows, ...] = (),
        encoder: EncoderInput | None = None,
        positions: PromptPositions | None = None,
        share: Share = ALIKE,
        blocks: Blocks | None = None,
        end: End = End.GENERATE,
        score_from: int = 1,
        second_from: int | None = None,
    ) -> Tracker:
        """Queue a request: params.n completions, which share the KV of their prompt.

        The others follow once the first has computed the prompt, where the prefix cache is on;
        otherwise each computes it.  params.seed must be set: it is part of what a preempted
        request resumes with.  packed_ids: [prompt_len] int32, prompt_ids once more: no turn makes
        them then.  constraint: of the first; the others have forks.  input_rows: stand in for the
        embeddings of prompt tokens, ascending.  encoder: what it brings for layers that read one.
        positions: of the prompt, where the model's rope has several axes; None: every token stands
        at its index.  share: how it takes turns with others that wait.  blocks: of the prompt,
        where prompts may have them.  end: what comes of it; score_from: as of `Request.make`;
        second_from: the first token of a pair's second text, where the model tells them apart.
        Raises RequestError, of which CapacityError, and changes nothing then.
        """
        self._require_whole()
        if positions is not None:
            fits = {"prompt_len": len(prompt_ids), "context_len": self._context_len}
            positions.require(axes=self._rope_axes, **fits)
        first = Request.make(
            request_id,
            prompt_ids,
            params,
            context_len=self._context_len,
            keys=PageKeys(salt, media=media_of(input_rows, blocks, prompt_ids), blocks=blocks),
            packed_ids=packed_ids,
            input_rows=input_rows,
            encoder=encoder,
            constraint=constraint,
            positions=positions,
            share=share,
            end=end,
            score_from=score_from,
            second_from=second_from,
        )
        requests = [first, *(first.sibling(index) for index in range(1, params.n))]
        self._queue(requests)
        receipt = ReceiptLog(self._facts) if params.receipt else None
        tracker = Tracker(requests, prompt=prompt, tokenizer=self._tokenizer, receipt=receipt)
        self._trackers[request_id] = tracker
        if receipt is not None:
            self._noted.add(tracker)
        return tracker

    def abort(self, request_id: str) -> bool:
        """End a request now; False when it is unknown or has ended already."""
        tracker = self._trackers.pop(request_id, None)
        if tracker is None:
            return False
        self._noted.discard(tracker)
        for request in tracker.requests:
            self.scheduler.abort(request.request_id)
        tracker.finish(FinishReason.ABORT)
        return True

    def step(self) -> list[Tracker]:
        """One turn of the loop; returns the requests it brought something to.  Costs what changed.

        An exception in the middle of a turn, Ctrl-C included, leaves device and books apart: it is
        raised, and the engine refuses to go on.
        """
        self._require_whole()
        self._epoch += 1
        try:
            turn = self._turn(self.scheduler, self._runner, self._epoch, self._in_flight)
        except BaseException as error:
            self._failure = error
            raise
        self._in_flight = turn.in_flight
        if self._noted and turn.in_flight is not None:
            self._note(turn.in_flight)
        touched: dict[Tracker, None] = {}
        for update in turn.updates:
            request = update.request
            tracker = self._trackers.get(request.parent_id)
            if tracker is None:
                continue
            touched[tracker] = None
            keep_tokens = tracker.apply(update)
            if keep_tokens is not None:
                self.scheduler.finish_on_host(request.request_id, keep_tokens)
            elif update.finish is None:  # it goes on, as most do
                continue
            if tracker.is_finished:
                del self._trackers[request.parent_id]
                self._noted.discard(tracker)
        if self._sanitize and not self.has_work:
            self.scheduler.check_integrity()
        return list(touched)

    def idle(self) -> bool:
        """While nothing is to be done: take back what the last requests held, and make a graph that
        a coming turn would stop for.

        Returns whether there was a graph; takes as long as a capture, and no request may be taken
        meanwhile.  Raises as `step`.
        """
        self._require_whole()
        assert not self.has_work, "a turn has more to do"
        try:
            self.scheduler.cache.offer_written()
            return self._runner.capture_owed()
        except BaseException as error:
            self._failure = error
            raise

    def drain(self) -> None:
        """Abort everything and run what is in flight to its end, unless a turn has failed."""
        for request_id in list(self._trackers):
            self.abort(request_id)
        while self.has_work and self._failure is None:
            self.step()

    def _note(self, launched: Launched) -> None:
        """For those who want a receipt, what was launched with rows of theirs."""
        step, run = launched.step, launched.run
        places = {row: index for index, row in enumerate(step.layout.rows)}
        for tracker in self._noted:
            assert tracker.receipt is not None, "it is noted"
            for request in tracker.requests:
                if request.row in places:  # it keeps its row until what is in flight has landed
                    tracker.receipt.note(request, places[request.row], step, run)

    def _queue(self, requests: Sequence[Request]) -> None:
        """All or none."""
        queued: list[Request] = []
        try:
            for request in requests:
                self.scheduler.add(request)
                queued.append(request)
        except RequestError:
            for request in queued:
                self.scheduler.abort(request.request_id)
            raise

    def _require_whole(self) -> None:
        if self._failure is not None:
            raise PacelineError.about(
                "engine",
                expected="whole",
                got=f"broken by {self._failure!r} in an earlier turn",
                remedy="build a new LLM",
            ) from self._failure
