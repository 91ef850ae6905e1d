"""Bind, load, serve, drain: the life of a server process."""

import asyncio
import json
import logging
import math
import os
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, TypeVar

import uvicorn
from starlette.types import ASGIApp

from paceline.core.errors import ConfigError
from paceline.core.modes import End
from paceline.plan.machine import settled
from paceline.server.access.access import OPEN_ACCESS, Access
from paceline.server.app import Tracing, build_app, build_loading_app
from paceline.server.border.remote import Peer, RemoteEngine
from paceline.server.life import Life
from paceline.server.limits import LIMITS, ServerLimits
from paceline.server.probes import Front
from paceline.server.protocol import loop_of, protocol_of
from paceline.server.service import Service
from paceline.server.tools.formats import BY_TEMPLATE, Parsers

STUCK = 70  # exit code of a server that could not end by itself; EX_SOFTWARE of sysexits.h
_FAREWELL_S = 2.0  # how long clients may take to read their last event
_GRACE_S = 5.0  # and whatever is left then
_POLL_S = 0.1  # signals set flags
_IDS = [1, 2, 3]  # a prompt where there is no tokenizer
_BACKLOG = 2048  # connections the kernel holds for us


leave = os._exit  # without waiting for threads
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a server listens, and as what."""

    host: str
    port: int  # 0: any that is free
    model: str  # the name clients ask for
    access: Access = OPEN_ACCESS
    weights: Mapping[str, float] = field(default_factory=dict)  # by client
    limits: ServerLimits = LIMITS
    log: Callable[[str], None] | None = None  # takes the lines of an access log
    trace: Tracing | None = None  # makes spans of requests
    parsers: Parsers = BY_TEMPLATE


def bind(address: Address) -> socket.socket:
    """A socket that listens.  Raises ConfigError."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with ExitStack() as undo:
            bound = undo.enter_context(socket.socket(family, kind, protocol))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(where)
            bound.listen(_BACKLOG)
            undo.pop_all()
    except OSError as error:
        raise ConfigError.about(
            "--host and --port",
            expected="an address that is free here",
            got=f"{address.host}:{address.port} ({error})",
            remedy="choose another port, or 0 for any that is free",
        ) from error
    return bound


def serve(
    peer: Peer, bound: socket.socket, address: Address, *, tell: Callable[[str], None]
) -> str | None:
    """Serve the engine of `peer`, which may still load, until Ctrl-C or SIGTERM; the second one
    does not wait for running requests.

    Returns why the engine has ended, if it did so by itself.  Should the end not come within its
    limits, because the engine or the loop hangs, the process is left at once, with STUCK, and the
    engine killed.
    tell: shows a line to whoever started the server; it neither waits nor raises.  For the main
    thread.  Raises what the engine's start raised on purpose.
    """
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    life, limits = Life(), address.limits
    # In a thread of its own: in the main thread uvicorn would take the signals, and raise them once
    # more behind its end.
    with (
        _last_resort(life, peer, limits.drain_s + _FAREWELL_S + _GRACE_S),
        ThreadPoolExecutor(1, "paceline-http") as thread,
        _signals(life),
        settled(),
    ):
        serving = thread.submit(run_in_loop, _serve(peer, bound, address, life, tell), limits)
        while not serving.done():  # a signal that another thread was given is noted here
            wait([serving], timeout=_POLL_S)
        return serving.result()


def run_in_loop(work: Coroutine[Any, Any, T], limits: ServerLimits) -> T:
    """The result of `work`, in a loop that gives TLS no longer than the head of a request."""
    with asyncio.Runner(loop_factory=loop_of(limits)) as runner:
        return runner.run(work)


