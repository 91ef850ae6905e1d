"""What runs in the engine's process.

It hears no signals of a terminal or a service manager, which are for HTTP, and ends with HTTP: a
thread waits for the border to hang up, whatever the engine does, and says when a turn does not end.
"""

import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

import msgspec

from paceline.core.errors import ConfigError, PacelineError
from paceline.core.model.config import ModelConfig
from paceline.core.progress import watched
from paceline.server.border.messages import EngineRefusal, LoadProgress, LogLine, Stuck
from paceline.server.border.outbox import Outbox
from paceline.server.border.process import Setup

leave = os._exit  # without waiting for threads
_BEAT_MS = 1000
_PROGRESS_S = 0.1  # between two things that are said of one phase


class SaidHandler(logging.Handler):
    """Leaves what is logged to HTTP, which writes it in its order."""

    def __init__(self, outbox: Outbox) -> None:
        super().__init__()
        self._outbox = outbox

    def emit(self, record: logging.LogRecord) -> None:
        self._outbox.put(LogLine(level=record.levelno, text=self.format(record)))
        self._outbox.send()


class Watch:
    """Owns the thread that looks after the one that turns the engine."""

    def __init__(self, end: socket.socket, outbox: Outbox, stuck_s: float) -> None:
        """Starts it."""
        self.turning_since: Callable[[], float | None] = lambda: None
        self.keep: Callable[[str], str | None] = lambda place: None  # writes what was run last
        self._end = end
        self._outbox = outbox
        self._stuck_s = stuck_s
        self._main = threading.get_ident()
        threading.Thread(target=self._run, name="paceline-watch", daemon=True).start()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._end, 0)  # POLLHUP alone
        hang: _Hang | None = None
        while not poll.poll(_BEAT_MS):
            since = self.turning_since()
            is_stuck = since is not None and time.monotonic() - since > self._stuck_s
            if is_stuck and hang is None:
                hang = _Hang(place_of(sys._current_frames().get(self._main)))
                self._tell(hang.place)
                hang.keep_by(self.keep)
            elif hang is not None and not is_stuck:
                hang = None
                self._tell(None)
            elif hang is not None and hang.kept:
                self._tell(f"{hang.place}; {hang.kept.pop()}")
        leave(0)

    def _tell(self, phase: str | None) -> None:
        self._outbox.put(Stuck(phase=phase))
        self._outbox.send()


class _Hang:
    """A turn that does not end, and a thread that writes what was run last: a folder may hang."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.kept: list[str] = []  # what to tell of the file, once it is there

    def keep_by(self, keep: Callable[[str], str | None]) -> None:
        """Starts the thread."""
        threading.Thread(target=self._keep, args=(keep,), name="paceline-box", daemon=True).start()

    def _keep(self, keep: Callable[[str], str | None]) -> None:
        told = keep(self.place)
        if told is not None:
            self.kept.append(told)


def place_of(frame: FrameType | None) -> str:
    """The innermost function of ours that a thread is in."""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("paceline."):
            return f"{frame.f_code.co_qualname} of {name}"
        frame = frame.f_back
    return "a place that is not known"


def progress_to(outbox: Outbox) -> Callable[[str, int, int], None]:
    """What says how far a phase is, not more often than somebody looks."""
    said: tuple[str, float] = ("", 0.0)  # phase, when

    def say(phase: str, done: int, total: int) -> None:
        nonlocal said
        now = time.monotonic()
        if phase != said[0] or done == total or now - said[1] > _PROGRESS_S:
            said = phase, now
            outbox.put(LoadProgress(phase=phase, done=done, total=total))
            outbox.send()

    return say


def require_served(config: ModelConfig) -> None:
    """Raise ConfigError for a model whose requests need what no endpoint takes."""
    if config.encoder_input is not None and config.encoder_input.is_needed:
        raise ConfigError.about(
            "model",
            expected="one whose requests need nothing but text, as no endpoint takes more",
            got=f"{config.model_type}, whose requests bring encoder_input",
            remedy='use it from Python: LLM.generate({"prompt_token_ids": ids, "encoder_input": '
            "features})",
        )


def run(setup: Setup, end: socket.socket, outbox: Outbox) -> int:
    """Load and serve; returns the exit code."""
    watch = Watch(end, outbox, setup.stuck_s)
    from paceline.llm.llm import LLM  # brings torch: seconds in which the other end has our log
    from paceline.llm.prepare import prepare
    from paceline.plan.machine import settled
    from paceline.server.border.host import Host

    say = progress_to(outbox)
    say("planning", 0, 0)
    try:
        with watched(say):
            prepared = prepare(setup.options)
            require_served(prepared.config)
        with watched(say), LLM(prepared) as llm:
            host = Host(llm, end, outbox, setup.forms)
            watch.turning_since = lambda: host.turning_since
            watch.keep = llm.keep_stuck
            with settled():
                return 0 if host.run() else 1
    except PacelineError as error:
        outbox.put(EngineRefusal.of(error))
        outbox.send_all()
        return 2


def main() -> None:
    """Exit code 1 for an engine that failed, 2 for an error of its start that was raised on
    purpose; another goes to stderr with where it happened."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # and so in the processes that it starts
    setup = msgspec.json.decode(sys.argv[1], type=Setup)
    end = socket.socket(fileno=setup.end)
    outbox = Outbox(end)
    logger = logging.getLogger("paceline")
    logger.handlers = [SaidHandler(outbox)]
    logger.setLevel(setup.log_level)
    sys.exit(run(setup, end, outbox))


if __name__ == "__main__":
    main()
