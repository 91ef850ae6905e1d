"""Host: the engine's end of the border: an LLM, asked by whoever has the other end of a socket.

One thread owns the LLM and the socket; another makes grammars of the forms that answers must have,
which may take longer than a turn.  The first looks for commands between two turns, sleeps while
there is nothing to do, and never waits for its reader: what a socket does not take stays with the
requests, whose growth is read when there is room, so a slow reader gets more at a time.
"""

import hashlib
import json
import logging
import os
import select
import socket
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial

from paceline.core.errors import BusyError, PacelineError, told
from paceline.core.modes import End
from paceline.core.options.engine_options import known
from paceline.core.step import Step
from paceline.llm.admission import AdmittedPrompt
from paceline.llm.ends.pairs import admitted_pairs
from paceline.llm.followed import LULL_S, Followed, Following
from paceline.llm.llm import LLM
from paceline.plan.machine import versions
from paceline.plan.resolution import Resolution
from paceline.server.border.live_forms import FormLimits, LiveForms
from paceline.server.border.messages import (
    STEP_SECONDS,
    STOPPING,
    Abort,
    BorderMessage,
    Broken,
    Cancel,
    Command,
    EngineRefusal,
    Frames,
    Grown,
    Leave,
    Look,
    Looked,
    Pages,
    Queued,
    Ready,
    Steps,
    Submit,
    Vectors,
)
from paceline.server.border.outbox import Outbox

_READ_BYTES = 1 << 18
_LOG = logging.getLogger("paceline")


