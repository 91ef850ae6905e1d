"""Record: what a black box writes: JSON of plain data, by names; no pickle.  Of text it has token
ids, `extra_args`, and what exceptions say; no stop strings, no forms of answers.

Of options it has what was resolved, so that another machine takes the same; of the model its name
and the hash of its configuration, not its weights.
"""

import hashlib
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from paceline.core.errors import ConfigError
from paceline.core.step import Delta, FinishCode, JoinDelta, Step, StepOutputs
from paceline.llm.prepare import Prepared
from paceline.llm.rank_setup import unusual
from paceline.plan.machine import versions
from paceline.runner.step_frames import StepForms

FORMAT = 2
_OLD = 1  # a bool said whether a round tells its drafts
NON_FINITE = "NonFiniteLogits"
STUCK = "Stuck"
_FORMS = StepForms(named=True)
_Delta: Any = _FORMS.delta
_Step: Any = _FORMS.step


class Failure(Struct, frozen=True, kw_only=True):
    """Why it was written."""

    kind: str  # the class of what was raised, NON_FINITE or STUCK
    text: str
    rows: tuple[int, ...] = ()  # of the last step, those of which something was not finite
    trace: tuple[str, ...] = ()  # functions of what was raised, the innermost last
    is_hosts: bool = False  # raised where steps are made or read, not where they run


class Made(Struct, frozen=True, kw_only=True):
    """The engine that ran the steps."""

    config_sha256: str  # of the model's configuration
    options: dict[str, Any]  # resolved, as far as they are not the usual
    chosen: tuple[str, ...]  # of these the engine's own choice
    num_pages: tuple[int, ...]  # [num_groups] of each pool
    device: str
    versions: dict[str, str | None]


def made_by(prepared: Prepared, num_pages: tuple[int, ...]) -> Made:
    """num_pages: [num_groups]"""
    options = unusual(prepared.options) | {"device": prepared.options.device}
    for name in ("black_box_dir", "black_box_bytes"):
        options.pop(name, None)
    config = json.dumps(prepared.source.config, sort_keys=True)
    origins = prepared.resolution.origins
    return Made(
        config_sha256=hashlib.sha256(config.encode()).hexdigest(),
        options={"model": prepared.options.model, **options},
        chosen=tuple(name for name in options if origins[name].startswith("chosen")),
        num_pages=num_pages,
        device=prepared.device.name,
        versions=versions(),
    )


class Asked(Struct, frozen=True, kw_only=True):
    """A request, by the row that it entered."""

    request_id: str
    row: int
    arrival: int  # order in which requests came
    epoch: int  # of the step with which it entered the row


class Landed(Struct, frozen=True):
    """What came back of a step, in the order of its rows."""

    token_ids: tuple[tuple[int, ...], ...]
    finish: tuple[FinishCode, ...]
    made: tuple[float | None, ...] = ()  # magnitudes of rows; (): the step made no vector, no score

    @classmethod
    def of(cls, outputs: StepOutputs) -> "Landed":
        made: tuple[float | None, ...] = ()
        if outputs.pooled is not None or outputs.prompt_logprobs:
            made = tuple(_magnitude(outputs, index) for index in range(len(outputs.finish)))
        return cls(outputs.token_ids, outputs.finish, made)

    @property
    def failed(self) -> tuple[int, ...]:
        """Rows whose logits, vector or scores are not finite."""
        made = self.made or (0.0,) * len(self.finish)
        return tuple(
            index
            for index, code in enumerate(self.finish)
            if code is FinishCode.NON_FINITE or made[index] is None
        )


