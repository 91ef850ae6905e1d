"""Ticket: what a caller holds while the engine works for it.  Lives in the asyncio loop."""

import asyncio
from collections.abc import AsyncIterator, Callable

from paceline.core.errors import PacelineError
from paceline.engine.outputs import RequestGrowth, joined


class Ticket(AsyncIterator[tuple[int, RequestGrowth]]):
    """Growths of some prompts, as (index, growth); those that wait for the reader are joined.

    Ends after the last finished one.  Raises what `fail` was given.
    """

    def __init__(
        self,
        num_prompts: int,
        *,
        num_completions: int,
        wants_growth: bool,
        on_close: Callable[["Ticket"], None],
    ) -> None:
        self.num_completions = num_completions
        self.wants_growth = wants_growth  # whether unfinished growths are worth sending
        self._num_left = num_prompts
        self._on_close = on_close
        self._news: dict[int, list[RequestGrowth]] = {}  # by index, the longest waiting first
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

    def deliver(self, index: int, growth: RequestGrowth) -> None:
        """Something new of one prompt."""
        self._news.setdefault(index, []).append(growth)
        self._num_left -= growth.finished
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
            self._on_close(self)

    async def accepted(self) -> None:
        """Wait until the engine has taken or refused it.  Raises what it refused it with."""
        while not self._is_accepted:
            if self._error is not None:
                raise self._error
            await self._woken()

    async def __anext__(self) -> tuple[int, RequestGrowth]:
        while not self._news:
            if self._error is not None:
                raise self._error
            if self._num_left == 0:
                self.close()
                raise StopAsyncIteration
            await self._woken()
        index = next(iter(self._news))
        return index, joined(self._news.pop(index))

    async def _woken(self) -> None:
        self._wake.clear()
        await self._wake.wait()
