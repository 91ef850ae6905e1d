"""Phases of a rank's boot, and whether it gets on: what a leader looks at while it waits."""

import time
from enum import IntEnum
from pathlib import Path

from paceline.core.errors import PacelineError

BOOT_WAIT_S = 60.0  # that a rank may do nothing at all while it is waited for


class Phase(IntEnum):
    """A word of the memory that ranks share."""

    STARTS = 0  # as new memory says
    PLANS = 1
    LOADS = 2  # and allocates
    CAPTURES = 3
    RUNS = 4


class Patience:
    """With one rank that is waited for.  It gets on while its phase changes or it takes time of a
    CPU, as reading weights does: who is stopped, sleeps or waits for a lock does neither."""

    def __init__(self, rank: int, pid: int) -> None:
        self._rank = rank
        self._pid = pid
        self._seen = (-1, -1)
        self._since = time.monotonic()

    def require(self, phase: int) -> None:
        """Raise PacelineError where the rank has done nothing for BOOT_WAIT_S."""
        seen = (phase, cpu_ticks(self._pid))
        if seen != self._seen:
            self._seen, self._since = seen, time.monotonic()
        elif time.monotonic() - self._since > BOOT_WAIT_S:
            raise PacelineError.about(
                f"rank {self._rank} of the model",
                expected="ready",
                got=f"nothing done for {BOOT_WAIT_S:g} s while it {Phase(phase).name.lower()}",
                remedy="look at its log for what it waits for; load the model again",
            )


def cpu_ticks(pid: int) -> int:
    """That a process of this machine has taken; 0 of one that has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    fields = stat.rpartition(")")[2].split()  # field 3 and on; the name before may hold spaces
    return int(fields[11]) + int(fields[12])  # in the process and in the kernel for it
