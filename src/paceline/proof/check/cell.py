"""Cells: one case on one backend with one runner, and what came of it.  Imports torch nowhere."""

from dataclasses import dataclass
from enum import Enum


class RunnerKind(Enum):
    """How the step is executed."""

    EAGER = "eager"  # unpadded, no graph
    RECORDED = "recorded"  # the recorded graph of a CPU
    CUDA_GRAPH = "cuda_graph"


class Status(Enum):
    """What is known of a cell."""

    PROVEN = "proven"  # ran on the real library, equals the oracle, and the comparison is sharp
    EMULATED = "emulated"  # the same, on a contract emulator of the library
    REFUSED = "refused"  # the backend says that it cannot, and why
    FAILING = "failing"
    TIMED_OUT = "timed_out"  # its process was ended at the limit: nothing is known of the backend
    NOT_RUN = "not_run"  # nothing here can run it, and why


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """One cell of the matrix."""

    method: str
    backend: str
    mode: str
    runner: str
    variant: str
    status: Status
    reason: str | None = None  # of every status but proven and emulated
    error: float | None = None  # the worst relative error of a (token, head)
    tolerance: float | None = None  # what was allowed there
    seconds: float = 0.0  # of CPU time, so that other load does not count
    ran_as: str | None = None  # the composition that ran, where it is not the backend alone
    digest: str | None = None  # SHA-256 of what every batch answered and wrote; None: a fault

    @property
    def id(self) -> str:
        """The name `--filter` and the documents use."""
        return "/".join((self.method, self.backend, self.mode, self.runner, self.variant))
