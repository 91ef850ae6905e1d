"""Processes that tests start: they hear Ctrl-C, and nothing of them stays behind."""

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

PACELINE = (sys.executable, "-u", "-m", "paceline")


@contextmanager
def hearing_ctrl_c() -> Iterator[None]:
    """Within the block this process hears Ctrl-C, wherever it was started.  For the main thread."""
    heard = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, heard)


@contextmanager
def child(command: Sequence[str], **options: object) -> Iterator[subprocess.Popen]:
    """Run `command`; behind, it has ended and its pipes are closed.  For the main thread.

    It hears Ctrl-C also where the tests do not (in the background of a script): a signal that the
    parent ignores is ignored by a child, one that it handles is not.
    """
    with hearing_ctrl_c():
        process = subprocess.Popen(command, **options)
    with process:
        try:
            yield process
        finally:
            process.kill()
