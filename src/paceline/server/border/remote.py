"""RemoteEngine: HTTP's end of the border: an engine elsewhere, asked from an asyncio loop."""

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.core.errors import PacelineError, RequestError, message
from paceline.core.modes import End
from paceline.core.request.sampling_params import SamplingParams
from paceline.engine.answers.outputs import joined
from paceline.engine.answers.ticket import Ticket
from paceline.engine.request import Share
from paceline.llm.callers import Callers
from paceline.server.border.messages import (
    Abort,
    BorderMessage,
    Broken,
    Cancel,
    EngineRefusal,
    Frames,
    Grown,
    Leave,
    LoadProgress,
    LogLine,
    Look,
    Looked,
    News,
    Queued,
    Ready,
    Stuck,
    Submit,
    framed,
)
from paceline.server.limits import LIMITS

_BEAT_S = 1.0
_LOOK_S = 2.0  # longer than a turn
_LOG = logging.getLogger("paceline")


class Peer(Protocol):
    """Who has the other end."""

    @property
    def end(self) -> socket.socket:
        """Ours."""

    def kill(self) -> None:
        """End it, whatever it does."""

    def wait(self) -> str:
        """How it has ended, in words; waits for that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadState:
    """How far an engine is loaded."""

    phase: str
    percent: float | None  # of the phase; None: nobody knows
    eta_s: float | None  # until the phase ends; None: nobody knows


class RemoteEngine(asyncio.Protocol):
    """Owns what is known of the engine, and who waits for it; of the loop that called `connect`.

    max_queued: completions that may wait beside those that run; stuck_s: seconds that it may take
    to answer before it is called stuck; load_stuck_s: that a phase of its load may say nothing.
    """

    def __init__(
        self,
        peer: Peer,
        *,
        max_queued: int,
        stuck_s: float,
        load_stuck_s: float = LIMITS.load_stuck_s,
    ) -> None:
        self._peer = peer
        self._max_queued = max_queued
        self._stuck_s = stuck_s
        self._load_stuck_s = load_stuck_s
        self._loop = asyncio.get_running_loop()
        self._frames = Frames(News)
        self._line: asyncio.Transport | None = None
        self._callers = Callers(0, cancel=self._cancel)
        self._ready: asyncio.Future[Ready] = self._loop.create_future()
        self._ready.add_done_callback(lambda ready: ready.exception())  # somebody may not ask
        self._ended = asyncio.Event()
        self._asked: deque[tuple[float, asyncio.Future[Looked]]] = deque()  # when, oldest first
        self._stuck_in: str | None = None  # what of a turn it says that hangs
        self._fault: str | None = None
        self._is_stopped = False
        self._phase_began = self._told_at = self._loop.time()
        self._loading = LoadProgress(phase="starting", done=0, total=0)

    @property
    def callers(self) -> Callers:
        """Who waits for an answer; they have no room until it is ready."""
        return self._callers

    @property
    def fault(self) -> str | None:
        """Why it has ended, unless `stop` ended it."""
        return self._fault

    @property
    def stuck(self) -> str | None:
        """What it hangs in, as far as it says so; None while it answers."""
        if not self._ready.done():
            return self._stuck_load()
        silent_s = self._silent_s
        if self._stuck_in is None and silent_s < self._stuck_s:
            return None
        remedy = "wait, or restart the server if it does not go on"
        got = f"silent for {silent_s:.0f} s, in {self._stuck_in or 'an unknown phase'}"
        expected = f"answering within {self._stuck_s:g} s"
        return message("the engine", expected=expected, got=got, remedy=remedy)

    def _stuck_load(self) -> str | None:
        silent_s = self._loop.time() - self._told_at
        if silent_s < self._load_stuck_s:
            return None
        return message(
            "the load",
            expected=f"further within {self._load_stuck_s:g} s",
            got=f"silent for {silent_s:.0f} s, in the phase {self._loading.phase!r}",
            remedy="restart the server, or raise --load-stuck-seconds",
        )

    def progress(self) -> LoadState:
        """How far it is loaded."""
        loading, in_phase_s = self._loading, self._loop.time() - self._phase_began
        share = loading.done / loading.total if loading.total else None
        return LoadState(
            phase=loading.phase,
            percent=None if share is None else 100.0 * share,
            eta_s=in_phase_s * (1.0 / share - 1.0) if share else None,
        )

    async def connect(self) -> None:
        """Take our end of the border."""
        await self._loop.create_connection(lambda: self, sock=self._peer.end)

    async def ready(self) -> Ready:
        """Wait until it serves.  Raises what its start raised on purpose, or PacelineError for an
        end without a word."""
        ready = await asyncio.shield(self._ready)  # who waits may give up
        self._callers.max_open = ready.max_running + self._max_queued
        return ready

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        end: End = End.GENERATE,
        second_from: Sequence[int] = (),
        share: Share,
        stream: bool,
        deadline: float | None = None,
    ) -> Ticket:
        """Queue prompts, token ids of each, all or none.

        The ticket iterates over (index of the prompt, growth): one of the whole answer, or with
        `stream` one whenever something has come.  second_from: of
        pairs, where the second text of each begins.  deadline: by the loop's clock.
        Raises as `Callers.open`, RequestError for what cannot cross.
        """
        ids = tuple(map(tuple, prompts))

        def submit(number: int) -> None:
            asked = Submit(
                number=number,
                prompts=ids,
                params=params,
                end=end,
                second_from=tuple(second_from),
                share=share,
                stream=stream,
            )
            try:
                self._say(asked)
            except OverflowError as error:
                raise RequestError.about(
                    "an integer of a request",
                    expected="within 64 bits",
                    got="one beyond",
                    remedy="send a smaller one",
                ) from error

        return await self._callers.open(
            submit,
            num_prompts=len(prompts),
            num_completions=len(prompts) * params.n,
            client=share.client,
            join=lambda grown: joined([each.growth(ids[each.index]) for each in grown]),
            deadline=deadline,
        )

    async def look(self) -> Looked | None:
        """What it does; None where it does not say so in time."""
        if self._callers.failure is not None:
            return None
        try:
            async with asyncio.timeout(_LOOK_S):
                return await self._ask()
        except TimeoutError:
            return None

    def abort(self) -> None:
        """End every request; each of their tickets gets its last news."""
        self._say(Abort())

    def kill(self) -> None:
        """End it, whatever it does; of any thread."""
        self._peer.kill()

    async def stop(self) -> None:
        """Abort what runs and wait for its end; one that loads is killed.  Stopping twice is
        harmless."""
        self._is_stopped = True
        if self._line is None or not self._ready.done():
            self._peer.kill()
        self._say(Leave())
        await self._ended.wait()

    async def watch(self) -> None:
        """Ask it now and then whether it lives, and log when it does not say so."""
        was_stuck = False
        while True:
            await asyncio.sleep(_BEAT_S)
            if not self._asked:
                self._ask()
            stuck = self.stuck
            if stuck is not None and not was_stuck:
                _LOG.error("%s", stuck)
            if stuck is None and was_stuck:
                _LOG.warning("the engine answers again")
            was_stuck = stuck is not None

    @property
    def _silent_s(self) -> float:
        """Since the oldest question without an answer."""
        return self._loop.time() - self._asked[0][0] if self._asked else 0.0

    def _ask(self) -> asyncio.Future[Looked]:
        answer: asyncio.Future[Looked] = self._loop.create_future()
        self._asked.append((self._loop.time(), answer))
        self._say(Look())
        return answer

    def _cancel(self, number: int) -> None:
        self._say(Cancel(number=number))

    def _say(self, command: BorderMessage) -> None:
        if self._line is not None and not self._line.is_closing():
            self._line.write(framed([command]))

    # What it says.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), transport
        self._line = transport

    def data_received(self, data: bytes) -> None:
        for news in self._frames.feed(data):
            self._hear(news)

    def connection_lost(self, error: Exception | None) -> None:
        self._loop.create_task(self._on_end())

    def _hear(self, news: BorderMessage) -> None:
        match news:
            case Grown():
                self._callers.deliver(news.number, news.index, news)
            case Queued():
                self._callers.accept(news.number)
            case EngineRefusal(number=int(number)):
                self._callers.refuse(number, news.error())
            case EngineRefusal():
                self._ready.set_exception(news.error())
            case Looked():
                _, answer = self._asked.popleft()
                if not answer.done():  # nobody waits that long
                    answer.set_result(news)
            case LogLine():
                _LOG.log(news.level, "%s", news.text)
            case Stuck():
                self._stuck_in = news.phase
            case LoadProgress():
                self._told_at = self._loop.time()
                if news.phase != self._loading.phase:
                    self._phase_began = self._loop.time()
                self._loading = news
            case Ready():
                self._loading = LoadProgress(phase="reading the tokenizer", done=0, total=0)
                self._ready.set_result(news)
            case Broken():
                self._fail(f"ended by {news.cause}")

    def _fail(self, how: str) -> None:
        """Let nobody wait for it."""
        if self._callers.failure is None:
            remedy = "restart the server; its log holds the cause"
            text = message("the engine", expected="running", got=how, remedy=remedy)
            self._fault = None if self._is_stopped else text
            self._callers.fail(text)

    async def _on_end(self) -> None:
        how = await asyncio.to_thread(self._peer.wait)
        self._fail("stopped" if self._is_stopped else f"ended {how}")
        if not self._ready.done():
            self._ready.set_exception(PacelineError(self._callers.failure or ""))
        self._ended.set()
