"""BlackBox: keeps an engine's last steps, and writes them to a file when a turn fails.

It stands between a turn function and its scheduler: every step passes it on its way to the device,
and so do its outputs.  Steps are kept as they are; of one that leaves the ring, its rows keep what
it changed (KnownRows).  An engine without a black box has the turn function itself.
"""

import logging
import os
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from paceline.core.errors import ConfigError
from paceline.core.modes import End
from paceline.core.step import FinishCode, JoinDelta, OverlayDelta, PageDelta, Step, StepOutputs
from paceline.engine.loop import Launched, Runner, Schedules, Turn, TurnFunction
from paceline.engine.request import FinishReason
from paceline.engine.scheduler import RequestUpdate, Scheduler
from paceline.llm.box.record import (
    NON_FINITE,
    STUCK,
    Asked,
    Failure,
    Landed,
    Made,
    Record,
    encode_record,
)
from paceline.llm.box.table_rows import KnownRows

KEPT_STEPS = 256
KEPT_BYTES = 256 << 20  # of what these steps brought
MOST_FILES = 16  # in a folder; none is ever deleted
MOST_BYTES = 64 << 20  # of a file: one that would be larger has fewer steps
_NUMBER_BYTES = 40  # of an int in a tuple
_SUFFIX = ".box.json"
_MAX_TEXT = 2000  # characters of what was raised
_HOSTS = "engine/scheduler.py"  # makes steps and reads outputs
_LOG = logging.getLogger("paceline")


@dataclass(slots=True, eq=False)
class _Kept:
    """A step that was made, and its outputs once they have come."""

    step: Step
    asked: tuple[Asked, ...]  # requests that it brought into their rows
    num_bytes: int
    landed: Landed | None = None


@dataclass(frozen=True, slots=True)
class _Seen:
    """What there is to write, while the engine may go on."""

    kept: list[_Kept]
    rows: KnownRows  # before the first of these
    asked: dict[int, Asked]  # who was in them, by row

    def index_of(self, request_id: str) -> int:
        """The row of the last step that a request has."""
        entered = [*self.asked.values(), *(each for kept in self.kept for each in kept.asked)]
        last = max((e for e in entered if e.request_id == request_id), key=lambda e: e.epoch)
        return self.kept[-1].step.layout.rows.index(last.row)

    def shorter(self) -> "_Seen":
        """Without the older half of what has come back."""
        num_landed = sum(each.landed is not None for each in self.kept)
        cut, rows, asked = num_landed - num_landed // 2, self.rows.copy(), dict(self.asked)
        for each in self.kept[:cut]:
            _leave(each, rows, asked)
        return _Seen(self.kept[cut:], rows, asked)


