"""EngineProcess: the process that has the engine, as the one of HTTP sees it."""

import logging
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from paceline.server.border.live_forms import FormLimits


class Setup(Struct, frozen=True, kw_only=True):
    """What an engine's process is started with."""

    end: int  # file descriptor of its end of the border
    options: dict[str, Any]  # that were asked for
    log_level: int
    stuck_s: float
    forms: FormLimits


class EngineProcess:
    """Owns the process, and HTTP's end of the border to it.  For the thread that starts it, which
    must outlive it."""

    def __init__(
        self,
        options: Mapping[str, object],
        *,
        stuck_s: float,
        max_forms: int,
        max_forms_per_client: int,
    ) -> None:
        self._end, theirs = socket.socketpair()
        setup = Setup(
            end=theirs.fileno(),
            options=dict(options),
            log_level=logging.getLogger("paceline").getEffectiveLevel(),
            stuck_s=stuck_s,
            forms=FormLimits(of_client=max_forms_per_client, of_all=max_forms),
        )
        command = [
            sys.executable,
            "-m",
            "paceline.server.border.engine_main",
            msgspec.json.encode(setup).decode(),
        ]
        with theirs:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=(setup.end,), start_new_session=True
            )

    @property
    def end(self) -> socket.socket:
        return self._end

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> str:
        code = self._process.wait()
        return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"

    def close(self) -> None:
        """End it, whatever it does; closing twice is harmless."""
        self._process.kill()
        self._process.wait()
        self._end.close()
