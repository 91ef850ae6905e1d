"""A server of our own, started for a bench and ended behind it."""

import logging
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO

from paceline.core.errors import ModelError

_SERVING = re.compile(r"^serving .+ on (https?://\S+/v1), ")
_PATIENCE_S = 60.0  # longer than a drain
_FAREWELL_S = 2.0  # for the last lines of one that has ended
_LAST_LINES = 5
_log = logging.getLogger("paceline")


@contextmanager
def own_server(words: Sequence[str]) -> Iterator[str]:
    """Run `paceline serve WORDS` on a free port; gives its base URL.  Raises ModelError for one
    that does not start, or ends before the block does."""
    command = [sys.executable, "-u", "-m", "paceline", "serve", "--port", "0", *words]
    # Ctrl-C is for us alone: in its own session it is not heard there.
    said: deque[str] = deque(maxlen=_LAST_LINES)
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None, "it is a pipe"
        reader = threading.Thread(target=_forward, args=(process.stderr, said), daemon=True)
        try:
            url = _address(process.stderr, said)
            if url is None:
                raise _ended(words, "a server that starts", process.wait(), said)
            reader.start()
            try:
                yield url
            finally:  # its end is the cause of whatever the block raised
                if process.poll() is not None:
                    reader.join(_FAREWELL_S)
                    raise _ended(words, "a server that stays", process.returncode, said)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
            if reader.is_alive():  # it reads what is closed behind this block
                reader.join(_FAREWELL_S)


def _address(lines: IO[str], said: deque[str]) -> str | None:
    """None where it ends without one."""
    for line in lines:
        found = _SERVING.match(line)
        if found:
            return found[1]
        _note(line, said)
    return None


def _forward(lines: IO[str], said: deque[str]) -> None:
    for line in lines:
        _note(line, said)


def _note(line: str, said: deque[str]) -> None:
    said.append(line.rstrip("\n"))
    _log.info("%s", said[-1])


def _ended(words: Sequence[str], expected: str, code: int, said: Iterable[str]) -> ModelError:
    return ModelError.about(
        f"paceline serve {' '.join(words)}".rstrip(),
        expected=expected,
        got=f"exit code {code}: {' / '.join(said)}",
        remedy="correct what stands behind --, or name a running server by --base-url",
    )
