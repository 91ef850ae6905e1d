"""Bind, load, serve, drain: the life of a server process."""

import asyncio
import logging
import math
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FrameType

import uvicorn
from fastapi import FastAPI

from paceline.core.errors import ConfigError
from paceline.llm.llm import LLM
from paceline.plan.machine import settled
from paceline.server.access.access import OPEN_ACCESS, Access
from paceline.server.app import build_app
from paceline.server.life import Life
from paceline.server.limits import LIMITS, ServerLimits
from paceline.server.protocol import protocol_of
from paceline.server.service import Service
from paceline.server.tools.formats import BY_TEMPLATE, Parsers

STUCK = 70  # exit code of a server that could not end by itself; EX_SOFTWARE of sysexits.h
_FAREWELL_S = 2.0  # how long clients may take to read their last event
_GRACE_S = 5.0  # and whatever is left then
_POLL_S = 0.1  # signals set flags
_BACKLOG = 2048  # connections the kernel holds for us


leave = os._exit  # without waiting for threads


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a server listens, and as what."""

    host: str
    port: int  # 0: any that is free
    model: str  # the name clients ask for
    access: Access = OPEN_ACCESS
    weights: Mapping[str, float] = field(default_factory=dict)  # by client
    limits: ServerLimits = LIMITS
    parsers: Parsers = BY_TEMPLATE


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


def serve(
    llm: LLM, bound: socket.socket, address: Address, *, tell: Callable[[str], None]
) -> str | None:
    """Serve until Ctrl-C or SIGTERM; the second one does not wait for running requests.

    Returns why the engine has ended, if it did so by itself.  Should the end not come within its
    limits, because the engine or the loop hangs, the process is left at once, with STUCK.
    tell: shows a line to whoever started the server; it neither waits nor raises.  For the main
    thread.  Raises ConfigError when another server has begun to listen at the address meanwhile.
    """
    limits = address.limits
    service = Service.of(
        llm,
        model=address.model,
        max_queued=limits.max_queued,
        weights=address.weights,
        parsers=address.parsers,
    )
    access = address.access
    config = http_config(build_app(service, access=access, limits=limits), limits, access)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    server = uvicorn.Server(config)
    try:
        bound.listen(_BACKLOG)
    except OSError as error:
        raise _not_free(address, error) from error
    # In a thread of its own: in the main thread uvicorn would take the signals, and raise them once
    # more behind its end.
    with (
        _last_resort(service.life, limits.drain_s + _FAREWELL_S + _GRACE_S),
        ThreadPoolExecutor(1, "paceline-http") as thread,
        _signals(service.life),
        settled(),
    ):
        tell(banner(service, bound, access))
        thread.submit(asyncio.run, _serve(server, bound, service, limits, tell)).result()
    return None if service.engine.error is None else service.engine.failure


def http_config(app: FastAPI, limits: ServerLimits, access: Access = OPEN_ACCESS) -> uvicorn.Config:
    """How `app` is served: whoever serves it otherwise serves it without the limits."""
    return uvicorn.Config(
        app,
        http=protocol_of(limits),  # type: ignore[arg-type]
        timeout_keep_alive=limits.idle_s,  # type: ignore[arg-type]
        log_config=None,
        access_log=False,
        lifespan="on",
        ssl_certfile=access.certfile,
        ssl_keyfile=access.keyfile,
    )


@contextmanager
def _signals(life: Life) -> Iterator[None]:
    """The first signal stops the server, further ones hurry it."""

    def note(number: int, frame: FrameType | None) -> None:
        life.stop()

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _last_resort(life: Life, limit_s: float) -> Iterator[None]:
    """Leave the process, once the server has stopped, unless the block ends in time."""
    has_ended = threading.Event()

    def watch() -> None:
        while not life.is_stopping:
            if has_ended.wait(_POLL_S):
                return
        if not has_ended.wait(limit_s):
            leave(STUCK)

    threading.Thread(target=watch, name="paceline-last-resort", daemon=True).start()
    try:
        yield
    finally:
        has_ended.set()


async def _serve(
    server: uvicorn.Server,
    bound: socket.socket,
    service: Service,
    limits: ServerLimits,
    tell: Callable[[str], None],
) -> None:
    draining = asyncio.ensure_future(_drain(server, service, limits, tell))
    try:
        await server.serve(sockets=[bound])
    finally:
        draining.cancel()
        await service.engine.stop()


async def _drain(
    server: uvicorn.Server, service: Service, limits: ServerLimits, tell: Callable[[str], None]
) -> None:
    """Once the server is told to stop, or its engine has ended: wait a while, still listening, then
    end what still runs, so that streams end whole.
    """
    life, engine = service.life, service.engine
    await _until(lambda: life.is_stopping or engine.failure is not None)
    if life.num_active and engine.failure is None:
        count = f"finishing {life.num_active} request(s)"
        tell(f"{count}, at most {limits.drain_s:g} s; Ctrl-C: at once")
    await _until(
        lambda: life.is_hurried or not life.num_active or engine.failure is not None,
        timeout_s=limits.drain_s,
    )
    if not life.is_stopping:
        life.stop()  # nobody else did
    engine.abort_all()
    server.should_exit = True
    await asyncio.sleep(_FAREWELL_S)
    server.force_exit = True


async def _until(condition: Callable[[], bool], *, timeout_s: float = math.inf) -> None:
    clock = asyncio.get_running_loop().time
    end = clock() + timeout_s
    while not condition() and clock() < end:
        await asyncio.sleep(_POLL_S)


def banner(service: Service, bound: socket.socket, access: Access = OPEN_ACCESS) -> str:
    """Where the server is and how to ask it something."""
    host, port = bound.getsockname()[:2]
    reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(
        host, f"[{host}]" if ":" in host else host
    )
    url = f"{'http' if access.certfile is None else 'https'}://{reachable}:{port}"
    key = " -H 'Authorization: Bearer '$PACELINE_API_KEY" if access.api_keys else ""
    body = f'{{"model": "{service.model}", "prompt": "def fibonacci(n):", "max_tokens": 48}}'
    return (
        f"serving {service.model} on {url}/v1, Ctrl-C stops\n"
        f"  curl {url}/v1/completions{key} -H 'Content-Type: application/json' -d '{body}'"
        f"{service.reader.formats.line()}"
    )