class Host:
    """Owns the serving of `llm`, by the thread that calls `run`."""

    def __init__(
        self, llm: LLM, end: socket.socket, outbox: Outbox, forms: FormLimits | None = None
    ) -> None:
        self.followed = Followed(llm)
        # By time.monotonic; of a turn, or of a capture while nothing runs.  None: in neither.
        self.turning_since: float | None = None
        self.llm = llm
        self._end = end
        self._outbox = outbox
        self._commands = Frames(Command)
        self._grown: dict[tuple[int, int], Following] = {}  # with news to tell, by ticket and index
        self._times = StepTimes()
        self._is_leaving = False
        self._forming = ThreadPoolExecutor(1, thread_name_prefix="paceline-forms")
        self._formed: dict[int, tuple[Submit, Future[list[AdmittedPrompt]]]] = {}  # by ticket
        self._live_forms = LiveForms(
            lambda number: number in self._formed or number in self.followed,
            forms or FormLimits(),
        )
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)  # written when one of these is done

    def run(self) -> bool:
        """Serve until the other end leaves; returns whether it did, and no turn failed."""
        self._outbox.put(ready(self.llm))
        try:
            self._serve()
            self._outbox.send_all()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return True  # it is gone
        except Exception as error:  # noqa: BLE001  a turn may raise anything
            _LOG.error("the engine has failed; it answers no more requests", exc_info=error)
            self._outbox.put(Broken(cause=told(error)))
            with suppress(OSError):
                self._outbox.send_all()
            return False
        finally:
            self._forming.shutdown(cancel_futures=True)
            os.close(self._wake)
        return True

    def _serve(self) -> None:
        while self.followed.has_work or not self._is_leaving:
            self._tell()
            self._hear(wait=not self.followed.has_work)
            self._take_formed()
            self._outbox.send()  # who was accepted need not wait for a turn
            if self.followed.has_work:
                self._turn()
        while self._grown:
            self._tell()
            self._outbox.send_all()

    def _hear(self, *, wait: bool) -> None:
        """Every command that has come; with `wait`, sleep until something can be done.  Raises
        EOFError when nobody is there any more."""
        if wait:
            poll = select.poll()  # takes descriptors of any number
            poll.register(
                self._end, select.POLLIN | (0 if self._outbox.has_room else select.POLLOUT)
            )
            poll.register(self._wake, select.POLLIN)
            if not self._formed and not poll.poll(1e3 * LULL_S):
                while self._make_ready() and not poll.poll(0):
                    pass
            poll.poll()
        with suppress(BlockingIOError):
            while True:
                data = self._end.recv(_READ_BYTES)
                if not data:
                    raise EOFError
                for command in self._commands.feed(data):
                    self._obey(command)

    def _obey(self, command: BorderMessage) -> None:
        match command:
            case Submit():
                self._take(command)
            case Cancel():
                _, forming = self._formed.pop(command.number, (None, None))
                if forming is not None:
                    forming.cancel()  # if it has not begun
                self.followed.cancel(command.number)
                for key in [key for key in self._grown if key[0] == command.number]:
                    del self._grown[key]
            case Look():
                self._outbox.put(looked(self.llm, self._times, forming=self._num_forming))
            case Abort():
                self._abort()
            case Leave():
                self._is_leaving = True
                self._abort()

    def _take(self, asked: Submit) -> None:
        """Queue it, unless its form is to be made before."""
        try:
            self._live_forms.add(asked)
        except PacelineError as error:
            self._outbox.put(EngineRefusal.of(error, asked.number))
            return
        if self._must_wait(asked):
            self._form(asked)
        else:
            self._begin(asked, partial(self._admitted, asked))

    def _abort(self) -> None:
        self._note(self.followed.abort())
        for number, (_, forming) in self._formed.items():
            forming.cancel()
            self._outbox.put(EngineRefusal.of(BusyError(STOPPING), number))
        self._formed.clear()

    def _must_wait(self, asked: Submit) -> bool:
        """Whether the form of its answer is to be made."""
        form, structures = asked.params.structured_outputs, self.llm.admission.structures
        return form is not None and structures is not None and not structures.knows(form)

    @property
    def _num_forming(self) -> int:
        """Completions whose form is being made."""
        return sum(len(asked.prompts) * asked.params.n for asked, _ in self._formed.values())

    def _form(self, asked: Submit) -> None:
        """Have it admitted by the other thread."""
        admitted = self._forming.submit(self._admitted, asked)
        self._formed[asked.number] = asked, admitted
        admitted.add_done_callback(lambda _: os.eventfd_write(self._wake, 1))

    def _take_formed(self) -> None:
        """Queue what has been admitted there."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        for number, (asked, admitted) in [*self._formed.items()]:
            if admitted.done():
                del self._formed[number]
                self._begin(asked, admitted.result)

    def _admitted(self, asked: Submit) -> list[AdmittedPrompt]:
        """Raises RequestError."""
        admission = self.llm.admission
        if asked.second_from:
            admission.require_labels()
            pairs = list(zip(asked.prompts, asked.second_from, strict=True))
            admitted = admitted_pairs(admission, pairs)
        elif asked.end is End.GENERATE:
            admitted = admission.admit(asked.prompts, asked.params)
        else:
            if asked.end is End.POOL:
                admission.require_vectors()
            admitted = admission.admit_end(asked.prompts, asked.end, asked.params)
        return [replace(each, share=asked.share) for each in admitted]

    def _begin(self, asked: Submit, admitted: Callable[[], list[AdmittedPrompt]]) -> None:
        """Queue it, or tell why not: a fault of its admission ends it alone."""
        try:
            prompts = admitted()
        except PacelineError as error:
            self._outbox.put(EngineRefusal.of(error, asked.number))
        except BaseException as error:  # noqa: BLE001  a panic of pyo3 is no Exception
            _LOG.error("a request could not be admitted", exc_info=error)
            self._outbox.put(EngineRefusal.of(_not_admitted(error), asked.number))
        else:
            self._submit(asked, prompts)

    def _submit(self, asked: Submit, admitted: list[AdmittedPrompt]) -> None:
        try:
            self.followed.submit(asked.number, admitted, stream=asked.stream)
        except PacelineError as error:
            self._outbox.put(EngineRefusal.of(error, asked.number))
        else:
            self._outbox.put(Queued(number=asked.number))

    def _turn(self) -> None:
        step = self.llm.engine.in_flight
        self.turning_since = began = time.monotonic()
        self._note(self.followed.turn())
        self.turning_since = None
        if step is not None:
            self._times.add(step, time.monotonic() - began)

    def _make_ready(self) -> bool:
        """As of `Followed`, watched as a turn is."""
        self.turning_since = time.monotonic()
        has_made = self.followed.make_ready()
        self.turning_since = None
        return has_made

    def _note(self, followings: list[Following]) -> None:
        for each in followings:
            self._grown[each.number, each.index] = each

    def _tell(self) -> None:
        """Send what waits, and with it what has grown, if there is room."""
        self._outbox.send()
        if self._grown and self._outbox.has_room:
            self._outbox.put(
                *[Grown.of(each.number, each.index, each.tracker) for each in self._grown.values()]
            )
            self._grown.clear()
            self._outbox.send()


class StepTimes:
    """Owns the counts of steps by kind and by how long they took: from the beginning of the turn
    that brought a step's outputs to its end."""

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = defaultdict(lambda: [0] * (len(STEP_SECONDS) + 1))
        self._seconds: dict[str, float] = defaultdict(float)

    def add(self, step: Step, seconds: float) -> None:
        """A step has come back."""
        kind = "prefill" if step.is_ragged or step.layout.extend_lens[0] > 1 else "decode"
        kind = "round" if step.is_round else kind
        self._counts[kind][bisect_left(STEP_SECONDS, seconds)] += 1
        self._seconds[kind] += seconds

    def told(self) -> dict[str, Steps]:
        """By kind, as they stand."""
        return {
            kind: Steps(counts=tuple(counts), seconds=self._seconds[kind])
            for kind, counts in self._counts.items()
        }


