"""A server that speaks the OpenAI API over bare sockets, and misbehaves as it is told.

It makes a token of 4 characters and adds 3 to each prompt; an answer is as many words as tokens
were asked for, by the prompt's letters.
"""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

FIXED, CHARS_PER_TOKEN = 3, 4
Body = dict[str, Any]


@dataclass
class FakeServer:
    """What it has seen, and how it answers.  Tests set the hooks before they ask."""

    url: str = ""
    bodies: list[Body] = field(default_factory=list)  # of POSTs, in order
    connections: int = 0
    status: Callable[[int, Body], int] = lambda number, body: 200  # number: of the POST
    text: Callable[[int, Body], str] | None = None
    num_tokens: Callable[[Body], int] = lambda body: body["max_tokens"]
    has_usage: bool = True
    ends_early: bool = False  # streams, by closing the connection
    says_done: bool = True  # at a stream's end
    error_event: bool = False
    is_dribbling: bool = False  # streams, byte by byte, with comments and CRLF
    closes: bool = False  # every connection behind its answer
    owned_by: str = "somebody"
    context_len: int | None = 4096

    def answer(self, number: int, body: Body) -> tuple[list[str], Body]:
        """(pieces of text, usage)"""
        prompt = body.get("prompt") or body["messages"][0]["content"]
        count = self.num_tokens(body)
        pieces = [f"{prompt[i % len(prompt)]}{i} " for i in range(count)]
        if self.text is not None:
            pieces = [self.text(number, body)]
        asked = FIXED + len(prompt) // CHARS_PER_TOKEN
        usage = {"prompt_tokens": asked, "completion_tokens": count, "total_tokens": asked + count}
        return pieces, usage

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                await self._one(head, reader, writer)
                if self.closes or writer.is_closing():
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _one(
        self, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        method, path, _ = head.split(" ", 2)
        if method == "GET":
            assert path == "/v1/models", path
            row = {"id": "fake", "owned_by": self.owned_by, "max_model_len": self.context_len}
            _whole(writer, 200, {"object": "list", "data": [row]})
            return
        (length,) = [line for line in head.lower().split("\r\n") if "content-length" in line]
        body = json.loads(await reader.readexactly(int(length.partition(":")[2])))
        number, is_chat = len(self.bodies), path == "/v1/chat/completions"
        assert is_chat or path == "/v1/completions", path
        self.bodies.append({**body, "head": head})
        status = self.status(number, body)
        if status != 200:
            _whole(writer, status, {"error": {"message": "no"}})
            return
        pieces, usage = self.answer(number, body)
        if not body.get("stream"):
            said = (
                {"message": {"content": "".join(pieces)}} if is_chat else {"text": "".join(pieces)}
            )
            _whole(writer, 200, {"choices": [said], "usage": usage})
            return
        await self._stream(writer, pieces, usage, is_chat=is_chat)

    async def _stream(
        self, writer: asyncio.StreamWriter, pieces: list[str], usage: Body, *, is_chat: bool
    ) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        end = b"\r\n" if self.is_dribbling else b"\n"

        async def send(data: bytes) -> None:
            whole = (b": ping" + end if self.is_dribbling else b"") + b"data: " + data + end + end
            for at in range(len(whole)) if self.is_dribbling else [None]:
                piece = whole if at is None else whole[at : at + 1]
                writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                await writer.drain()

        if is_chat:
            await send(json.dumps({"choices": [{"delta": {"role": "assistant"}}]}).encode())
        for piece in pieces:
            said = {"delta": {"content": piece}} if is_chat else {"text": piece}
            await send(json.dumps({"choices": [said]}).encode())
        if self.error_event:
            await send(json.dumps({"error": {"message": "broken"}}).encode())
        if self.ends_early:
            writer.close()
            return
        if self.has_usage:
            await send(json.dumps({"choices": [], "usage": usage}).encode())
        if self.says_done:
            await send(b"[DONE]")
        writer.write(b"0\r\n\r\n")


def _whole(writer: asyncio.StreamWriter, status: int, document: Body) -> None:
    data = json.dumps(document).encode()
    writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%s" % (status, len(data), data))


@contextmanager
def fake_server(**hooks: Any) -> Iterator[FakeServer]:
    """Runs in a thread; closed behind."""
    fake, loop = FakeServer(**hooks), asyncio.new_event_loop()

    async def begin() -> asyncio.Server:
        return await asyncio.start_server(fake.serve, "127.0.0.1", 0)

    server = loop.run_until_complete(begin())
    fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def end() -> None:
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    try:
        yield fake
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
