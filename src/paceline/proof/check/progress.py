"""The lines on stderr while cells come in."""

import time
from dataclasses import dataclass, field
from typing import TextIO

from paceline.proof.check.cell import CellResult
from paceline.proof.check.report import is_failing, said

QUIET_S = 10.0  # between two lines where the stream is not a terminal
MOST_REASON = 160  # characters of a reason on one line; the report has all
CLEAR = "\r\033[K"  # back to an empty line


@dataclass(slots=True)
class CellProgress:
    """How many cells are done, said on a stream."""

    total: int
    stream: TextIO
    began: float = field(default_factory=time.monotonic)
    done: int = 0
    failing: int = 0
    said: float = field(default_factory=time.monotonic)

    def add(self, result: CellResult) -> None:
        """Count a result; a failing one is said at once."""
        self.done += 1
        is_live = self.stream.isatty()
        if is_failing(result):
            self.failing += 1
            word = said(result.status).upper()
            reason = (result.reason or "").partition("\n")[0][:MOST_REASON]
            start = CLEAR if is_live else ""
            print(f"{start}{word} {result.id}: {reason}", file=self.stream, flush=True)
        now = time.monotonic()
        if is_live:
            print(f"{CLEAR}{self.line()}", end="", file=self.stream, flush=True)
        elif now - self.said > QUIET_S:
            self.said = now
            print(self.line(), file=self.stream, flush=True)

    def line(self) -> str:
        """How far it is."""
        seconds = time.monotonic() - self.began
        return f"{self.done} of {self.total} cells, {self.failing} failing, {seconds:.1f} s"

    def end(self) -> None:
        """The last line, on its own."""
        start = CLEAR if self.stream.isatty() else ""
        print(f"{start}{self.line()}", file=self.stream, flush=True)
