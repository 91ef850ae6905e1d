"""AsyncEngine: an LLM on a thread of its own, asked from an asyncio loop.

The LLM is not thread-safe, so the thread alone touches it.  Requests and cancellations reach it as
commands in a queue, on which it sleeps while nothing runs; what a turn brought goes back to the
asyncio loop in one call.
"""

import asyncio
import logging
import queue
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from paceline.core.errors import BusyError, DeadlineError, PacelineError, message
from paceline.core.options import MAX_QUEUED, known, require_possible
from paceline.engine.outputs import RequestOutput
from paceline.engine.ticket import Telling, Ticket
from paceline.engine.tracker import Tracker
from paceline.llm.admission import AdmittedPrompt
from paceline.llm.llm import LLM

_News = tuple[Ticket, int, RequestOutput]  # whose, of which prompt, what
_KEPT = 32  # a 32nd of the queue
T = TypeVar("T")
_LOG = logging.getLogger("paceline")


@dataclass(frozen=True, slots=True, eq=False)
class _Running:
    """One prompt of one ticket, as the thread follows it."""

    ticket: Ticket
    index: int  # of the prompt in its ticket
    tracker: Tracker

    def news(self) -> _News:
        """What its ticket is told of it now."""
        return self.ticket, self.index, self.ticket.telling.read(self.tracker)