def _magnitude(outputs: StepOutputs, index: int) -> float | None:
    """Of the numbers that a row is given, the sum: as another rounding has it, too.  None: they are
    not finite."""
    scores = [each.chosen for each in outputs.prompt_logprobs.get(index, ())]
    vector = b"" if outputs.pooled is None else outputs.pooled[index]
    numbers = np.concatenate([np.frombuffer(vector, np.float32), np.array(scores, np.float32)])
    found = float(np.abs(numbers).sum(dtype=np.float64))
    return found if math.isfinite(found) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The last steps of an engine, and what their rows were before the first."""

    written: str  # ISO 8601, UTC
    failure: Failure
    made: Made
    asked: tuple[Asked, ...]
    ended: tuple[int, ...]  # rows that the device had frozen before, but the first steps hold
    start: tuple[tuple[Delta, ...], ...]  # of every other row: how it is entered
    steps: tuple[Step, ...]  # oldest first
    landed: tuple[Landed, ...]  # of the first so many of them

    def name_of(self, row: int, epoch: int) -> str:
        """Of the request that is in a row during a step."""
        asked = [each for each in self.asked if each.row == row and each.epoch <= epoch]
        return max(asked, key=lambda each: each.epoch).request_id


_File: Any = msgspec.defstruct(
    "File",
    [
        ("format", int),
        ("written", str),
        ("failure", Failure),
        ("made", Made),
        ("asked", tuple[Asked, ...]),
        ("ended", tuple[int, ...]),
        ("start", tuple[tuple[_Delta, ...], ...]),
        ("steps", tuple[_Step, ...]),
        ("landed", tuple[Landed, ...]),
    ],
    frozen=True,
    kw_only=True,
)


class _Head(Struct, frozen=True):
    format: int


def encode_record(record: Record) -> bytes:
    """JSON."""
    found = _File(
        format=FORMAT,
        written=record.written,
        failure=record.failure,
        made=record.made,
        asked=record.asked,
        ended=record.ended,
        start=tuple(tuple(map(_FORMS.pack_delta, _wordless(deltas))) for deltas in record.start),
        steps=tuple(_FORMS.pack(_wordless_step(step)) for step in record.steps),
        landed=record.landed,
    )
    return msgspec.json.encode(found)


def _wordless_step(step: Step) -> Step:
    return replace(step, deltas=_wordless(step.deltas)) if step.deltas else step


def _wordless(deltas: tuple[Delta, ...]) -> tuple[Delta, ...]:
    """Without what requests ask for in words, which no device hears: a form is in the masks."""
    return tuple(
        replace(each, params=replace(each.params, stop=(), structured_outputs=None))
        if isinstance(each, JoinDelta)
        else each
        for each in deltas
    )


def read_record(path: Path) -> Record:
    """Raises ConfigError for a file that cannot be read, or is no record."""
    try:
        return decode_record(path.name, path.read_bytes())
    except OSError as error:
        raise _no_record(path.name, "a file that can be read", str(error)) from error


def decode_record(name: str, data: bytes) -> Record:
    """name: of its file.  Raises ConfigError for what is no record, or one of another format."""
    try:
        head = msgspec.json.decode(data, type=_Head)
        if head.format not in (_OLD, FORMAT):
            raise _no_record(name, f"of format {_OLD} or {FORMAT}", f"format {head.format}")
        if head.format == _OLD:
            data = _draftless(data)
        found = msgspec.json.decode(data, type=_File)
    except msgspec.DecodeError as error:
        raise _no_record(name, "what a black box wrote", str(error)) from error
    return Record(
        written=found.written,
        failure=found.failure,
        made=found.made,
        asked=found.asked,
        ended=found.ended,
        start=tuple(tuple(map(_FORMS.unpack_delta, deltas)) for deltas in found.start),
        steps=tuple(map(_FORMS.unpack, found.steps)),
        landed=found.landed,
    )


def _draftless(data: bytes) -> bytes:
    """Without what asks for drafts, which a replay compares with nothing."""
    found = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    steps = msgspec.json.decode(
        found.get("steps", msgspec.Raw(b"[]")), type=list[dict[str, msgspec.Raw]]
    )
    for step in steps:
        step.pop("tells_drafts", None)
    return msgspec.json.encode({**found, "steps": steps})


def _no_record(name: str, expected: str, got: str) -> ConfigError:
    return ConfigError.about(
        f"black box file {name!r}",
        expected=expected,
        got=got,
        remedy="give a file of --black-box-dir, to the version of paceline that wrote it",
    )