class BlackBox:
    """Owns the ring; of the thread that turns the engine, but for `write_stuck`.

    folder: is made where there is none.  scheduler: who is in which row.  kept_bytes: of what steps
    brought (token ids, embeddings, masks); fewer steps are kept where they bring more, those in
    flight always, and beside them encoders' inputs of running requests.  Raises ConfigError for a
    folder that cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        scheduler: Scheduler,
        made: Made,
        *,
        kept_steps: int = KEPT_STEPS,
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        self._folder = folder
        self._scheduler = scheduler
        self._made = made
        self._most = kept_steps
        self._most_bytes = kept_bytes
        self._num_bytes = 0  # of `_kept`
        self._num_cut = 0  # steps that left for their bytes
        self._lock = Lock()  # of the next three
        self._kept: deque[_Kept] = deque()
        self._rows = KnownRows()
        self._asked: dict[int, Asked] = {}
        _require_writable(folder)

    def around(self, turn: TurnFunction) -> TurnFunction:
        """The same turn; what it raises has the name of the file as a note."""

        def kept(
            scheduler: Schedules, runner: Runner, epoch: int, in_flight: Launched | None
        ) -> Turn:
            try:
                return turn(_Passed(scheduler, self), runner, epoch, in_flight)
            except Exception as error:
                told = self._write(_failure(error), self._seen())
                if told is not None:
                    error.add_note(told)
                raise

        return kept

    def write_stuck(self, place: str) -> str | None:
        """The turn does not end, in a function that is named so; from any other thread.  Returns
        what to tell of the file; None: there is none."""
        return self._write(Failure(kind=STUCK, text=f"in {place}"), self._seen())

    def note(self, step: Step) -> None:
        """A step is on its way."""
        asked = self._entering(step) if step.deltas else ()
        with self._lock:
            self._kept.append(_Kept(step, asked, _bytes_of(step)))
            self._num_bytes += self._kept[-1].num_bytes
            if len(self._kept) > self._most:
                self._drop()
            while self._num_bytes > self._most_bytes and self._kept[0].landed is not None:
                self._drop()
                self._num_cut += 1

    def note_outputs(self, outputs: StepOutputs) -> None:
        """One of the last two has come back."""
        for each in reversed(self._kept):
            if each.step.epoch == outputs.epoch:
                each.landed = Landed.of(outputs)
                return

    def note_failed(self, outputs: StepOutputs, updates: Sequence[RequestUpdate]) -> None:
        """Requests of the step have ended with an error, by what was not finite or by a grammar's
        word; the former are told of the file."""
        seen = self._seen()
        while seen.kept[-1].step.epoch != outputs.epoch:  # launched since
            seen.kept.pop()
        errors = [each.request for each in updates if each.finish is FinishReason.ERROR]
        index = {request: seen.index_of(request.request_id) for request in errors}
        failed = [
            request
            for request in errors
            if request.end is not End.GENERATE
            or outputs.finish[index[request]] is FinishCode.NON_FINITE
        ]
        if not failed:
            return
        text = "; ".join(str(request.error) for request in failed)
        rows = tuple(index[request] for request in failed)
        told = self._write(Failure(kind=NON_FINITE, text=text, rows=rows), seen)
        if told is not None:
            for request in failed:
                request.add_note(told)

    def _drop(self) -> None:
        """The oldest step leaves."""
        oldest = self._kept.popleft()
        self._num_bytes -= oldest.num_bytes
        _leave(oldest, self._rows, self._asked)
        running = {request.row for request in self._scheduler.running}
        for row in self._rows.holding() - running:  # ended by the host
            if not any(row in each.step.layout.rows for each in self._kept):
                self._rows.let_go(row)

    def _entering(self, step: Step) -> tuple[Asked, ...]:
        running = {request.row: request for request in self._scheduler.running}
        rows = [delta.row for delta in step.deltas if isinstance(delta, JoinDelta)]
        return tuple(
            Asked(
                request_id=running[row].request_id,
                row=row,
                arrival=running[row].arrival,
                epoch=step.epoch,
            )
            for row in rows
        )

    def _seen(self) -> _Seen:
        with self._lock:
            return _Seen(list(self._kept), self._rows.copy(), dict(self._asked))

    def _write(self, failure: Failure, seen: _Seen) -> str | None:
        """What to tell of the file; None: there is none, and the log says why.  Whatever goes wrong
        here must not hide what has gone wrong."""
        try:
            if len(list(self._folder.glob(f"*{_SUFFIX}"))) >= MOST_FILES:
                _LOG.error("no black box was written: %s has %d already", self._folder, MOST_FILES)
                return None
            path = self._folder / _file_name()
            _save(path, self._encoded(failure, seen))
        except Exception as error:  # noqa: BLE001  see above
            _LOG.error("the black box could not be written", exc_info=error)
            return None
        _LOG.error("the last steps are in %s; paceline debug replay %s", path.name, path)
        if self._num_cut:
            most = self._most_bytes
            _LOG.warning("%d steps left it early: --black-box-bytes is %d", self._num_cut, most)
        return f"its last steps are in {path.name}"

    def _encoded(self, failure: Failure, seen: _Seen) -> bytes:
        """Of as many of the steps as there is room for."""
        data = encode_record(_record(failure, self._made, seen))
        while len(data) > MOST_BYTES and seen.kept[0].landed is not None:
            seen = seen.shorter()
            data = encode_record(_record(failure, self._made, seen))
        if len(data) > MOST_BYTES:
            raise ConfigError.about(
                "a black box of the steps in flight",
                expected=f"at most {MOST_BYTES} bytes",
                got=len(data),
                remedy="bring less of embeddings, or let fewer requests run",
            )
        return data


class _Passed:
    """A scheduler whose steps and outputs a black box sees."""

    def __init__(self, inner: Schedules, box: BlackBox) -> None:
        self._inner = inner
        self._box = box

    def schedule(self, epoch: int) -> Step | None:
        step = self._inner.schedule(epoch)
        if step is not None:
            self._box.note(step)
        return step

    def process(self, step: Step, outputs: StepOutputs) -> list[RequestUpdate]:
        self._box.note_outputs(outputs)
        updates = self._inner.process(step, outputs)
        for update in updates:
            if update.finish is FinishReason.ERROR:
                self._box.note_failed(outputs, updates)
                break
        return updates


def _leave(kept: _Kept, rows: KnownRows, asked: dict[int, Asked]) -> None:
    """The oldest step becomes what it left in its rows."""
    landed = kept.landed
    assert landed is not None, "a step that leaves has come back"
    rows.apply(kept.step, landed.token_ids, landed.finish)
    asked |= {each.row: each for each in kept.asked}


def _bytes_of(step: Step) -> int:
    """About as many as it keeps from being freed."""
    numbers, data = step.layout.num_tokens + 8 * step.layout.num_reqs, 0
    for delta in step.deltas:
        if isinstance(delta, OverlayDelta):
            data += delta.source.rows.nbytes
        elif isinstance(delta, PageDelta):
            numbers += len(delta.page_ids)
        else:
            positions = () if delta.positions is None else delta.positions.axes
            numbers += len(delta.token_ids) + sum(map(len, positions))
            data += 0 if delta.encoder is None else delta.encoder.data.nbytes
    return numbers * _NUMBER_BYTES + data + sum(len(mask.words) for mask in step.masks or ())


def _record(failure: Failure, made: Made, seen: _Seen) -> Record:
    before = {row: seen.rows[row] for row in _held(seen.kept)}
    entered = [each for kept in seen.kept for each in kept.asked]
    landed = [kept.landed for kept in seen.kept if kept.landed is not None]
    return Record(
        written=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        failure=failure,
        made=made,
        asked=(*(seen.asked[row] for row in before), *entered),
        ended=tuple(row for row, each in before.items() if each.has_ended),
        start=tuple(tuple(each.deltas()) for each in before.values() if not each.has_ended),
        steps=tuple(kept.step for kept in seen.kept),
        landed=tuple(landed),
    )


def _held(kept: Sequence[_Kept]) -> Iterator[int]:
    """Rows that steps hold and nobody enters before, each once."""
    entered = set[int]()
    for each in kept:
        entered |= {asked.row for asked in each.asked}
        for row in each.step.layout.rows:
            if row not in entered:
                entered.add(row)
                yield row


def _failure(error: Exception) -> Failure:
    frames = traceback.extract_tb(error.__traceback__)
    return Failure(
        kind=type(error).__name__,
        text=f"{error!s:.{_MAX_TEXT}}",
        trace=tuple(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames),
        is_hosts=any(frame.filename.endswith(_HOSTS) for frame in frames),
    )


def _file_name() -> str:
    """Of this moment and process: within a millisecond boxes are made that must not be one file."""
    now = time.time_ns()
    second = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now // 10**9))
    return f"paceline-{second}.{now % 10**9:09}-{os.getpid()}{_SUFFIX}"


def _save(path: Path, data: bytes) -> None:
    """Whole or not at all; for its owner alone."""
    new = path.with_suffix(".new")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    new.rename(path)


def _require_writable(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"{folder} may not be written")
    except OSError as error:
        raise ConfigError.about(
            "black_box_dir",
            expected="a folder that can be written",
            got=str(error),
            remedy="choose another with --black-box-dir",
        ) from error
