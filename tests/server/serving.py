"""A real server in this process: the bundled model, uvicorn on a free port, a thread for both.

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

from paceline.engine.tracker import Tracker
from paceline.llm.async_engine import AsyncEngine
from paceline.llm.llm import LLM
from paceline.server.access.access import Access
from paceline.server.app import build_app
from paceline.server.limits import LIMITS, ServerLimits
from paceline.server.run import http_config
from paceline.server.service import Service
from paceline.server.worker import BodyWorker

CONTEXT = 256
FIRST_WORDS = 4  # turns in which every row that runs says something


@dataclass(frozen=True)
class Serving:
    """A running server and what it runs on; tests may look, not touch."""

    url: str
    llm: LLM
    connections: Set[object]
    worker: BodyWorker
    turns: "Turns"
    engine: AsyncEngine
    loop: asyncio.AbstractEventLoop

    def is_idle(self) -> bool:
        """No caller, no request, no step in flight, no page owned."""
        scheduler = self.llm.engine.scheduler
        pools = scheduler._cache.stats().groups
        return (
            self.engine.num_tickets == 0
            and not self.engine._running
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
) -> Iterator[Serving]:
    """Serve `llm` as "tiny"; closes it behind."""
    service = Service.of(llm, model="tiny", max_queued=limits.max_queued, weights=weights or {})
    app = build_app(service, access=Access(api_keys=tuple(api_keys)), limits=limits)
    server = uvicorn.Server(http_config(app, limits))
    bound = socket.create_server(("127.0.0.1", 0))
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve(sockets=[bound])

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    wait_until(lambda: server.started)
    url, turns = f"http://127.0.0.1:{bound.getsockname()[1]}", Turns(llm)
    try:
        yield Serving(
            url,
            llm,
            server.server_state.connections,
            service.worker,
            turns,
            service.engine,
            loops[0],
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
