"""Bind, load, serve, drain: the life of a server process."""

import asyncio
import logging
import math
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType

import uvicorn
from fastapi import FastAPI

from paceline.core.errors import ConfigError
from paceline.llm.async_engine import AsyncEngine
from paceline.llm.llm import LLM
from paceline.plan.machine import settled
from paceline.server.app import build_app
from paceline.server.limits import LIMITS, ServerLimits
from paceline.server.protocol import protocol_of
from paceline.server.service import Service

DRAIN_S = 20.0  # how long a stopping server lets requests run on
_FAREWELL_S = 2.0  # and how long clients may then take to read their last event
_POLL_S = 0.1  # signals set flags
_BACKLOG = 2048  # connections the kernel holds for us


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a server listens, and as what."""

    host: str
    port: int  # 0: any that is free
    model: str  # the name clients ask for
    api_key: str | None = None
    limits: ServerLimits = LIMITS


def bind(address: Address) -> socket.socket:
    """A bound socket that does not listen yet.  Raises ConfigError."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with ExitStack() as undo:
            bound = undo.enter_context(socket.socket(family, kind, protocol))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(where)
            undo.pop_all()
    except OSError as error:
        raise _not_free(address, error) from error
    return bound


def _not_free(address: Address, error: OSError) -> ConfigError:
    return ConfigError.about(
        "--host and --port",
        expected="an address that is free here",
        got=f"{address.host}:{address.port} ({error})",
        remedy="choose another port, or 0 for any that is free",
    )


def serve(llm: LLM, bound: socket.socket, address: Address, *, tell: Callable[[str], None]) -> None:
    """Serve until Ctrl-C or SIGTERM; the second one does not wait for running requests.

    tell: shows a line to whoever started the server.  For the main thread.  Raises ConfigError when
    another server has begun to listen at the address meanwhile.
    """
    limits = address.limits
    service = Service.of(llm, model=address.model, max_queued=limits.max_queued)
    config = http_config(build_app(service, api_key=address.api_key, limits=limits), limits)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    server, hurry = uvicorn.Server(config), threading.Event()
    try:
        bound.listen(_BACKLOG)
    except OSError as error:
        raise _not_free(address, error) from error
    tell(banner(service, bound, needs_key=address.api_key is not None))
    # In a thread of its own: in the main thread uvicorn would take the signals, and raise them once
    # more behind its end.
    with ThreadPoolExecutor(1, "paceline-http") as thread, _signals(server, hurry), settled():
        thread.submit(asyncio.run, _serve(server, bound, service.engine, hurry, tell)).result()


def http_config(app: FastAPI, limits: ServerLimits) -> uvicorn.Config:
    """How `app` is served: whoever serves it otherwise serves it without the limits."""
    return uvicorn.Config(
        app,
        http=protocol_of(limits),  # type: ignore[arg-type]
        timeout_keep_alive=limits.idle_s,  # type: ignore[arg-type]
        log_config=None,
        access_log=False,
        lifespan="on",
    )


@contextmanager
def _signals(server: uvicorn.Server, hurry: threading.Event) -> Iterator[None]:
    """The first signal stops the server, further ones set `hurry`."""

    def note(number: int, frame: FrameType | None) -> None:
        if server.should_exit:
            hurry.set()
        server.should_exit = True

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


async def _serve(
    server: uvicorn.Server,
    bound: socket.socket,
    engine: AsyncEngine,
    hurry: threading.Event,
    tell: Callable[[str], None],
) -> None:
    draining = asyncio.ensure_future(_drain(server, engine, hurry, tell))
    try:
        await server.serve(sockets=[bound])
    finally:
        draining.cancel()
        await engine.stop()


async def _drain(
    server: uvicorn.Server,
    engine: AsyncEngine,
    hurry: threading.Event,
    tell: Callable[[str], None],
) -> None:
    """Once the server stops: wait a while, then end what still runs, so that streams end whole."""
    await _until(lambda: server.should_exit)
    if engine.num_tickets:
        count = engine.num_tickets
        tell(f"finishing {count} request(s), at most {DRAIN_S:.0f} s; Ctrl-C: at once")
    await _until(hurry.is_set, timeout_s=DRAIN_S)
    engine.abort_all()
    await asyncio.sleep(_FAREWELL_S)
    server.force_exit = True


async def _until(condition: Callable[[], bool], *, timeout_s: float = math.inf) -> None:
    clock = asyncio.get_running_loop().time
    end = clock() + timeout_s
    while not condition() and clock() < end:
        await asyncio.sleep(_POLL_S)


def banner(service: Service, bound: socket.socket, *, needs_key: bool) -> str:
    """Where the server is and how to ask it something."""
    host, port = bound.getsockname()[:2]
    reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(
        host, f"[{host}]" if ":" in host else host
    )
    url = f"http://{reachable}:{port}"
    key = " -H 'Authorization: Bearer '$PACELINE_API_KEY" if needs_key else ""
    body = f'{{"model": "{service.model}", "prompt": "def fibonacci(n):", "max_tokens": 48}}'
    return (
        f"serving {service.model} on {url}/v1, Ctrl-C stops\n"
        f"  curl {url}/v1/completions{key} -H 'Content-Type: application/json' -d '{body}'"
    )
