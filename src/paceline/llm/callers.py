"""Callers: who waits for answers in an asyncio loop, whichever way the engine is reached.

Every caller has a `Ticket`, and the engine knows it by the ticket's number.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from paceline.core.errors import BusyError, DeadlineError, PacelineError
from paceline.core.request.sampling_params import require_possible
from paceline.engine.answers.outputs import RequestOutput
from paceline.engine.answers.ticket import News, Ticket

_KEPT = 32  # a 32nd of the queue


class Callers:
    """Owns the tickets of one loop, and how many completions they may have.

    max_open: completions that may run and wait; cancel: tells the engine that a ticket's request
    is wanted no more.
    """

    def __init__(self, max_open: int, *, cancel: Callable[[int], None]) -> None:
        self.max_open = max_open
        self._cancel = cancel
        self._tickets: dict[int, Ticket] = {}  # by number
        self._num_opened = 0
        self._num_open = 0  # completions of these
        self._open_of: Counter[str] = Counter()  # the same by client
        self._deadlines: dict[int, asyncio.TimerHandle] = {}  # by number
        self._failure: str | None = None

    @property
    def failure(self) -> str | None:
        """Why nobody is answered any more; None while the engine lives."""
        return self._failure

    def __len__(self) -> int:
        """Callers that wait for an answer."""
        return len(self._tickets)

    async def open(
        self,
        submit: Callable[[int], None],
        *,
        num_prompts: int,
        num_completions: int,
        client: str,
        join: Callable[[Sequence[Any]], RequestOutput],
        deadline: float | None = None,
    ) -> Ticket:
        """A ticket of prompts that the engine has taken, all or none.

        submit: hands them to the engine under the ticket's number.  The ticket iterates over (index
        of the prompt, news); join: makes one of those that wait for its reader.  Close it to
        cancel.  deadline: by the loop's clock; behind it the ticket raises DeadlineError, and the
        request ends.
        Raises what the engine refuses it with before anything runs, BusyError when the queue is
        full, PacelineError when the engine has failed.
        """
        if self._failure is not None:
            raise PacelineError(self._failure)
        self.require_room(num_completions, client)
        number = self._num_opened
        self._num_opened += 1
        close = partial(self._on_close, number, client, num_completions)
        ticket = Ticket(num_prompts, join=join, on_close=close)
        self._tickets[number] = ticket
        self._num_open += num_completions
        self._open_of[client] += num_completions
        if deadline is not None:
            loop = asyncio.get_running_loop()
            self._deadlines[number] = loop.call_at(deadline, self._expire, number)
        try:
            submit(number)
            await ticket.accepted()
        except BaseException:
            ticket.close()
            raise
        return ticket

    def require_room(self, num_completions: int, client: str | None = None) -> None:
        """Raise RequestError for what never has room, BusyError for what has none now.

        The last part of the queue is for clients that have nothing in it.
        """
        require_possible(num_completions, self.max_open)
        kept = self.max_open // _KEPT if client is not None and self._open_of[client] else 0
        if self._num_open + num_completions > self.max_open - kept:
            raise BusyError.about(
                "the queue",
                expected=f"at most {self.max_open - kept} completions, running and waiting",
                got=f"{self._num_open} and {num_completions} of this request",
                remedy="send it again later",
            )

    # What the engine says; of a ticket that was closed nobody hears it.

    def accept(self, number: int) -> None:
        """It has queued every prompt of a ticket."""
        if number in self._tickets:
            self._tickets[number].accept()

    def refuse(self, number: int, error: PacelineError) -> None:
        """It has queued none."""
        if number in self._tickets:
            self._tickets[number].fail(error)

    def deliver(self, number: int, index: int, news: News) -> None:
        """Something new of one prompt."""
        if number in self._tickets:
            self._tickets[number].deliver(index, news)

    def fail(self, failure: str) -> None:
        """It has ended: let nobody wait for it."""
        self._failure = failure
        for ticket in self._tickets.values():
            ticket.fail(PacelineError(failure))

    def _expire(self, number: int) -> None:
        ticket = self._tickets[number]
        if not ticket.is_complete:
            self._cancel(number)
            remedy = "give it more time, ask for fewer tokens, or send it again later"
            ticket.fail(
                DeadlineError.about(
                    "an answer", expected="whole by its deadline", got="less", remedy=remedy
                )
            )

    def _on_close(self, number: int, client: str, num_completions: int) -> None:
        ticket = self._tickets.pop(number)
        self._num_open -= num_completions
        self._open_of[client] -= num_completions
        if not self._open_of[client]:
            del self._open_of[client]
        if number in self._deadlines:
            self._deadlines.pop(number).cancel()
        if not ticket.is_complete:
            self._cancel(number)
