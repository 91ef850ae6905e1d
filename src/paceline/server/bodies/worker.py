"""BodyWorker: a process that reads large bodies, so that neither their parsing nor their rendering
takes the interpreter from the streams beside them.

Between the two run frames: a length, then JSON as it came one way and msgpack the other.  The
process ends when its input does.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec
from msgspec import Struct

from paceline.core.errors import PacelineError, message
from paceline.core.frames import receive, send
from paceline.server.bodies.counts import Room
from paceline.server.bodies.reader import Reader, Reading
from paceline.server.errors import ApiError, as_api_error
from paceline.server.tools.formats import UNKNOWN, Formats
from paceline.text.tokenizer import Tokenizer

_NICER = 5  # than the engine, where cores are few


class ReaderFacts(Struct, frozen=True, kw_only=True):
    """What a Reader is made from in another process."""

    model: str
    context_len: int
    max_open: int
    vocab_size: int
    folder: str | None  # of tokenizer.json
    lowers: bool = False  # its texts
    vector_prompt: str = ""  # put before every text whose vector is asked for
    formats: Formats = UNKNOWN  # of calls and reasoning

    def reader(self, tokenizer: Tokenizer | None) -> Reader:
        room = Room(context_len=self.context_len, max_open=self.max_open)
        return Reader(
            model=self.model,
            room=room,
            vocab_size=self.vocab_size,
            tokenizer=tokenizer,
            vector_prompt=self.vector_prompt,
            formats=self.formats,
        )


class Refused(Struct, frozen=True, kw_only=True, tag="refused"):
    """An ApiError on its way."""

    status: int
    text: str
    param: str | None
    code: str | None


_Answer = Reading | Refused


class BodyWorker:
    """Owns the process, which it starts for the first body, and anew for the one behind its end."""

    def __init__(self, facts: ReaderFacts) -> None:
        self._facts = facts
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="paceline-bodies")
        self._process: subprocess.Popen[bytes] | None = None  # of the thread
        self._is_closed = False

    async def read(self, endpoint: str, parts: Sequence[bytes]) -> Reading:
        """What `Reader.read` makes of a body, one after the other.  Raises ApiError."""
        loop = asyncio.get_running_loop()
        answer = await loop.run_in_executor(self._thread, self._ask, endpoint, parts)
        if isinstance(answer, Refused):
            raise ApiError(answer.status, answer.text, param=answer.param, code=answer.code)
        return answer

    def close(self) -> None:
        """End the process, whatever it does; closing twice is harmless."""
        self._is_closed = True
        process = self._process
        if process is not None:
            process.kill()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._leave()

    def _ask(self, endpoint: str, parts: Sequence[bytes]) -> _Answer:
        try:
            told = self._told(endpoint, parts)
        except (OSError, EOFError):
            return self._ended()
        answer: _Answer = msgspec.msgpack.decode(told, type=_Answer)
        return answer

    def _told(self, endpoint: str, parts: Sequence[bytes]) -> bytes:
        process = self._running()
        assert process.stdin is not None, "a pipe"
        assert process.stdout is not None, "a pipe"
        send(process.stdin, endpoint.encode())
        send(process.stdin, *parts)
        return _next(process.stdout)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._is_closed:
            raise EOFError
        if self._process is None:
            command = [sys.executable, "-m", __name__, msgspec.json.encode(self._facts).decode()]
            # In a session of its own: a terminal's end is for us.
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
        return self._process

    def _ended(self) -> Refused:
        """Of a body that the process did not survive; perhaps the memory was short."""
        code = self._leave()
        text = message(
            "the process that reads large bodies",
            expected="running",
            got=f"ended by {code}",
            remedy="send it again, or less at once",
        )
        return Refused(status=503, text=text, param=None, code="reader_ended")

    def _leave(self) -> int | None:
        process, self._process = self._process, None
        if process is None:
            return None
        process.kill()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None, "both are pipes"
            with suppress(OSError):  # what the process did not read
                pipe.close()
        return process.wait()


def _next(file: IO[bytes]) -> bytes:
    """The next frame.  Raises EOFError where there is none."""
    found = receive(file)
    if found is None:
        raise EOFError
    return found


def _reader(facts: ReaderFacts) -> Reader:
    """Raises ApiError where the tokenizer cannot be read: its folder may have gone meanwhile."""
    if facts.folder is None:
        return facts.reader(None)
    try:
        return facts.reader(Tokenizer.from_folder(Path(facts.folder), lowers=facts.lowers))
    except PacelineError as error:
        text = message(
            "the process that reads large bodies",
            expected="able to read the tokenizer, as the server was",
            got=f"an error ({error})",
            remedy="put the model's folder back; smaller bodies are answered without it",
        )
        raise ApiError(503, text, code="reader_without_tokenizer") from error


def _refusal(error: ApiError) -> Refused:
    return Refused(status=error.status, text=str(error), param=error.param, code=error.code)


def main() -> None:
    """Answer until the input ends, whatever signals the whole group or unit is sent."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    facts = msgspec.json.decode(sys.argv[1], type=ReaderFacts)
    os.nice(_NICER)
    reader: Reader | None = None
    asked, answer = sys.stdin.buffer, sys.stdout.buffer
    with suppress(EOFError, BrokenPipeError):
        while True:
            endpoint, body = _next(asked).decode(), _next(asked)
            found: _Answer
            try:
                reader = _reader(facts) if reader is None else reader
                found = reader.read(endpoint, body)
            except ApiError as error:
                found = _refusal(error)
            except PacelineError as error:
                found = _refusal(as_api_error(error))
            send(answer, msgspec.msgpack.encode(found))


if __name__ == "__main__":
    main()
