"""A client of HTTP/1.1 and its event streams: asyncio and h11, so that it costs little beside what
it measures, and no library that hides when bytes came.
"""

import asyncio
import json
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import h11

from paceline.core.errors import ConfigError, message

READ = 1 << 16  # bytes at a time
_QUOTED = 300  # characters of an answer that is an error
Document = dict[str, Any]


class AnswerError(Exception):
    """An answer that is none.  kind: short, errors are counted by it."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a server is."""

    host: str
    port: int
    path: str  # before an endpoint's own; without a slash at its end
    is_encrypted: bool

    @classmethod
    def of(cls, url: str) -> "Place":
        """Of a base URL, such as http://127.0.0.1:8000/v1.  Raises ConfigError."""
        try:
            parts = urlsplit(url)
            port, host = parts.port, parts.hostname
        except ValueError as error:
            raise _no_url(f"{url!r} ({error})") from error
        if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
            raise _no_url(repr(url))
        is_encrypted = parts.scheme == "https"
        return cls(
            host=host,
            port=port or (443 if is_encrypted else 80),
            path=parts.path.rstrip("/"),
            is_encrypted=is_encrypted,
        )


def _no_url(got: str) -> ConfigError:
    remedy = "write for example http://127.0.0.1:8000/v1"
    return ConfigError.about(
        "base_url", expected="http(s)://HOST[:PORT]/v1", got=got, remedy=remedy
    )


class _Closed(Exception):
    """The server closed a connection that was idle: nothing of the request was answered."""


