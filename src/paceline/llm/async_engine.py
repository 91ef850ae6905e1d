"""AsyncEngine: an LLM on a thread of its own, asked from an asyncio loop of the same process.

The LLM is not thread-safe, so the thread alone touches it.  Requests and cancellations reach it as
commands in a queue, on which it sleeps while nothing runs; what a turn brought goes back to the
asyncio loop in one call.
"""

import asyncio
import logging
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from paceline.core.errors import PacelineError, message, told
from paceline.core.options.engine_options import MAX_QUEUED, known
from paceline.engine.answers.outputs import RequestOutput
from paceline.engine.answers.ticket import Ticket, newest
from paceline.llm.admission import AdmittedPrompt
from paceline.llm.callers import Callers
from paceline.llm.followed import LULL_S, Followed, Following
from paceline.llm.llm import LLM

_News = tuple[int, int, RequestOutput]  # of which ticket, of which prompt, what
_LOG = logging.getLogger("paceline")


class AsyncEngine:
    """Owns the thread; `start` and `stop` it from the loop that awaits `generate`.

    max_queued: completions that may wait beside those that run.
    """

    def __init__(self, llm: LLM, *, max_queued: int = MAX_QUEUED) -> None:
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="paceline-engine")
        # Of the thread:
        self._followed = Followed(llm)
        self._is_ending = False
        # Of the loop:
        self._callers = Callers(
            known(llm.prepared.options.max_num_seqs) + max_queued,
            cancel=lambda number: self._commands.put(partial(self._followed.cancel, number)),
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end_of_thread: asyncio.Future[None] | None = None

    @property
    def callers(self) -> Callers:
        """Who waits for an answer."""
        return self._callers

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

    async def generate(self, admitted: Sequence[AdmittedPrompt], *, stream: bool) -> Ticket:
        """Queue prompts, all or none.

        The ticket iterates over (index of the prompt, snapshot): the last, or with `stream` one
        whenever something has come.  Close it to cancel.
        Raises RequestError before anything runs, BusyError when the queue is full, PacelineError
        when the engine has failed.
        """
        return await self._callers.open(
            lambda number: self._commands.put(partial(self._submit, number, admitted, stream)),
            num_prompts=len(admitted),
            num_completions=sum(each.params.n for each in admitted),
            client=admitted[0].share.client,
            join=newest,
        )

    # The thread's part from here on.

    def _run(self) -> None:
        while self._followed.has_work or not self._is_ending:
            self._obey(wait=not self._followed.has_work)
            if self._followed.has_work:
                self._tell_of(self._followed.turn())

    def _obey(self, *, wait: bool) -> None:
        """Every command that has come; with `wait`, at least one."""
        try:
            if wait:
                self._next_command()()
            while True:
                self._commands.get_nowait()()
        except queue.Empty:
            return

    def _next_command(self) -> Callable[[], None]:
        """The next that comes; in a lull graphs are made ready."""
        with suppress(queue.Empty):
            return self._commands.get(timeout=LULL_S)
        while self._followed.make_ready() and self._commands.empty():
            pass
        return self._commands.get()

    def _submit(self, number: int, admitted: Sequence[AdmittedPrompt], stream: bool) -> None:
        try:
            self._followed.submit(number, admitted, stream=stream)
        except PacelineError as error:
            self._tell(self._callers.refuse, number, error)
        else:
            self._tell(self._callers.accept, number)

    def _end(self) -> None:
        self._is_ending = True
        self._tell_of(self._followed.abort())

    def _tell_of(self, followings: Sequence[Following]) -> None:
        if followings:
            self._tell(
                self._deliver,
                [(each.number, each.index, each.tracker.snapshot()) for each in followings],
            )

    def _tell(self, function: Callable[..., None], *values: Any) -> None:
        assert self._loop is not None, "the thread runs between start and stop"
        self._loop.call_soon_threadsafe(function, *values)

    # Of the loop.

    def _deliver(self, news: Sequence[_News]) -> None:
        for number, index, snapshot in news:
            self._callers.deliver(number, index, snapshot)

    def _on_end(self, thread: asyncio.Future[None]) -> None:
        """Let nobody wait for a thread that has ended."""
        error = thread.exception()
        got, remedy = "stopped", "start it again"
        if error is not None:
            _LOG.error("the engine has failed; it answers no more requests", exc_info=error)
            got, remedy = f"ended by {told(error)}", "build a new AsyncLLM; the log holds the cause"
        self._callers.fail(message("the engine", expected="running", got=got, remedy=remedy))
