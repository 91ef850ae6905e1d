"""How much a server takes at a time, and the middleware that counts the bytes of bodies."""

from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.core.errors import message
from paceline.core.options import MAX_QUEUED
from paceline.server.errors import ApiError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """What is refused beyond."""

    max_queued: int = MAX_QUEUED  # completions that wait, beside the max_num_seqs that run
    max_body_mib: int = 16  # of one request's body


LIMITS = ServerLimits()


class BodyLimit:
    """ASGI middleware: answers 413 to a body that says it is too long, or turns out to be, without
    holding more of it than the limit.
    """

    def __init__(self, app: ASGIApp, *, max_mib: int) -> None:
        self._app = app
        self._max_mib = max_mib
        self._max_bytes = max_mib << 20

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if int(declared) > self._max_bytes:  # digits: the HTTP parser sees to it
            await ApiError(413, self._text(f"{int(declared)} bytes")).response()(
                scope, receive, send
            )
            return
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            part = await receive()
            num_bytes += len(part.get("body", b""))
            if num_bytes > self._max_bytes:
                raise HTTPException(413, self._text("more"))
            return part

        await self._app(scope, counted, send)

    def _text(self, got: str) -> str:
        return message(
            "the body",
            expected=f"at most {self._max_mib} MiB",
            got=got,
            remedy="send less at once, or raise --max-body-mib of the server",
        )