class AsyncEngine:
    """Owns the thread; `start` and `stop` it from the loop that awaits `generate`.

    max_queued: completions that may wait beside those that run.
    """

    def __init__(self, llm: LLM, *, max_queued: int = MAX_QUEUED) -> None:
        self._llm = llm
        llm.admission.prepare_structures()  # now, while no other thread has to wait for it
        self._max_open = known(llm.prepared.options.max_num_seqs) + max_queued
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="paceline-engine")
        # Of the thread:
        self._running: dict[str, _Running] = {}  # by request id
        self._names: dict[Ticket, set[str]] = {}  # of these, by their ticket
        self._is_ending = False
        # Of the loop:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end_of_thread: asyncio.Future[None] | None = None
        self._tickets: set[Ticket] = set()
        self._num_open = 0  # completions of these
        self._open_of: Counter[str] = Counter()  # the same by client
        self._deadlines: dict[Ticket, asyncio.TimerHandle] = {}
        self._failure: str | None = None
        self._error: BaseException | None = None

    @property
    def failure(self) -> str | None:
        """Why no request is served any more; None while the thread lives."""
        return self._failure

    @property
    def error(self) -> BaseException | None:
        """What ended the thread, unless `stop` did."""
        return self._error

    @property
    def max_open(self) -> int:
        """Completions that may run and wait."""
        return self._max_open

    @property
    def num_tickets(self) -> int:
        """Callers that wait for an answer."""
        return len(self._tickets)

    def start(self) -> None:
        """Begin to serve, for the running asyncio loop."""
        self._loop = asyncio.get_running_loop()
        self._end_of_thread = self._loop.run_in_executor(self._thread, self._run)
        self._end_of_thread.add_done_callback(self._on_end)

    async def stop(self) -> None:
        """Abort what runs and wait for the thread to end; stopping twice is harmless."""
        self._commands.put(self._end)
        if self._end_of_thread is not None:
            await asyncio.wait([self._end_of_thread])
        self._thread.shutdown(wait=False)

    def abort_all(self) -> None:
        """End every request; each of their tickets gets its last news."""
        self._commands.put(self._abort_running)

    async def generate(
        self,
        admitted: Sequence[AdmittedPrompt],
        *,
        telling: Telling,
        stream: bool,
        deadline: float | None = None,
    ) -> Ticket:
        """Queue prompts, all or none.

        The ticket iterates over (index of the prompt, news): one of the whole answer, or with
        `stream` one whenever something has come.  Close it to cancel.  deadline: by the loop's
        clock; behind it the ticket raises DeadlineError, and the request ends.
        Raises RequestError before anything runs, BusyError when the queue is full, PacelineError
        when the engine has failed.
        """
        if self._failure is not None:
            raise PacelineError(self._failure)
        num_completions = sum(each.params.n for each in admitted)
        client = admitted[0].share.client
        self.require_room(num_completions, client)
        ticket = Ticket(
            len(admitted),
            num_completions=num_completions,
            telling=telling,
            stream=stream,
            on_close=partial(self._on_close, client),
        )
        self._tickets.add(ticket)
        self._num_open += num_completions
        self._open_of[client] += num_completions
        if deadline is not None:
            loop = asyncio.get_running_loop()
            self._deadlines[ticket] = loop.call_at(deadline, self._expire, ticket)
        self._commands.put(partial(self._submit, ticket, admitted))
        try:
            await ticket.accepted()
        except BaseException:
            ticket.close()
            raise
        return ticket

    async def ask(self, question: Callable[[LLM], T]) -> T:
        """What the thread finds between two turns; waits for ever for one that hangs."""
        assert self._loop is not None, "asked between start and stop"
        answer: asyncio.Future[T] = self._loop.create_future()

        def tell(found: T) -> None:
            if not answer.done():
                answer.set_result(found)

        self._commands.put(lambda: self._tell(tell, question(self._llm)))
        return await answer

    def require_room(self, num_completions: int, client: str | None = None) -> None:
        """Raise RequestError for what never has room, BusyError for what has none now.

        The last part of the queue is for clients that have nothing in it.
        """
        require_possible(num_completions, self._max_open)
        kept = self._max_open // _KEPT if client is not None and self._open_of[client] else 0
        if self._num_open + num_completions > self._max_open - kept:
            raise BusyError.about(
                "the queue",
                expected=f"at most {self._max_open - kept} completions, running and waiting",
                got=f"{self._num_open} and {num_completions} of this request",
                remedy="send it again later",
            )

    def _expire(self, ticket: Ticket) -> None:
        if not ticket.is_complete:
            self._commands.put(partial(self._cancel, ticket))
            remedy = "give it more time, ask for fewer tokens, or send it again later"
            ticket.fail(
                DeadlineError.about(
                    "an answer", expected="whole by its deadline", got="less", remedy=remedy
                )
            )

    def _on_close(self, client: str, ticket: Ticket) -> None:
        self._tickets.discard(ticket)
        self._num_open -= ticket.num_completions
        self._open_of[client] -= ticket.num_completions
        if not self._open_of[client]:
            del self._open_of[client]
        if ticket in self._deadlines:
            self._deadlines.pop(ticket).cancel()
        if not ticket.is_complete:
            self._commands.put(partial(self._cancel, ticket))

    # The thread's part from here on.

    def _run(self) -> None:
        engine = self._llm.engine
        while engine.has_work or not self._is_ending:
            self._obey(wait=not engine.has_work)
            if engine.has_work:
                self._turn()

    def _obey(self, *, wait: bool) -> None:
        """Every command that has come; with `wait`, at least one."""
        try:
            if wait:
                self._commands.get()()
            while True:
                self._commands.get_nowait()()
        except queue.Empty:
            return

    def _turn(self) -> None:
        news = []
        for tracker in self._llm.engine.step():
            running = self._running.get(tracker.request.request_id)
            if running is None:
                continue
            if tracker.is_finished:
                self._forget(running)
            if tracker.is_finished or running.ticket.stream:
                news.append(running.news())
        if news:
            self._tell(_deliver, news)

    def _submit(self, ticket: Ticket, admitted: Sequence[AdmittedPrompt]) -> None:
        try:
            trackers = self._llm.enqueue(admitted)
        except PacelineError as error:
            self._tell(ticket.fail, error)
            return
        for index, tracker in enumerate(trackers):
            name = tracker.request.request_id
            self._running[name] = _Running(ticket, index, tracker)
            self._names.setdefault(ticket, set()).add(name)
        self._tell(ticket.accept)

    def _cancel(self, ticket: Ticket) -> None:
        for name in self._names.pop(ticket, ()):
            del self._running[name]
            self._llm.abort(name)

    def _forget(self, running: _Running) -> None:
        """A prompt has ended."""
        name, names = running.tracker.request.request_id, self._names[running.ticket]
        del self._running[name]
        names.remove(name)
        if not names:
            del self._names[running.ticket]

    def _abort_running(self) -> None:
        news = []
        for name, running in self._running.items():
            self._llm.abort(name)
            news.append(running.news())
        self._running.clear()
        self._names.clear()
        self._tell(_deliver, news)

    def _end(self) -> None:
        self._is_ending = True
        self._abort_running()

    def _tell(self, function: Callable[..., None], *values: Any) -> None:
        assert self._loop is not None, "the thread runs between start and stop"
        self._loop.call_soon_threadsafe(function, *values)

    # Of the loop.

    def _on_end(self, thread: asyncio.Future[None]) -> None:
        """Let nobody wait for a thread that has ended."""
        self._error = error = thread.exception()
        got, remedy = "stopped", "start it again"
        if error is not None:
            _LOG.error("the engine has failed; it answers no more requests", exc_info=error)
            got, remedy = f"ended by {error!r}", "restart the server; its log holds the cause"
        self._failure = message("the engine", expected="running", got=got, remedy=remedy)
        for ticket in self._tickets:
            ticket.fail(PacelineError(self._failure))


def _deliver(news: Sequence[_News]) -> None:
    for ticket, index, told in news:
        ticket.deliver(index, told)
