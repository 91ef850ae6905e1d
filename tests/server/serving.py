"""A real server in this process: the bundled model, uvicorn on a free port, a thread for HTTP and
one for the engine, which stands in for a process; between them is the socket of two processes.

Nothing here goes by the clock: tests hold an engine's turns while they look, and clients wait as
long as it takes.
"""

import asyncio
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn

from paceline.engine.answers.tracker import Tracker
from paceline.llm.llm import LLM
from paceline.server.access.access import Access
from paceline.server.app import Tracing, build_app
from paceline.server.bodies.worker import BodyWorker
from paceline.server.border.host import Host
from paceline.server.border.outbox import Outbox
from paceline.server.border.remote import RemoteEngine
from paceline.server.life import Life
from paceline.server.limits import LIMITS, ServerLimits
from paceline.server.run import http_config
from paceline.server.service import Service
from paceline.text.tokenizer import Tokenizer

CONTEXT = 256
FIRST_WORDS = 4  # turns in which every row that runs says something


class Hosted:
    """A thread that has an engine's end of the border; see border.remote.Peer."""

    def __init__(self, llm: LLM) -> None:
        self.end, theirs = socket.socketpair()
        self.host = Host(llm, theirs, Outbox(theirs))
        self.num_kills = 0
        self._thread = threading.Thread(target=self._run, args=(theirs,), daemon=True)
        self._thread.start()

    def kill(self) -> None:
        self.num_kills += 1

    def wait(self) -> str:
        self._thread.join()
        return "with exit code 0"

    def _run(self, theirs: socket.socket) -> None:
        with theirs:
            self.host.run()


@dataclass(frozen=True)
class Serving:
    """A running server and what it runs on; tests may look, not touch."""

    url: str
    llm: LLM
    connections: Set[object]
    worker: BodyWorker
    tokenizer: Tokenizer  # of HTTP
    turns: "Turns"
    engine: RemoteEngine
    host: Host
    loop: asyncio.AbstractEventLoop

    def is_idle(self) -> bool:
        """No caller, no request, no step in flight, no page owned."""
        scheduler = self.llm.engine.scheduler
        pools = scheduler._cache.stats().groups
        return (
            len(self.engine.callers) == 0
            and len(self.host.followed) == 0
            and not self.llm.engine.has_work
            and not self.llm.engine._trackers
            and all((pool.owned, pool.queued) == (0, 0) for pool in pools)
        )


class Turns:
    """Holds an engine between `hold` and `go`, so that nothing ends while a test looks.

    It still takes requests and cancellations: a turn that is held brings nothing.
    """

    def __init__(self, llm: LLM) -> None:
        self._step = llm.engine.step
        self._changed = threading.Condition()
        self._left = math.inf
        llm.engine.step = self._next

    def hold(self, *, after: int) -> None:
        """Let `after` more turns run."""
        self._set(after)

    def go(self) -> None:
        self._set(math.inf)

    def _set(self, left: float) -> None:
        with self._changed:
            self._left = left
            self._changed.notify()

    def _next(self) -> list[Tracker]:
        with self._changed:
            if not self._changed.wait_for(lambda: self._left > 0, timeout=0.01):
                return []
            self._left -= 1
        return self._step()


def small_llm(*, model: str = "bundled", **more: Any) -> LLM:
    """In float32, where greedy answers have no ties."""
    return LLM(
        model,
        dtype="float32",
        threads=1,
        max_num_seqs=16,
        max_model_len=CONTEXT,
        enforce_eager=True,
        **more,
    )


@contextmanager
def serving(
    llm: LLM,
    *,
    api_keys: Sequence[str] = (),
    limits: ServerLimits = LIMITS,
    weights: Mapping[str, float] | None = None,
    trace: Tracing | None = None,
) -> Iterator[Serving]:
    """Serve `llm` as "tiny"; closes it behind."""
    bound = socket.create_server(("127.0.0.1", 0))
    peer, turns = Hosted(llm), Turns(llm)
    started: list[tuple[uvicorn.Server, Service, asyncio.AbstractEventLoop]] = []

    async def serve() -> None:
        engine = RemoteEngine(peer, max_queued=limits.max_queued, stuck_s=limits.stuck_s)
        await engine.connect()
        service = Service.of(
            engine, await engine.ready(), model="tiny", life=Life(), weights=weights or {}
        )
        app = build_app(
            service, access=Access(api_keys=tuple(api_keys)), limits=limits, trace=trace
        )
        server = uvicorn.Server(http_config(app, limits))
        started.append((server, service, asyncio.get_running_loop()))
        await server.serve(sockets=[bound])
        service.worker.close()
        await engine.stop()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    wait_until(lambda: bool(started) and started[0][0].started)
    (server, service, loop), port = started[0], bound.getsockname()[1]
    try:
        yield Serving(
            f"http://127.0.0.1:{port}",
            llm,
            server.server_state.connections,
            service.worker,
            service.reader.tokenizer,
            turns,
            service.engine,
            peer.host,
            loop,
        )
    finally:
        turns.go()
        server.should_exit = True
        thread.join()
        llm.close()


def wait_until(condition: Callable[[], bool]) -> None:
    """Returns when it holds; pytest's timeout ends what never comes."""
    while not condition():
        time.sleep(0.01)
