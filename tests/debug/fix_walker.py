"""Runs cells with bugs switched back on: one process per bug, forked behind the heavy imports.

    python fix_walker.py < jobs > results

jobs: JSON [[fix ids, cell ids], ...]; results: one JSON line per cell, {fixes, cell, status,
reason}.  The parent imports what is slow and nothing of the package, so that every child imports
the package anew, with its own edits.
"""

import json
import os
import signal
import sys
import traceback

import numpy  # noqa: F401
import torch
import torch._dynamo  # what a first capture imports otherwise
import triton.language  # noqa: F401

WORKERS = 2
SECONDS = 60  # of a child


def main() -> int:
    torch.set_num_threads(1)
    jobs = [(",".join(fixes), cells) for fixes, cells in json.load(sys.stdin)]
    running: set[int] = set()
    while jobs or running:
        while jobs and len(running) < WORKERS:
            running.add(_start(*jobs.pop(0)))
        done, _ = os.wait()
        running.remove(done)
    return 0


def _start(fixes: str, cells: list[str]) -> int:
    """Fork a child that runs `cells`; returns its process id."""
    child = os.fork()
    if child:
        return child
    signal.alarm(SECONDS)
    for line in _results(fixes, cells):
        os.write(1, (json.dumps(line) + "\n").encode())  # one write: lines do not mix
    os._exit(0)


def _results(fixes: str, cells: list[str]):
    os.environ["PACELINE_REVERT_FIX"] = fixes
    assert "paceline" not in sys.modules, "the package is imported by the child alone"
    for cell in cells:
        line = {"fixes": fixes, "cell": cell}
        try:
            from paceline.conformance.harness import run_named

            result = run_named(cell)
            yield line | {"status": result.status.value, "reason": result.reason}
        except Exception:  # noqa: BLE001
            yield line | {"status": "crash", "reason": traceback.format_exc()[-2000:]}


if __name__ == "__main__":
    sys.exit(main())
