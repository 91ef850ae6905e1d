"""A suite and a harness whose cells do what the names of their cases say.

The functions are sent to worker processes by name.
"""

import ctypes
import hashlib
import os
import sys
import time
from dataclasses import replace

from paceline.proof.check.cell import Status
from paceline.proof.check.matrix import Cell, Harness
from paceline.proof.check.workers import LastResult
from paceline.proof.suite.case import Batch, Case
from paceline.proof.suite.modes import ForwardMode


def case(name, *, method="dense", mode=ForwardMode.DECODE, is_quick=True):
    return Case(
        name=name,
        method=method,
        mode=mode,
        batches=(Batch((1,), (1,)),),
        captured_reqs=1,
        is_quick=is_quick,
    )


def suite_of(*names):
    """A suite of cases with these names, as `run_check` takes it."""
    return lambda: [case(name) for name in names]


def prepare():
    print("what a worker prints is not part of the report")


def resolve(backend, device_type):
    if backend == "unheard-of":
        raise ValueError("no such backend")
    if backend == "ends-the-process":
        os._exit(3)


def execute(cell: Cell, device_type):
    match cell.case.name.partition("-")[0]:
        case "passes":
            result = cell.result(Status.PROVEN)
            digest = hashlib.sha256(cell.id.encode()).hexdigest()
            return replace(result, error=0.25, tolerance=1.0, seconds=0.5, digest=digest)
        case "emulated":
            return cell.result(Status.EMULATED)
        case "refused":
            return cell.result(Status.REFUSED, "no <window>; no sinks")
        case "fails":
            return replace(cell.result(Status.FAILING, "row 3 is wrong"), error=float("inf"))
        case "raises":
            raise RuntimeError("the harness itself broke")
        case "exits":
            os._exit(7)
        case "leaves":
            sys.exit(5)
        case "segfaults":
            ctypes.string_at(0)
        case "hangs":
            time.sleep(600)
        case "spins":
            while True:
                pass
        case "waits":
            time.sleep(0.5)
            return cell.result(Status.PROVEN)
        case "composed":
            return replace(cell.result(Status.PROVEN), ran_as="cascade(torch)")
        case "last":
            raise LastResult(cell.result(Status.FAILING, f"pid {os.getpid()}"))
        case "pid":
            return cell.result(Status.REFUSED, f"pid {os.getpid()}")
        case "environment":
            names = ("TRITON_INTERPRET", "OMP_NUM_THREADS")
            return cell.result(Status.REFUSED, " ".join(os.environ.get(n, "-") for n in names))
    raise AssertionError(cell.id)


HARNESS = Harness(prepare=prepare, resolve=resolve, resolve_states=resolve, execute=execute)
