"""Ranks: the other processes of a model, as the one that schedules sees them.

The leader is rank 0 and everything that one process would be: it schedules, samples, decides who
ends and answers.  Each other rank (`llm.rank_process`) runs the same steps over its part of the
model, in the order in which it reads them, and tells nothing back; what they compute together meets
in the exchange.

    leader                      rank
    starts it                   tells what it runs on            Started
                                plans its part                   Planned
    compares, agrees on pages   loads                            Loaded
    has loaded too              captures                         Ready
    writes each step            runs it
    closes its bell             ends

Whoever ends early tells why (Failed), or leaves an exit code; then all end.
"""

import hashlib
import os
import queue
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from threading import Lock, Thread
from typing import Any, TypeVar

import msgspec
import torch
from msgspec import Struct

from paceline.core.errors import ConfigError, PacelineError, message
from paceline.core.options.engine_options import EngineOptions
from paceline.core.step import Step, StepOutputs, StepRun
from paceline.kernels.all_reduce import GONE, WAIT_S, Exchange
from paceline.kernels.peer_memory import PeerMemory
from paceline.llm.boot import Knobs, planned_pages
from paceline.llm.prepare import Prepared
from paceline.llm.rank_phases import Patience
from paceline.llm.rank_words import Agreed, Failed, Loaded, Planned, Ready, Started, Told, hear
from paceline.models.locate import ModelSource
from paceline.plan.assemble import Decided, exchange_capacity
from paceline.plan.machine import versions
from paceline.runner.model_runner import ModelRunner
from paceline.runner.outputs_ring import LaunchedStep
from paceline.runner.shared_memory import BoxShape, FrameWriter, SharedMemory
from paceline.runner.step_frames import LAYOUT, encode_step

_T = TypeVar("_T", Started, Planned, Loaded, Ready)
_R = TypeVar("_R")
_LOOK_S = 0.1  # from look to look at a rank that is waited for


class Setup(Struct, frozen=True, kw_only=True):
    """What a rank's process is started with."""

    rank: int
    path: list[str]  # where the leader finds modules, plug-ins among them
    options: dict[str, Any]  # resolved by the leader, as far as they are not the usual
    memory: int  # file descriptor
    capacity: int  # of the exchange in that memory
    dtype: str  # of the exchange
    gpu: int | None  # index of its own; None: it runs on the CPU

    def map(self) -> SharedMemory:
        """This process's map of the memory."""
        return SharedMemory(self.memory, self.shape)

    def take_gpu(self) -> None:
        """Make it this process's, before anything is on one."""
        if self.gpu is not None:
            torch.cuda.set_device(self.gpu)

    def peer_memory(self) -> PeerMemory | None:
        """Of this process, new; None: all ranks are on the CPU."""
        shape = self.shape
        if self.gpu is None:
            return None
        return PeerMemory(self.rank, shape.ranks, dtype=shape.dtype)

    @property
    def shape(self) -> BoxShape:
        ranks: int = self.options["tensor_parallel_size"]
        dtype: torch.dtype = getattr(torch, self.dtype)
        return BoxShape(ranks=ranks, capacity=self.capacity, dtype=dtype)


def started() -> Started:
    """Of this process."""
    return Started(versions=versions(), layout=LAYOUT)


def planned(prepared: Prepared, num_pages: tuple[int, ...], peers: PeerMemory | None) -> Planned:
    """Of this process."""
    drafter = None if prepared.speculation is None else prepared.speculation.drafter.source
    stored = prepared.options.load_format != "dummy"
    sources = [each for each in (prepared.source, drafter) if each is not None]
    return Planned(
        options=unusual(prepared.options),
        weights=_fingerprint(sources, stored=stored),
        num_pages=num_pages,
        box=b"" if peers is None else peers.handle,
    )


def unusual(options: EngineOptions) -> dict[str, Any]:
    """Options that are not what they are when nobody asks, as they are behind JSON."""
    usual = asdict(EngineOptions())
    found = {name: value for name, value in asdict(options).items() if value != usual[name]}
    behind: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(found))
    return behind


def _fingerprint(sources: Sequence[ModelSource], *, stored: bool) -> str:
    """Of configurations, and of the names, sizes and times of the files beside weights."""
    seen: list[Any] = [source.config for source in sources]
    folders = [source.folder for source in sources if source.folder is not None and stored]
    for path in [path for folder in folders for path in sorted(folder.iterdir())]:
        facts = path.stat()
        seen.append((path.name, facts.st_size, facts.st_mtime_ns))
    return hashlib.sha256(msgspec.json.encode(seen, order="sorted")).hexdigest()


