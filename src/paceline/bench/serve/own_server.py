"""A server of our own, started for a bench and ended behind it."""

import logging
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO

from paceline.core.errors import ModelError

_SERVING = re.compile(r"^serving \S+ on (http://\S+/v1)\b")
_PATIENCE_S = 60.0  # longer than a drain
_LAST_LINES = 5
_log = logging.getLogger("paceline")


@contextmanager
def own_server(words: Sequence[str]) -> Iterator[str]:
    """Run `paceline serve WORDS` on a free port; gives its base URL.  Raises ModelError."""
    command = [sys.executable, "-u", "-m", "paceline", "serve", "--port", "0", *words]
    # Ctrl-C is for us alone: in its own session it is not heard there.
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None, "it is a pipe"
        try:
            url = _address(process, process.stderr, words)
            reader = threading.Thread(target=_forward, args=(process.stderr,), daemon=True)
            reader.start()
            yield url
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _address(process: subprocess.Popen[str], lines: IO[str], words: Sequence[str]) -> str:
    said: list[str] = []
    for line in lines:
        found = _SERVING.match(line)
        if found:
            return found[1]
        said.append(line.rstrip("\n"))
        _log.info("%s", said[-1])
    raise ModelError.about(
        f"paceline serve {' '.join(words)}".rstrip(),
        expected="a server that starts",
        got=f"exit code {process.wait()}: {' / '.join(said[-_LAST_LINES:])}",
        remedy="correct what stands behind --, or name a running server by --base-url",
    )


def _forward(lines: IO[str]) -> None:
    for line in lines:
        _log.info("%s", line.rstrip("\n"))