def http_config(app: ASGIApp, limits: ServerLimits, access: Access = OPEN_ACCESS) -> uvicorn.Config:
    """How `app` is served: whoever serves it otherwise serves it without the limits."""
    return uvicorn.Config(
        app,
        http=protocol_of(limits),  # type: ignore[arg-type]
        timeout_keep_alive=limits.idle_s,  # type: ignore[arg-type]
        log_config=None,
        access_log=False,
        lifespan="off",
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
def _last_resort(life: Life, peer: Peer, limit_s: float) -> Iterator[None]:
    """Leave the process, once the server has stopped, unless the block ends in time."""
    has_ended = threading.Event()

    def watch() -> None:
        while not life.is_stopping:
            if has_ended.wait(_POLL_S):
                return
        if not has_ended.wait(limit_s):
            peer.kill()
            leave(STUCK)

    threading.Thread(target=watch, name="paceline-last-resort", daemon=True).start()
    try:
        yield
    finally:
        has_ended.set()


async def _serve(
    peer: Peer, bound: socket.socket, address: Address, life: Life, tell: Callable[[str], None]
) -> str | None:
    limits = address.limits
    engine = RemoteEngine(
        peer,
        max_queued=limits.max_queued,
        stuck_s=limits.stuck_s,
        load_stuck_s=limits.load_stuck_s,
    )
    await engine.connect()
    access = address.access
    front = Front(build_loading_app(engine, life, access=access, log=address.log))
    server = uvicorn.Server(http_config(front, limits, access))
    async with AsyncExitStack() as ends:
        ends.push_async_callback(engine.stop)
        opening = asyncio.ensure_future(_open(engine, front, bound, address, life, ends, tell))
        draining = asyncio.ensure_future(_drain(server, engine, opening, life, limits, tell))
        ends.callback(opening.cancel)
        ends.callback(draining.cancel)
        await server.serve(sockets=[bound])
        if opening.done():
            opening.result()
    return engine.fault


async def _open(
    engine: RemoteEngine,
    front: Front,
    bound: socket.socket,
    address: Address,
    life: Life,
    ends: AsyncExitStack,
    tell: Callable[[str], None],
) -> None:
    """Once the engine is ready, say so and let requests in."""
    served = await engine.ready()
    service = await asyncio.to_thread(
        Service.of,
        engine,
        served,
        model=address.model,
        life=life,
        weights=address.weights,
        parsers=address.parsers,
    )
    ends.callback(service.worker.close)
    front.app = build_app(
        service,
        access=address.access,
        limits=address.limits,
        log=address.log,
        trace=address.trace,
    )
    ends.callback(asyncio.ensure_future(engine.watch()).cancel)
    tell(banner(service, bound, address.access))


async def _drain(
    server: uvicorn.Server,
    engine: RemoteEngine,
    opening: asyncio.Future[None],
    life: Life,
    limits: ServerLimits,
    tell: Callable[[str], None],
) -> None:
    """Once the server is told to stop, or its engine has ended: wait a while, still listening, then
    end what still runs, so that streams end whole.
    """

    def has_failed() -> bool:
        is_closed = opening.done() and opening.exception() is not None
        return is_closed or engine.callers.failure is not None

    await _until(lambda: life.is_stopping or has_failed())
    if life.num_active and not has_failed():
        count = f"finishing {life.num_active} request(s)"
        tell(f"{count}, at most {limits.drain_s:g} s; Ctrl-C: at once")
    await _until(
        lambda: life.is_hurried or not life.num_active or has_failed(), timeout_s=limits.drain_s
    )
    if not life.is_stopping:
        life.stop()  # nobody else did
    engine.abort()
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
    lines = [f"serving {service.model} on {url}/v1, Ctrl-C stops"]
    if (example := _example(service)) is not None:
        path, asked = example
        body = json.dumps({"model": service.model} | asked)
        lines.append(f"  curl {url}{path}{key} -H 'Content-Type: application/json' -d '{body}'")
    return "\n".join(lines) + service.reader.formats.line()


def _example(service: Service) -> tuple[str, dict[str, object]] | None:
    """A path that answers for this model, and what to ask there; None where there is none."""
    has_texts = service.reader.tokenizer is not None
    if End.GENERATE in service.ends:
        prompt = "def fibonacci(n):" if has_texts else _IDS
        return "/v1/completions", {"prompt": prompt, "max_tokens": 48}
    if service.vectors.label_act is None:
        return "/v1/embeddings", {"input": "What is a cat?" if has_texts else _IDS}
    if service.vectors.width == 1 and has_texts:
        return "/v1/score", {"text_1": "What is a cat?", "text_2": "An animal."}
    return None
