"""Lines: what a server says on stderr, written by a thread of its own.

A stderr that nobody reads, or that is gone, must not stop who has something to say.
"""

import os
import queue
import threading

_MOST_WAITING = 1_000  # writes
_FLUSH_S = 1.0
STDERR = 2


class Lines:
    """A stream for loggers whose writes neither wait nor raise; what cannot be written is dropped
    and counted.
    """

    def __init__(self, file: int = STDERR) -> None:
        """file: descriptor."""
        self.num_dropped = 0
        self._file = file
        self._waiting: queue.Queue[str | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="paceline-lines", daemon=True)
        self._thread.start()

    def write(self, text: str) -> None:
        """Leave `text` to the thread."""
        self._leave(text)

    def flush(self) -> None:
        """What was left is written as soon as it can be."""

    def close(self) -> None:
        """Wait a moment for what was left to be written."""
        self._leave(None)
        self._thread.join(_FLUSH_S)

    def _leave(self, text: str | None) -> None:
        try:
            self._waiting.put_nowait(text)
        except queue.Full:
            self.num_dropped += 1

    def _run(self) -> None:
        for text in iter(self._waiting.get, None):
            data = text.encode(errors="backslashreplace")
            try:
                while data:
                    data = data[os.write(self._file, data) :]
            except OSError:
                self.num_dropped += 1
