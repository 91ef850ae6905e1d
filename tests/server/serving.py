"""A real server in this process: the bundled model, uvicorn on a free port, a thread for both."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn

from paceline.engine.llm import LLM
from paceline.server.app import build_app
from paceline.server.async_engine import AsyncEngine
from paceline.server.limits import LIMITS, Limits
from paceline.server.service import Service

CONTEXT = 256


@dataclass(frozen=True)
class Serving:
    """A running server and what it runs on; tests may look, not touch."""

    url: str
    llm: LLM
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


def small_llm(**more: Any) -> LLM:
    """In float32, where greedy answers have no ties."""
    return LLM(
        "bundled",
        dtype="float32",
        threads=1,
        max_num_seqs=16,
        max_model_len=CONTEXT,
        enforce_eager=True,
        **more,
    )


@contextmanager
def serving(llm: LLM, *, api_key: str | None = None, limits: Limits = LIMITS) -> Iterator[Serving]:
    """Serve `llm` as "tiny"; closes it behind."""
    service = Service.of(llm, model="tiny", max_queued=limits.max_queued)
    app = build_app(service, api_key=api_key, max_body_mib=limits.max_body_mib)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="on"))
    bound = socket.create_server(("127.0.0.1", 0))
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve(sockets=[bound])

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield Serving(f"http://127.0.0.1:{bound.getsockname()[1]}", llm, service.engine, loops[0])
    finally:
        server.should_exit = True
        thread.join(timeout=30)
        assert not thread.is_alive()
        llm.close()


def wait_until(condition: Callable[[], bool], *, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