class Connection:
    """One connection to a server; one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.CLIENT)
        self._is_answered = False  # something has come since the last request

    async def send(self, head: h11.Request, body: bytes) -> h11.Response:
        """Raises h11.RemoteProtocolError for an answer that is no HTTP, OSError, and _Closed where
        an idle connection was closed meanwhile.
        """
        is_fresh, self._is_answered = not self._is_answered, False
        try:
            return await self._send(head, body)
        except (ConnectionError, h11.RemoteProtocolError) as error:
            if is_fresh or self._is_answered:
                raise
            raise _Closed from error

    async def _send(self, head: h11.Request, body: bytes) -> h11.Response:
        out = self._http.send(head) or b""
        if body:
            out += self._http.send(h11.Data(body)) or b""
        self._writer.write(out + (self._http.send(h11.EndOfMessage()) or b""))
        await self._writer.drain()
        while True:
            event = await self._next()
            if isinstance(event, h11.Response):
                return event
            if not isinstance(event, h11.InformationalResponse):
                raise h11.RemoteProtocolError(f"{type(event).__name__} before an answer")

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """The body as it comes, to its end."""
        while True:
            event = await self._next()
            if isinstance(event, h11.EndOfMessage):
                return
            assert isinstance(event, h11.Data), event
            yield bytes(event.data)

    def renew(self) -> bool:
        """Whether it may be used once more; it is ready then."""
        if self._http.states != {h11.CLIENT: h11.DONE, h11.SERVER: h11.DONE}:
            return False
        self._http.start_next_cycle()
        return True

    @property
    def is_open(self) -> bool:
        """As far as is known."""
        return not (self._writer.is_closing() or self._reader.at_eof())

    def close(self) -> None:
        self._writer.close()

    async def _next(self) -> Any:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            data = await self._reader.read(READ)
            self._is_answered |= bool(data)
            self._http.receive_data(data)
        if isinstance(event, h11.ConnectionClosed):
            raise h11.RemoteProtocolError("the connection was closed before the answer's end")
        return event


class Client:
    """Owns the connections to one server, which are used again."""

    def __init__(self, place: Place, *, api_key: str | None, timeout: float) -> None:
        """timeout: of one answer, to its end.  [s]"""
        self._place = place
        self._timeout = timeout
        self._tls = ssl.create_default_context() if place.is_encrypted else None
        self._idle: list[Connection] = []
        host = f"[{place.host}]" if ":" in place.host else place.host
        self._headers = [("Host", f"{host}:{place.port}"), ("User-Agent", "paceline-bench")]
        if api_key is not None:
            self._headers.append(("Authorization", f"Bearer {api_key}"))

    async def get(self, path: str) -> Document:
        """The document at a path.  Raises AnswerError."""
        async with self._exchange("GET", path, b"") as pieces:
            return _document(b"".join([piece async for piece in pieces]))

    async def post(self, path: str, body: Document) -> Document:
        """The answer in one piece.  Raises AnswerError."""
        return await self.post_encoded(path, json.dumps(body).encode())

    async def post_encoded(self, path: str, body: bytes) -> Document:
        """The same, of a body in JSON: making that of megabytes would hold others' streams."""
        async with self._exchange("POST", path, body) as pieces:
            return _document(b"".join([piece async for piece in pieces]))

    async def stream(
        self, path: str, body: Document
    ) -> AsyncGenerator[tuple[float, Document], None]:
        """(by time.perf_counter when it was read, an event), to [DONE].  Raises AnswerError, for a
        stream without that end too.
        """
        async with self._exchange("POST", path, json.dumps(body).encode()) as pieces:
            is_whole = False
            async for now, data in _events(pieces):
                if data == b"[DONE]":
                    is_whole = True
                elif is_whole:
                    raise AnswerError("stream", "an event behind [DONE]")
                else:
                    yield now, _document(data)
            if not is_whole:
                raise AnswerError("stream", "the stream ended without [DONE]")

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    @asynccontextmanager
    async def _exchange(
        self, method: str, path: str, body: bytes
    ) -> AsyncIterator[AsyncGenerator[bytes, None]]:
        """Send; the pieces of an answer that is 200.  Whatever fails is an AnswerError."""
        connection: Connection | None = None
        try:
            async with asyncio.timeout(self._timeout):
                head = self._head(method, path, len(body))
                while True:
                    connection = await self._connection()
                    with suppress(_Closed):
                        answer = await connection.send(head, body)
                        break
                    connection.close()
                pieces = connection.pieces()
                if answer.status_code != 200:
                    raise _refusal(answer.status_code, b"".join([each async for each in pieces]))
                yield pieces
                if connection.renew():
                    self._idle.append(connection)
                    connection = None
        except TimeoutError as error:
            raise AnswerError("timeout", f"no whole answer in {self._timeout:g} s") from error
        except (OSError, h11.RemoteProtocolError) as error:
            raise AnswerError(type(error).__name__, str(error)) from error
        finally:
            if connection is not None:
                connection.close()

    async def _connection(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
            connection.close()
        place = self._place
        return Connection(*await asyncio.open_connection(place.host, place.port, ssl=self._tls))

    def _head(self, method: str, path: str, length: int) -> h11.Request:
        own = [("Content-Type", "application/json"), ("Content-Length", str(length))]
        headers = self._headers + (own if method == "POST" else [])
        return h11.Request(method=method, target=f"{self._place.path}{path}", headers=headers)


async def _events(
    pieces: AsyncGenerator[bytes, None],
) -> AsyncGenerator[tuple[float, bytes], None]:
    """(when it came, the data of an event), as server-sent events are framed: lines of `data:` up
    to an empty line; other lines are not for us.
    """
    rest, data = b"", []
    async for piece in pieces:
        now = time.perf_counter()
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                data.append(line.removeprefix(b"data:").removeprefix(b" "))
            elif not line and data:
                yield now, b"\n".join(data)
                data = []


def _document(data: bytes) -> Document:
    try:
        found = json.loads(data)
    except ValueError as error:
        raise AnswerError("not JSON", data[:_QUOTED].decode(errors="replace")) from error
    if not isinstance(found, dict):
        raise AnswerError("not JSON", f"a {type(found).__name__}, no object")
    if "error" in found:  # within a stream, where the status is sent already
        raise AnswerError("error event", json.dumps(found["error"])[:_QUOTED])
    return found


def _refusal(status: int, body: bytes) -> AnswerError:
    text = message(
        "the answer",
        expected="200",
        got=f"{status}: {body[:_QUOTED].decode(errors='replace')}",
        remedy="see the server's log",
    )
    return AnswerError(str(status), text)