def looked(llm: LLM, times: StepTimes, *, forming: int) -> Looked:
    """What `llm` does, for the thread that owns it.  forming: completions that wait for a form."""
    scheduler = llm.engine.scheduler
    stats = scheduler.cache.stats()
    return Looked(
        running=scheduler.num_running,
        waiting=scheduler.num_waiting + forming,
        kv_used=max((group.owned / group.total for group in stats.groups), default=0.0),
        queried_tokens=stats.queried_tokens,
        hit_tokens=stats.hit_tokens,
        pages={
            name: Pages(used=group.owned + group.queued, cached=group.cached, free=group.free)
            for name, group in zip(stats.names, stats.groups, strict=True)
        },
        steps=times.told(),
    )


def ready(llm: LLM) -> Ready:
    """What HTTP must know of `llm`."""
    admission, folder = llm.admission, llm.prepared.source.tokenizer
    return Ready(
        context_len=admission.context_len,
        max_running=known(llm.prepared.options.max_num_seqs),
        vocab_size=admission.config.vocab_size,
        folder=None if folder is None or admission.tokenizer is None else str(folder.parent),
        fingerprint=_fingerprint(llm.prepared.resolution),
        ends=tuple(sorted(admission.config.ends)),
        vectors=Vectors(
            width=admission.config.pooled_width if End.POOL in admission.config.ends else 0,
            normalizes=admission.config.normalizes,
            prompt=admission.config.vector_prompt,
            lowers=admission.config.lowers,
            label_act=admission.config.label_act,
        ),
    )


def _not_admitted(error: BaseException) -> PacelineError:
    return PacelineError.about(
        "the request",
        expected="one that can be admitted",
        got=repr(error),
        remedy="leave out what is unusual in it; the server's log has more",
    )


def _fingerprint(resolution: Resolution) -> str:
    facts = json.dumps([versions(), resolution.to_json()], sort_keys=True, default=str)
    return f"fp_{hashlib.blake2b(facts.encode(), digest_size=6).hexdigest()}"
