"""Ranks: the other processes of a model, as the one that schedules sees them.

The leader is rank 0 and everything that one process would be: it schedules, samples, decides who
ends and answers.  Each other rank (`llm.rank_process`) runs the same steps over its part of the
model, in the order in which it reads them, and tells nothing back, except where what they say is
compared; what they compute together meets in the exchange.

    leader                      rank
    starts it                   tells what it runs on            Started
                                plans its part                   Planned
    compares, agrees on pages   loads                            Loaded
    has loaded too              captures                         RankReady
    writes each step            runs it, and where it is compared tells its tokens  RankSaid
    closes its bell             ends

Whoever ends early tells why (RankFailed), or leaves an exit code; then all end.
"""

import os
import queue
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from threading import Lock, Thread
from typing import TypeVar

import msgspec
import torch

from paceline.core.errors import PacelineError, message
from paceline.core.step import Step, StepOutputs, StepRun
from paceline.kernels.all_reduce import GONE, WAIT_S, Exchange
from paceline.kernels.peer_memory import PeerMemory
from paceline.llm.boot import Knobs, planned_pages
from paceline.llm.prepare import Prepared
from paceline.llm.rank_phases import Patience
from paceline.llm.rank_setup import (
    RankSetup,
    facts,
    planned,
    require_alike,
    started,
    unusual,
)
from paceline.llm.rank_words import (
    Agreed,
    Loaded,
    Planned,
    RankFailed,
    RankReady,
    RankSaid,
    Started,
    Told,
    difference,
    hear,
    is_compared,
    said,
)
from paceline.plan.assemble import Decided, exchange_capacity
from paceline.runner.model_runner import ModelRunner
from paceline.runner.outputs_ring import LaunchedStep
from paceline.runner.shared_memory import BoxShape, FrameWriter, SharedMemory
from paceline.runner.step_frames import encode_step

_T = TypeVar("_T", Started, Planned, Loaded, RankReady, RankSaid)
_R = TypeVar("_R")
_LOOK_S = 0.1  # from look to look at a rank that is waited for


class Ranks:
    """Owns the processes, the memory that they share, and what is known of their ends."""

    def __init__(self, prepared: Prepared, capacity: int) -> None:
        """Starts them.  capacity: of the exchange."""
        options = prepared.options
        first = torch.cuda.current_device() if prepared.device.device_type == "cuda" else None
        ranks = prepared.parallel.size
        self._peers = None if first is None else PeerMemory(0, ranks, dtype=prepared.dtype)
        self._compare_every = options.compare_ranks_every
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
                    RankSetup(
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
        require_alike([facts(each) for each in (started(), *theirs)])
        plans = [planned(prepared, num_pages, self._peers), *self._hear(Planned)]
        require_alike([{"weights": each.weights, **each.options} for each in plans])
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
        self._hear(RankReady)

    def launch(self, step: Step) -> None:
        """Have every rank run a step.  Raises PacelineError when one has ended, TimeoutError when
        one takes nothing."""
        self._write(encode_step(step))

    def compare(self, step: Step, outputs: StepOutputs) -> None:
        """See that every rank says what the leader does, where the step is compared.  Raises
        PacelineError where one does not, has ended or hangs."""
        if not is_compared(step, self._compare_every):
            return
        ours = said(outputs)
        for rank, theirs in enumerate(self._hear(RankSaid), start=1):
            if theirs != ours:
                raise PacelineError.about(
                    f"what rank {rank} of the model says",
                    expected="the leader's, bit for bit",
                    got=f"{difference(ours, theirs)} in step {step.epoch}",
                    remedy="its memory, its link or a kernel is at fault: answers since the step "
                    "that agreed last are wrong; load the model again, and report the step",
                )

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
                if isinstance(each, RankFailed):
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

    def capture_owed(self) -> bool:
        """Never: the other ranks hear of steps alone, and capture what these say."""
        return False


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
        GPU waits no longer and sums without it, where a GPU has waited in vain, or where ranks
        compare and differ."""

        def compared() -> StepOutputs:
            outputs = self._launched.wait()
            self._ranks.compare(self.step, outputs)
            return outputs

        return self._whole(compared)

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


def _start(setup: RankSetup) -> "subprocess.Popen[bytes]":
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


def _how(code: int) -> str:
    """An exit code in words."""
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