class Ranks:
    """Owns the processes, the memory that they share, and what is known of their ends."""

    def __init__(self, prepared: Prepared, capacity: int) -> None:
        """Starts them.  capacity: of the exchange."""
        options = prepared.options
        first = torch.cuda.current_device() if prepared.device.device_type == "cuda" else None
        ranks = prepared.parallel.size
        self._peers = None if first is None else PeerMemory(0, ranks, dtype=prepared.dtype)
        self._exchange: Exchange | None = None  # of the leader, once all have told their boxes
        shape = BoxShape(
            ranks=ranks, capacity=capacity if first is None else 0, dtype=prepared.dtype
        )
        self._failure: str | None = None  # how the first of them ended
        self._is_closed = False
        self._lock = Lock()  # of these two
        memory = SharedMemory.create(shape)
        try:
            self._memory = SharedMemory(memory, shape)
            others = range(1, shape.ranks)
            self._processes = [
                _start(
                    Setup(
                        rank=rank,
                        path=sys.path,
                        options=unusual(options),
                        memory=memory,
                        capacity=shape.capacity,
                        gpu=None if first is None else first + rank,
                        dtype=str(prepared.dtype).removeprefix("torch."),
                    )
                )
                for rank in others
            ]
        finally:
            os.close(memory)
        self._writer = FrameWriter(self._memory, told=self._ring)
        self._told: list[queue.SimpleQueue[Told | None]] = [queue.SimpleQueue() for _ in others]
        self._threads = [
            Thread(target=self._watch, args=(rank,), name=f"paceline-rank-{rank}", daemon=True)
            for rank in others
        ]
        for thread in self._threads:
            thread.start()

    @property
    def exchange(self) -> Exchange:
        """The leader's way to the others, behind `agree`."""
        assert self._exchange is not None, "agree comes first"
        return self._exchange

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the ranks behind the leader."""
        return tuple(process.pid for process in self._processes)

    def agree(
        self, prepared: Prepared, num_pages: tuple[int, ...], knobs: Knobs
    ) -> tuple[int, ...]:
        """[num_groups] the pages that every rank has, whose number all are told; they load then.
        num_pages: that the leader planned.

        Raises ConfigError for ranks that are not alike, with every reason; PacelineError for one
        that has ended or hangs.
        """
        theirs = self._hear(Started)
        require_alike([_differences(_facts(started()), _facts(each)) for each in theirs])
        plans = [planned(prepared, num_pages, self._peers), *self._hear(Planned)]
        facts = [{"weights": each.weights, **each.options} for each in plans]
        require_alike([_differences(facts[0], each) for each in facts[1:]])
        num_pages = tuple(map(min, *(each.num_pages for each in plans)))
        boxes = tuple(each.box for each in plans)
        agreed = Agreed(
            num_pages=num_pages,
            boxes=boxes,
            capture=knobs.capture,
            poison_graphs=knobs.poison_graphs,
            staging_depth=knobs.staging_depth,
        )
        self._write(msgspec.msgpack.encode(agreed))
        peers = self._peers
        self._exchange = self._memory.exchange(0) if peers is None else peers.open(boxes)
        return num_pages

    def meet(self) -> None:
        """Wait until every rank has loaded: in a capture they wait for one another, and no longer
        than a step may take.  Raises PacelineError for one that has ended or hangs."""
        self._hear(Loaded)
        self._write(b"")

    def wait_until_ready(self) -> None:
        """Raises PacelineError for one that has ended or hangs."""
        self._hear(Ready)

    def launch(self, step: Step) -> None:
        """Have every rank run a step.  Raises PacelineError when one has ended, TimeoutError when
        one takes nothing."""
        self._write(encode_step(step))

    def require_running(self) -> None:
        """Raise PacelineError when one has ended, with its message."""
        with self._lock:
            if self._failure is not None:
                raise PacelineError(self._failure)

    def close(self) -> None:
        """End all of them, whatever they do; closing twice is harmless."""
        with self._lock:
            self._is_closed = True
        self._kill()
        if self._peers is not None:
            self._peers.close()
        for thread in self._threads:
            thread.join()
        for process in self._processes:
            assert process.stdin is not None, "a pipe"
            process.stdin.close()

    def leading(self, runner: ModelRunner) -> "LeadingRunner":
        """`runner`, of the leader, with all ranks behind it."""
        return LeadingRunner(runner, self)

    def end(self, error: BaseException) -> None:
        """As `close`, behind an error of the leader's.  Raises PacelineError in its place where a
        rank has ended, with that rank's message."""
        try:
            self.require_running()
        except PacelineError as found:
            raise found from error
        finally:
            self.close()

    def _write(self, frame: bytes) -> None:
        self.require_running()
        self._writer.write(frame)

    def _ring(self) -> None:
        """Wake who waits for a frame.  A full bell has been rung; one that broke has been heard."""
        self.require_running()
        for process in self._processes:
            assert process.stdin is not None, "a pipe"
            with suppress(BlockingIOError, BrokenPipeError):
                os.write(process.stdin.fileno(), b"\0")

    def _hear(self, kind: type[_T]) -> list[_T]:
        """What each rank tells next.  Raises PacelineError for one that has ended or hangs."""
        found = []
        for rank in range(1, self._memory.ranks):
            told = self._next_of(rank)
            self.require_running()
            assert isinstance(told, kind), told
            found.append(told)
        return found

    def _next_of(self, rank: int) -> Told | None:
        """Raises PacelineError where the rank does nothing for long."""
        patience = Patience(rank, self._processes[rank - 1].pid)
        while True:
            with suppress(queue.Empty):
                return self._told[rank - 1].get(timeout=_LOOK_S)
            patience.require(self._memory.phases[rank])

    def _watch(self, rank: int) -> None:
        """A thread's life: to the end of a rank, which is that of all."""
        process, told = self._processes[rank - 1], self._told[rank - 1]
        assert process.stdout is not None, "a pipe"
        why = None
        with process.stdout as file:
            for each in hear(file):
                if isinstance(each, Failed):
                    why = each.text
                else:
                    told.put(each)
        code = process.wait()
        with self._lock:
            if self._failure is None and not self._is_closed:
                self._failure = message(
                    f"rank {rank} of the model",
                    expected="running",
                    got=f"ended: {why or _how(code)}",
                    remedy="load the model again",
                )
        self._memory.sent[rank] = GONE
        for queue_ in self._told:
            queue_.put(None)
        self._kill()
        if self._peers is not None:
            self._peers.release()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()


