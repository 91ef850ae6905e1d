"""Two checkouts of the sources as processes that answer line by line, for timings in turns."""

import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parents[1] / "src"
CONFIDENCE = 0.95


class Side:
    """A program of ours over one checkout's sources: a line in, a line of JSON out.

    It says one line when it is ready; `ready` is that.
    """

    def __init__(self, sources: Path, command: Sequence[str], **environment: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, "PYTHONPATH": str(sources), **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.ready = self._read()

    def ask(self, line: str) -> dict[str, Any]:
        """What the process answers."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # what is read tells of the end
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the process."""
        with suppress(BrokenPipeError):  # of a line that was not taken
            self._process.communicate()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            sys.exit(f"a side ended with code {self._process.returncode}; its error is above")
        found: dict[str, Any] = json.loads(line)
        return found


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(median, low, high): order statistics that hold the true median 95 times of 100, whatever
    the values' law; of fewer than 6 values the smallest and the largest."""
    ordered, n = sorted(values), len(values)
    outside, below = 0.0, 0  # `below` values may lie on either side of the interval
    while below < n // 2:
        outside += 2 * math.comb(n, below) / 2**n
        if outside > 1 - CONFIDENCE:
            break
        below += 1
    below = max(below - 1, 0)
    return statistics.median(ordered), ordered[below], ordered[n - 1 - below]
