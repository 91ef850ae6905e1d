"""Processes that run jobs one at a time and may die of them.

What a job does to its process (a segmentation fault, an exit, a loop without end) loses that job
and the process; the run goes on with a new one.  A worker starts as a fresh interpreter, so that
its environment is set before torch or triton are imported.  What jobs print goes to stderr.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import TracebackType
from typing import Generic, Self, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")
BOOT_LIMIT_S = 120.0  # of `prepare`: imports on a slow disk
JOIN_S = 5.0  # a dead process is collected within it
IDLE = 0.01  # of a limit: a process with less CPU time than this in all of it waits for nothing


@dataclass(frozen=True, slots=True)
class Task(Generic[Key, Value]):
    """One call; the function is sent by its name."""

    key: Key
    function: Callable[..., Value]
    arguments: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Lost:
    """A job without a value: it raised, or its process ended or was ended."""

    reason: str
    with_process: bool  # the process is lost too
    is_late: bool = False  # it was ended at the limit


class LastResult(Exception):
    """Raised by a job whose process is not fit for another one; `value` is the job's value."""

    def __init__(self, value: object) -> None:
        self.value = value
        super().__init__("the process of this job takes no other")


@dataclass(slots=True, eq=False)
class _Worker(Generic[Key]):
    """One process and what it does now."""

    process: SpawnProcess
    connection: Connection
    is_booting: bool = True
    job: Key | None = None
    last: Key | None = None  # the job before
    deadline: float = field(default_factory=lambda: time.monotonic() + BOOT_LIMIT_S)
    began: float = 0.0  # CPU seconds of the process when the job began, where they are known
    seen: float = 0.0  # and when its deadline was set last

    def begin(self, limit_s: float) -> None:
        """Its job begins now."""
        self.deadline = time.monotonic() + limit_s
        usage = usage_of(self.process.pid)
        self.began = self.seen = 0.0 if usage is None else usage.seconds


class Workers(Generic[Key, Value]):
    """At most `count` processes, started when there is a job for them; owner of each.

    Leaving the context ends them, whatever they do.
    """

    def __init__(
        self,
        count: int,
        *,
        limit_s: float,
        prepare: Callable[[], None],
        environment: Mapping[str, str],
    ) -> None:
        """limit_s: CPU time of one job; one that idles so long is ended too.

        prepare: runs first in each process, e.g. its slow imports.
        """
        self._limit_s = limit_s
        self._prepare = prepare
        self._environment = dict(environment)
        self._count = count
        self._workers: list[_Worker[Key]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for worker in self._workers:
            _end(worker.process)
            worker.connection.close()

    def run(self, jobs: Iterable[Task[Key, Value]]) -> Iterator[tuple[Key, Value | Lost]]:
        """The outcome of each job as it comes; one is taken from `jobs` when a worker is free."""
        waiting = iter(jobs)
        return self.run_queue(lambda last: next(waiting, None))

    def run_queue(
        self, take: Callable[[Key | None], Task[Key, Value] | None]
    ) -> Iterator[tuple[Key, Value | Lost]]:
        """The same, of jobs that are taken by what a worker did last; None: there are no more."""
        for worker in self._workers:
            worker.last = None  # a key of the jobs of before
        self._give(take)
        while busy := [worker for worker in self._workers if worker.job is not None]:
            patience = max(0.0, min(worker.deadline for worker in busy) - time.monotonic())
            ready = set(wait([worker.connection for worker in busy], timeout=patience))
            outcomes = []
            for worker in busy:
                if worker.connection in ready:
                    outcomes += self._receive(worker)
                elif time.monotonic() >= worker.deadline:
                    outcomes += self._give_up(worker)
            yield from outcomes  # first: whoever reads them may decide which jobs follow
            self._give(take)

    def _give(self, take: Callable[[Key | None], Task[Key, Value] | None]) -> None:
        """A job for every worker without one, and for as many new ones as are wanted."""
        idle = [worker for worker in self._workers if worker.job is None]
        while idle or len(self._workers) < self._count:
            job = take(idle[-1].last if idle else None)
            if job is None:
                return
            worker = idle.pop() if idle else self._spawn()
            worker.job = worker.last = job.key
            if not worker.is_booting:
                worker.begin(self._limit_s)
            with suppress(OSError):  # it died between two jobs: the next read says so
                worker.connection.send((job.function, job.arguments))

    def _receive(self, worker: _Worker[Key]) -> list[tuple[Key, Value | Lost]]:
        try:
            value, is_last = worker.connection.recv()
        except (EOFError, OSError):
            return self._remove(worker, f"its process ended: {_ending(worker.process)}")
        if worker.is_booting and isinstance(value, Lost):
            return self._remove(worker, f"its process did not start: {value.reason}")
        if worker.is_booting:
            worker.is_booting = False
            worker.begin(self._limit_s)
            return []
        assert worker.job is not None
        found, worker.job = [(worker.job, value)], None
        return found + self._remove(worker, "") if is_last else found

    def _give_up(self, worker: _Worker[Key]) -> list[tuple[Key, Value | Lost]]:
        """End a worker behind its deadline, unless others kept it from its CPU time."""
        limit_s = BOOT_LIMIT_S if worker.is_booting else self._limit_s
        usage = usage_of(worker.process.pid)
        if usage is None:
            return self._remove(worker, f"took longer than {limit_s:g} s", is_late=True)
        spent, lately = usage.seconds - worker.began, usage.seconds - worker.seen
        if usage.is_asleep and lately < IDLE * limit_s:
            return self._remove(worker, f"did nothing for {limit_s:g} s", is_late=True)
        if spent >= limit_s:
            reason = f"took more than {limit_s:g} s of CPU time"
            return self._remove(worker, reason, is_late=True)
        worker.seen = usage.seconds
        worker.deadline = time.monotonic() + max(limit_s - spent, limit_s / 20)
        return []

    def _remove(
        self, worker: _Worker[Key], reason: str, *, is_late: bool = False
    ) -> list[tuple[Key, Value | Lost]]:
        """End the worker; the job it holds is lost for `reason`."""
        _end(worker.process)
        worker.connection.close()
        self._workers.remove(worker)
        lost = Lost(reason, with_process=True, is_late=is_late)
        return [] if worker.job is None else [(worker.job, lost)]

    def _spawn(self) -> _Worker[Key]:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._environment), daemon=True)
        process.start()
        theirs.close()
        ours.send((self._prepare, ()))
        self._workers.append(_Worker(process, ours))
        return self._workers[-1]


def _serve(connection: Connection, environment: Mapping[str, str]) -> None:
    """The worker's side: run what comes until the pipe closes."""
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)
    is_last = False
    while not is_last:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        try:
            value = function(*arguments)
        except LastResult as last:
            value, is_last = last.value, True
        except (Exception, SystemExit) as error:  # noqa: BLE001  a job may raise anything
            value = Lost(f"{type(error).__name__}: {error}", with_process=False)
        connection.send((value, is_last))


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """What a process does with its CPU."""

    seconds: float  # of it and of the children it waited for
    is_asleep: bool  # it waits for something else than a core


def usage_of(pid: int | None) -> ProcessUsage | None:
    """None where nothing tells it: on another system, or of a process that is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat.rpartition(b")")[2].split()  # behind the name, which may hold anything
    seconds = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return ProcessUsage(seconds, is_asleep=fields[0] == b"S")


def _ending(process: SpawnProcess) -> str:
    process.join(JOIN_S)
    code = process.exitcode
    if code is None:
        return "it closed its pipe"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _end(process: SpawnProcess) -> None:
    process.kill()
    process.join()
    process.close()
