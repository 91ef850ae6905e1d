"""Our attention backends against each other: the measurements by which auto chooses.

    python -m paceline bench attention --backends triton,fa4 --shapes suite --save FILE

Each backend first meets the definition, then those that did are timed in turns.  One that cannot
run a shape, or answers wrongly, has a note with the reasons and no row.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from paceline.attention.measurements import (
    Measurement,
    Table,
    beside,
    merged,
    parse_table,
    write_table,
)
from paceline.attention.registry import choose, load_backend
from paceline.bench.attention_contenders import (
    attention_config,
    num_layers,
    our_make,
    require_memory,
    wants_finite,
    worst_errors,
)
from paceline.bench.attention_shape import AttentionShape, attention_shape, suite
from paceline.bench.attention_workload import make_workload
from paceline.bench.interleaved import Timing, time_interleaved
from paceline.bench.page import Bars
from paceline.core.errors import BackendUnsupported, ConfigError
from paceline.core.gpus import DeviceFacts
from paceline.core.progress import collect, cut_mark
from paceline.plan.machine import installed, versions

# What a time depends on.
TIMED_VERSIONS = ("torch", "triton", "flashinfer-python", "flash-attn-4", "sglang-kernel")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be timed, and where it goes."""

    backends: tuple[str, ...]
    shapes: tuple[AttentionShape, ...]
    save: Path | None
    known: Table = ()  # the rows of `save` before


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Why a backend has no row for a shape."""

    shape: AttentionShape
    backend: str
    reasons: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendsReport:
    """What was found."""

    facts: DeviceFacts
    saved: Path | None  # the table that has the rows, too
    rows: tuple[Measurement, ...]
    notes: tuple[Note, ...]
    is_cut: bool  # by Ctrl-C

    def to_json(self) -> dict[str, object]:
        """The document."""
        return {
            "benchmark": "attention backends",
            "device": {"name": self.facts.name, "type": self.facts.device_type},
            "versions": versions(),
            "saved": None if self.saved is None else str(self.saved),
            "rows": [asdict(row) for row in self.rows],
            "notes": [asdict(note) for note in self.notes],
            **cut_mark(self.is_cut),
        }

    def table(self) -> str:
        """For people."""
        rows = [f"on {self.facts.name}"]
        rows.append(
            f"{'':<9}{'batch':>6}{'keys':>7}{'new':>6}  {'backend':<20}{'us':>10}{'error':>8}"
        )
        for row in self.rows:
            load = f"{row.batch_size:>6}{row.kv_len:>7}{row.extend_len:>6}"
            rows.append(f"{row.phase:<9}{load}  {row.backend:<20}{row.us:>10.1f}{row.error:>8.2f}")
        for note in self.notes:
            shape = note.shape
            load = f"{shape.batch_size} x {shape.kv_len} keys, {shape.extend_len} new"
            rows.append(f"not {note.backend} for {load}: {'; '.join(note.reasons)}")
        if self.saved is not None:
            rows.append(f"merged into {self.saved}")
        return "\n".join(rows)

    def drawings(self) -> list[Bars]:
        """Of each shape."""
        shapes: dict[str, list[tuple[str, float]]] = {}
        for row in self.rows:
            load = f"{row.batch_size} requests of {row.kv_len} keys, {row.extend_len} new"
            shapes.setdefault(f"{row.phase}: {load} [µs]", []).append((row.backend, row.us))
        return [Bars(title=shape, rows=found) for shape, found in shapes.items()]


def plan_of(values: Mapping[str, Any]) -> Plan | None:
    """The plan of the values of the flags; None when they ask for no comparison.

    Raises ConfigError for flags that contradict each other, unknown backends, and a table that
    cannot be read or written.
    """
    if values["backends"] is None:
        for name, idle in (("shapes", "one"), ("save", None)):
            if values[name] != idle:
                raise _contradiction(f"--{name}", "left out without --backends", values[name])
        return None
    for name in ("backend", "peer"):
        if values[name] not in ("auto", "none"):
            raise _contradiction(f"--{name}", "left out beside --backends", values[name])
    names = tuple(dict.fromkeys(name.strip() for name in values["backends"].split(",")))
    for name in names:
        load_backend(name)
    shape = attention_shape(values)
    path = None if values["save"] is None else Path(values["save"])
    return Plan(
        backends=names,
        shapes=suite(shape) if values["shapes"] == "suite" else (shape,),
        save=path,
        known=() if path is None else _known(path),
    )


def bench_backends(plan: Plan, facts: DeviceFacts) -> BackendsReport:
    """Check and time every shape; merges the rows into `plan.save`."""
    rows: list[Measurement] = []
    notes: list[Note] = []

    def measure(shape: AttentionShape) -> None:
        errors = _checked(plan.backends, shape, facts, notes)
        timings = _timed(list(errors), shape, facts, notes)
        rows.extend(
            _row(name, timing, errors[name], shape=shape, gpu=facts.name)
            for name, timing in timings.items()
        )
        if plan.save is not None:  # after every shape: a library may end the process
            write_table(plan.save, merged(plan.known, rows))

    _, is_cut = collect("shapes", map(measure, plan.shapes), total=len(plan.shapes), unit="shape")
    return BackendsReport(
        facts=facts, saved=plan.save, rows=tuple(rows), notes=tuple(notes), is_cut=is_cut
    )


def _checked(
    backends: Sequence[str], shape: AttentionShape, facts: DeviceFacts, notes: list[Note]
) -> dict[str, float]:
    """The error of each backend that runs the shape rightly; the others get a note."""
    errors = {}
    for name in backends:
        error, reasons = _attempt(partial(_error_of, name, shape, facts))
        if error is None:
            notes.append(Note(shape=shape, backend=name, reasons=reasons))
        else:
            errors[name] = error
    return errors


def _error_of(name: str, shape: AttentionShape, facts: DeviceFacts) -> float:
    require_memory(shape, num_layers(shape, facts), facts)
    wanted = attention_config(shape, device_type=facts.device_type, cuda_arch=facts.cuda_arch)
    choose(wanted, name)
    here = torch.device(facts.device_type)
    return worst_errors({name: our_make(name)}, shape, here, finite=wants_finite(name))[name]


def _timed(
    names: Sequence[str], shape: AttentionShape, facts: DeviceFacts, notes: list[Note]
) -> dict[str, Timing]:
    """The time of each, in turns; those that cannot be prepared or captured get a note.

    Where one of them cannot be captured, each of the others is timed alone.
    """
    if not names:
        return {}
    here, layers = torch.device(facts.device_type), num_layers(shape, facts)
    lens = [shape.kv_len] * shape.batch_size
    finite = any(map(wants_finite, names))
    work = make_workload(shape, lens, layers=layers, device=here, seed=1, finite=finite)
    runs = {}
    for name in names:
        run, reasons = _attempt(partial(our_make(name), work))
        if run is None:
            notes.append(Note(shape=shape, backend=name, reasons=reasons))
        else:
            runs[name] = run
    if not runs:
        return {}
    timings, reasons = _attempt(partial(time_interleaved, runs, layers=layers, device=here))
    if timings is not None:
        return timings
    if len(runs) > 1:
        alone = (_timed([name], shape, facts, notes) for name in runs)
        return {name: timing for found in alone for name, timing in found.items()}
    notes.append(Note(shape=shape, backend=", ".join(runs), reasons=reasons))
    return {}


def _attempt(run: Callable[[], ResultT]) -> tuple[ResultT | None, list[str]]:
    """(result, no reasons), or (None, why not)."""
    try:
        return run(), []
    except BackendUnsupported as error:
        return None, error.reasons
    except Exception as error:  # noqa: BLE001  a library may raise anything; the others go on
        return None, [f"{type(error).__name__}: {error}"]


def _row(
    name: str, timing: Timing, error: float, *, shape: AttentionShape, gpu: str
) -> Measurement:
    return Measurement(
        gpu=gpu,
        phase=shape.phase,
        batch_size=shape.batch_size,
        kv_len=shape.kv_len,
        extend_len=shape.extend_len,
        **asdict(shape.layer),
        backend=name,
        us=round(1e6 * timing.median_s, 3),
        error=round(error, 4),
        date=datetime.now(UTC).date().isoformat(),
        versions=installed(TIMED_VERSIONS),
    )


def _known(path: Path) -> Table:
    """The rows of a table file, none where there is no file.  Raises ConfigError.

    Leaves a file as it is, and none where there is none.
    """
    try:
        for each in (beside(path), path):
            existed = each.exists()
            each.open("a").close()
            text = each.read_bytes()
            if not existed:
                each.unlink()
    except OSError as error:
        raise ConfigError.about(
            "--save",
            expected="a file that can be written",
            got=f"{str(path)!r} ({error.strerror})",
            remedy="name a file in a folder that exists and that you may write to",
        ) from error
    return parse_table(text, source=str(path)) if text else ()


def _contradiction(flag: str, expected: str, got: object) -> ConfigError:
    return ConfigError.about(
        flag, expected=expected, got=got, remedy="drop it, or change --backends"
    )
