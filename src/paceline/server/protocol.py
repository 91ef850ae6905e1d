"""The HTTP/1.1 protocol of a connection: uvicorn's, with limits on how long each part may take.

A client that has closed its half of a connection before it was answered is asked with an interim
response (RFC 9110, 15.2) whether it still reads: who has left altogether answers with a reset.
"""

import asyncio
import socket
from functools import partial
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from paceline.core.errors import message
from paceline.server.errors import ApiError
from paceline.server.limits import ServerLimits

_PROCESSING = 102
_ASK_S = 0.05  # between two looks whether who has closed a half has left
_CLOSE = ((b"content-type", b"application/json"), (b"connection", b"close"))


def protocol_of(limits: ServerLimits) -> "partial[TimedProtocol]":
    """For `uvicorn.Config(http=...)`."""
    return partial(TimedProtocol, limits=limits)


def loop_of(limits: ServerLimits) -> "partial[TimedLoop]":
    """For `asyncio.Runner(loop_factory=...)`."""
    return partial(TimedLoop, limits=limits)


class TimedLoop(asyncio.SelectorEventLoop):
    """Ends a connection whose TLS does not begin in the time that the head of a request has: no
    protocol hears of it before."""

    def __init__(self, *, limits: ServerLimits) -> None:
        super().__init__()
        self._limits = limits

    async def create_server(self, *values: Any, **more: Any) -> Any:
        if more.get("ssl") is not None:
            more["ssl_handshake_timeout"] = self._limits.header_s or None
        return await super().create_server(*values, **more)


class TimedProtocol(H11Protocol):
    """Ends a connection whose headers do not come in time, or whose client does not read what is
    sent; refuses one too many."""

    def __init__(self, *values: Any, limits: ServerLimits, **more: Any) -> None:
        super().__init__(*values, **more)
        self._limits = limits
        self._head: asyncio.TimerHandle | None = None  # runs while a head is awaited
        self._stall: asyncio.TimerHandle | None = None  # runs while nothing can be written

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            expected = f"asked through at most {self._limits.max_connections} connections"
            remedy = "close those that are idle, or raise --max-connections"
            self._refuse(503, "the server", expected=expected, got="one more", remedy=remedy)
        else:
            self._await_head()

    def data_received(self, data: bytes) -> None:
        if not self._is_busy() and self._head is None:
            self._await_head()  # of the next request
        super().data_received(data)
        if self._is_busy():
            self._end_head()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        cycle = self.cycle
        if not self._is_busy() or cycle.more_body or cycle.response_started:
            return None
        if cycle.scope["http_version"] != "1.1" or self.conn.trailing_data[0]:
            return None
        self.conn.receive_data(b"")
        self.conn.next_event()
        head = h11.InformationalResponse(status_code=_PROCESSING, headers=[], reason=b"Processing")
        self.transport.write(self.conn.send(head) or b"")
        self._look(cycle)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        self._end_stall()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall = self.loop.call_later(self._limits.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._end_stall()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP, in the shape of every other error."""
        self._refuse(
            400, "the request", expected="HTTP/1.1", got="what is none", remedy="use an HTTP client"
        )

    def _is_busy(self) -> bool:
        """Whether a request has come whole, but for its body, and is not answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        self._head = self.loop.call_later(self._limits.header_s, self._on_late)

    def _end_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _end_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _on_late(self) -> None:
        expected, got = f"whole within {self._limits.header_s:g} s", "a part"
        remedy = "send it at once, or raise --header-timeout"
        self._refuse(408, "the head of a request", expected=expected, got=got, remedy=remedy)

    def _refuse(self, status: int, name: str, *, expected: str, got: str, remedy: str) -> None:
        self._end_head()
        if self.transport.is_closing():
            return
        text = message(name, expected=expected, got=got, remedy=remedy)
        answer = ApiError(status, text).response()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            length = (b"content-length", str(len(answer.body)).encode())
            head = h11.Response(status_code=status, headers=[*_CLOSE, length])
            for part in (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(part) or b"")
        self.transport.close()

    def _look(self, cycle: object) -> None:
        """Until the request is answered: whether its client has answered the question with a
        reset, which nobody hears who does not read."""
        if cycle is not self.cycle or not self._is_busy() or self.transport.is_closing():
            return
        end: socket.socket = self.transport.get_extra_info("socket")
        if end.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self.loop.call_later(_ASK_S, self._look, cycle)
