"""Ticket: what a caller holds while the engine works for it.  Lives in the asyncio loop."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

from paceline.core.errors import PacelineError
from paceline.engine.answers.outputs import RequestOutput


class News(Protocol):
    """What is delivered, in whatever form `join` takes."""

    @property
    def finished(self) -> bool:
        """Whether it is the last of its prompt."""


def newest(snapshots: Sequence[RequestOutput]) -> RequestOutput:
    """Consecutive snapshots of one request, at least one, as one."""
    return snapshots[-1]


class Ticket(AsyncIterator[tuple[int, RequestOutput]]):
    """News of some prompts, as (index, news); those that wait for the reader are joined.

    join: one of consecutive ones, at least one; on_close: called once.
    Ends after the last finished one.  Raises what `fail` was given.
    """

    def __init__(
        self,
        num_prompts: int,
        *,
        join: Callable[[Sequence[Any]], RequestOutput],
        on_close: Callable[[], None],
    ) -> None:
        self._join = join
        self._num_left = num_prompts
        self._on_close = on_close
        self._news: dict[int, list[News]] = {}  # by index, the longest waiting first
        self._wake = asyncio.Event()
        self._is_accepted = False
        self._is_closed = False
        self._error: PacelineError | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the engine has nothing left to do for it."""
        return self._error is not None or self._num_left == 0

    def accept(self) -> None:
        """The engine has queued every prompt."""
        self._is_accepted = True
        self._wake.set()

    def deliver(self, index: int, news: News) -> None:
        """Something new of one prompt."""
        self._news.setdefault(index, []).append(news)
        self._num_left -= news.finished
        self._wake.set()

    def fail(self, error: PacelineError) -> None:
        """Nothing more comes; a complete ticket is not touched."""
        if not self.is_complete:
            self._error = error
        self._wake.set()

    def close(self) -> None:
        """Cancel what still runs; closing twice is harmless."""
        if not self._is_closed:
            self._is_closed = True
            self._on_close()

    async def accepted(self) -> None:
        """Wait until the engine has taken or refused it.  Raises what it refused it with."""
        while not self._is_accepted:
            if self._error is not None:
                raise self._error
            await self._woken()

    async def __anext__(self) -> tuple[int, RequestOutput]:
        while not self._news:
            if self._error is not None:
                raise self._error
            if self._num_left == 0:
                self.close()
                raise StopAsyncIteration
            await self._woken()
        index = next(iter(self._news))
        return index, self._join(self._news.pop(index))

    async def _woken(self) -> None:
        self._wake.clear()
        await self._wake.wait()
