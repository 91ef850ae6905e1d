"""How much a server takes at a time and how long, and the middleware that watches over bodies."""

import asyncio
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.core.errors import message
from paceline.core.options.engine_options import MAX_QUEUED
from paceline.server.border.live_forms import FormLimits
from paceline.server.errors import ApiError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """What is refused beyond; times in seconds.  `paceline serve --help` tells each in full."""

    max_queued: int = MAX_QUEUED  # completions that wait, beside the max_num_seqs that run
    max_forms: int = FormLimits().of_all  # different ones of answers, of all clients at once
    max_forms_per_client: int = FormLimits().of_client
    max_body_mib: int = 16  # of one request's body
    max_connections: int = 4096  # open at once
    header_s: float = 10.0  # from a connection, or the first byte of a request, to its last header
    body_s: float = 60.0  # from there to the last byte of the body
    idle_s: float = 30.0  # between an answer and the next request
    write_s: float = 60.0  # in which a client reads nothing of what waits for it
    drain_s: float = 20.0  # in which running requests may end, once the server stops
    stuck_s: float = 60.0  # that the engine may be silent before /health says so
    load_stuck_s: float = 1800.0  # the same of a phase of its load


LIMITS = ServerLimits()
CLOSE = {"Connection": "close"}  # what the client has not sent is not read


class BodyFraming:
    """ASGI middleware: answers 400 to a body whose length is told in two ways, which two readers
    would read differently, and reads no further (RFC 9112, 6.3)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if {b"content-length", b"transfer-encoding"} <= {
            name for name, _ in scope.get("headers", ())
        }:
            text = message(
                "the length of the body",
                expected="told once",
                got="Content-Length and Transfer-Encoding",
                remedy="leave one out",
            )
            refused = ApiError(400, text, headers=CLOSE).response(scope["path"])
            await refused(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class BodyLimit:
    """ASGI middleware: answers 413 to a body that says it is too long, or turns out to be, without
    holding more of it than the limit, and 408 to one that does not come.
    """

    def __init__(self, app: ASGIApp, *, limits: ServerLimits) -> None:
        self._app = app
        self._limits = limits
        self._max_bytes = limits.max_body_mib << 20

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if int(declared) > self._max_bytes:  # digits: the HTTP parser sees to it
            error = ApiError(413, self._text(f"{int(declared)} bytes"))
            await error.response(scope["path"])(scope, receive, send)
            return
        num_bytes, is_whole = 0, False
        latest = asyncio.get_running_loop().time() + self._limits.body_s

        async def counted() -> Message:
            nonlocal num_bytes, is_whole
            if is_whole:  # what comes now is a disconnect, whenever
                return await receive()
            try:
                async with asyncio.timeout_at(latest):
                    part = await receive()
            except TimeoutError:
                raise HTTPException(408, self._late(), headers=CLOSE) from None
            is_whole = not part.get("more_body", False)
            num_bytes += len(part.get("body", b""))
            if num_bytes > self._max_bytes:
                raise HTTPException(413, self._text("more"))
            return part

        await self._app(scope, counted, send)

    def _text(self, got: str) -> str:
        return message(
            "the body",
            expected=f"at most {self._limits.max_body_mib} MiB",
            got=got,
            remedy="send less at once, or raise --max-body-mib of the server",
        )

    def _late(self) -> str:
        return message(
            "the body",
            expected=f"whole within {self._limits.body_s:g} s",
            got="a part",
            remedy="send it faster, or raise --body-timeout of the server",
        )