def start_ranks(
    prepared: Prepared, decided: Decided, knobs: Knobs
) -> tuple[Ranks, tuple[int, ...]]:
    """Start all ranks but this; returns with them [num_groups] pages of each, on which all agree.

    Raises ConfigError for ranks that are not alike, PacelineError for one that has ended.
    """
    ranks = Ranks(prepared, exchange_capacity(decided))
    try:
        return ranks, ranks.agree(prepared, planned_pages(prepared, knobs), knobs)
    except BaseException as error:
        ranks.end(error)
        raise


class LeadingRunner:
    """A runner whose steps the other ranks run too; see engine.loop.Runner."""

    def __init__(self, runner: ModelRunner, ranks: Ranks) -> None:
        self._runner = runner
        self._ranks = ranks
        weakref.finalize(self, ranks.close)

    def launch(self, step: Step) -> "LeadingStep":
        """As ModelRunner.launch.  What it raises ends the ranks, whose message comes first."""
        try:
            self._ranks.launch(step)
            return LeadingStep(self._runner.launch(step), self._ranks)
        except BaseException as error:
            self._ranks.end(error)
            raise


class LeadingStep:
    """A launched step that counts if all ranks have run it; see engine.loop.Launched."""

    def __init__(self, launched: LaunchedStep, ranks: Ranks) -> None:
        self._launched = launched
        self._ranks = ranks

    @property
    def step(self) -> Step:
        return self._launched.step

    @property
    def run(self) -> StepRun:
        return self._launched.run

    def synchronize(self) -> None:
        """As LaunchedStep.synchronize.  Raises what `wait` raises."""
        self._whole(self._launched.synchronize)

    def wait(self) -> StepOutputs:
        """As LaunchedStep.wait.  Raises PacelineError where a rank has ended meanwhile, for which a
        GPU waits no longer and sums without it, or where a GPU has waited in vain."""
        return self._whole(self._launched.wait)

    def _whole(self, result: Callable[[], _R]) -> _R:
        try:
            found = result()
            self._ranks.require_running()
        except RuntimeError as error:  # of CUDA
            self._ranks.end(error)
            raise PacelineError.about(
                "a step of all ranks",
                expected=f"run, with every rank's part within {WAIT_S:g} s",
                got=str(error).partition("\n")[0],
                remedy="look at the ranks' logs for one that hangs; load the model again",
            ) from error
        except BaseException as error:
            self._ranks.end(error)
            raise
        return found


def _start(setup: Setup) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "paceline.llm.rank_process"]
    # In a session of its own: Ctrl-C is for the leader, which ends it.
    process = subprocess.Popen(
        [*command, msgspec.json.encode(setup).decode()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(setup.memory,),
        start_new_session=True,
    )
    assert process.stdin is not None, "a pipe"
    os.set_blocking(process.stdin.fileno(), False)
    return process


def require_alike(differences: Sequence[Sequence[str]]) -> None:
    """Raise ConfigError unless no rank differs.  differences: of each rank behind the leader."""
    reasons = [
        f"of rank {rank} {reason}"
        for rank, found in enumerate(differences, start=1)
        for reason in found
    ]
    if reasons:
        raise ConfigError.about(
            "ranks of the model",
            expected="alike",
            got="; ".join(reasons),
            remedy="start all of them from one installation and one copy of the weights",
        )


def _facts(of: Started) -> dict[str, Any]:
    return {"layout of steps": of.layout, **of.versions}


def _differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    names = sorted(ours.keys() | theirs.keys())
    return [
        f"{name} {theirs.get(name)}, not {ours.get(name)}"
        for name in names
        if ours.get(name) != theirs.get(name)
    ]


def _how(code: int) -> str:
    """An exit code in words."""
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
