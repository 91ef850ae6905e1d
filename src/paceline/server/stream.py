"""Work that ends when its client goes away, and the event stream that is such work."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from fastapi import Response
from starlette.types import Receive, Scope, Send

from paceline.server.telemetry.access_log import CLIENT_LEFT, Entry

T = TypeVar("T")


class ClientGone(Exception):
    """Nobody reads the answer any more."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`.  Raises ClientGone, with the work cancelled, on a disconnect."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        await _ended(task, gone)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _ended(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """Server-sent events.  A slow client slows the generator; one that leaves cancels it."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        self._events = events
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(media_type="text/event-stream", headers=headers)
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send_all(send))
        except ClientGone:
            Entry.within(scope).fault = CLIENT_LEFT
        finally:
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def event(data: bytes, kind: str = "") -> bytes:
    """One server-sent event, of a kind where the API names them; data holds no line end."""
    named = f"event: {kind}\n".encode() if kind else b""
    return named + b"data: " + data + b"\n\n"
