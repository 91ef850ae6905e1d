"""Measurements of attention backends: the package's table, and who was fastest.  No torch.

`paceline bench attention --backends ... --save FILE` writes the table; `registry.choose` reads it.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Literal

from paceline.core.errors import ConfigError
from paceline.core.gpus import published_row
from paceline.core.model.lookback import Chunk

Phase = Literal["prefill", "decode"]
Measured = Phase | Literal["expanded"]  # of latents, where keys and values are
OTHER_DTYPE = 8.0  # distance of another dtype: as far as a factor of 256 in a size


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """What of a model decides how fast its attention is."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int  # tokens
    dtype: str  # of queries
    kv_dtype: str  # of the cache, "float8_e4m3fn" too
    chunk: int | None = None  # tokens: each sees its own chunk alone; None: all before it

    def distance(self, other: "LayerShape") -> float:
        """Factors of two between the sizes, heads counted per KV head, and of KV heads.  Infinite
        between layers with chunks and without: a library may run them in other ways."""
        if (self.chunk is None) != (other.chunk is None):
            return math.inf
        pairs = (
            (self.chunk or 1, other.chunk or 1),
            (self.head_dim, other.head_dim),
            (self.num_heads / self.num_kv_heads, other.num_heads / other.num_kv_heads),
            (self.num_kv_heads, other.num_kv_heads),
            (self.page_size, other.page_size),
        )
        different = (self.dtype != other.dtype) + (self.kv_dtype != other.kv_dtype)
        return sum(abs(math.log2(a / b)) for a, b in pairs) + OTHER_DTYPE * different

    def __str__(self) -> str:
        kv = "" if self.kv_dtype == self.dtype else f" over {self.kv_dtype}"
        heads = f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_dim}"
        chunk = "" if self.chunk is None else f", {Chunk(self.chunk)}"
        return f"{heads}, page {self.page_size}, {self.dtype}{kv}{chunk}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One backend on one shape; a row of the table."""

    gpu: str  # as its driver names it
    phase: Measured
    batch_size: int  # requests
    kv_len: int  # keys of each, new ones included
    extend_len: int  # new tokens of each
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int  # tokens
    dtype: str
    kv_dtype: str
    backend: str
    us: float  # median microseconds of one layer
    error: float  # in the unit of the benchmark, which refuses wrong answers
    date: str  # YYYY-MM-DD
    versions: Mapping[str, str | None]  # of what the time depends on
    chunk: int | None = None  # as of LayerShape; rows of tables before it was have none

    @property
    def layer(self) -> LayerShape:
        return LayerShape(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=self.page_size,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            chunk=self.chunk,
        )

    @property
    def load(self) -> tuple[int, int, int]:
        """What the step held: equal loads of equal layers are compared."""
        return self.batch_size, self.kv_len, self.extend_len

    @property
    def key(self) -> tuple[str | int, ...]:
        """Rows of one key replace one another."""
        shape = (self.num_heads, self.num_kv_heads, self.head_dim, self.page_size, self.chunk or 0)
        dtypes = (self.dtype, self.kv_dtype)
        return board(self.gpu), self.phase, *dtypes, *shape, *self.load, self.backend


Table = Sequence[Measurement]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Candidates by measured time, the fastest first, and those without a measurement."""

    us: Mapping[str, float]  # name -> geometric mean over the loads all of them have
    unmeasured: tuple[str, ...]
    layer: LayerShape | None  # that was measured; None: nothing was


def fastest(
    gpu: str, phase: Measured, layer: LayerShape, candidates: Sequence[str], *, table: Table
) -> Ranking:
    """Rank `candidates`, the preferred one first, by the rows of the measured layer nearest to
    `layer` on this GPU, over the loads they share.

    Who shares none is unmeasured, and so are all where the preferred one has no row of a layer
    that can be compared.
    """
    rows = [row for row in table if board(row.gpu) == board(gpu) and row.phase == phase]
    known = [row.layer for row in rows if row.backend == candidates[0]]
    known = [each for each in known if layer.distance(each) < math.inf]
    if not known:
        return Ranking(us={}, unmeasured=tuple(candidates), layer=None)
    nearest = min(known, key=layer.distance)
    times: dict[str, dict[tuple[int, int, int], float]] = {name: {} for name in candidates}
    for row in rows:
        if row.layer == nearest and row.backend in times:
            times[row.backend][row.load] = row.us
    shared = set(times[candidates[0]])
    measured = []
    for name in candidates:
        if shared & times[name].keys():
            shared &= times[name].keys()
            measured.append(name)
    means = {name: _geometric_mean(times[name][load] for load in shared) for name in measured}
    return Ranking(
        us=dict(sorted(means.items(), key=lambda item: item[1])),
        unmeasured=tuple(name for name in candidates if name not in means),
        layer=nearest,
    )


def board(gpu: str) -> str:
    """One name for the forms in which drivers name a board."""
    row = published_row(gpu)
    return gpu if row is None else row.name


def package_table() -> tuple[Measurement, ...]:
    """The table that comes with the package."""
    resource = files("paceline.attention") / "measurements.json"
    return parse_table(resource.read_text(encoding="utf-8"), source="the package's measurements")


def parse_table(text: str | bytes, *, source: str) -> tuple[Measurement, ...]:
    """The rows of a table file.  Raises ConfigError, naming `source`, for anything else."""
    wanted = {field.name for field in fields(Measurement)}
    required = {field.name for field in fields(Measurement) if field.default is MISSING}
    try:
        rows = json.loads(text if isinstance(text, str) else text.decode())
    except UnicodeDecodeError as error:
        raise _no_table(source, f"text that is not UTF-8 ({error})") from error
    except json.JSONDecodeError as error:
        raise _no_table(source, f"text that is not JSON ({error})") from error
    if not isinstance(rows, list):
        raise _no_table(source, f"a JSON {type(rows).__name__}")
    for row in rows:
        if not isinstance(row, dict) or not required <= row.keys() <= wanted:
            names = sorted(row) if isinstance(row, dict) else row
            raise _no_table(source, f"a row of {names}")
        for name, value in row.items():
            if not _fits(name, value):
                raise _no_table(source, f"a row with {name} {value!r}")
    return tuple(Measurement(**row) for row in rows)


def merged(old: Iterable[Measurement], new: Iterable[Measurement]) -> tuple[Measurement, ...]:
    """Both, where a row of `new` replaces that of `old` with its key; in order."""
    rows = {row.key: row for row in [*old, *new]}
    return tuple(rows[key] for key in sorted(rows))


def write_table(path: Path, table: Iterable[Measurement]) -> None:
    """One row a line.  Replaces the file at once."""
    lines = ",\n".join(json.dumps(asdict(row)) for row in table)
    draft = beside(path)
    draft.write_text(f"[\n{lines}\n]\n" if lines else "[]\n", encoding="utf-8")
    draft.replace(path)


def beside(path: Path) -> Path:
    """Where a table is written before it replaces the file."""
    return path.with_name(path.name + ".new")


def _fits(name: str, value: object) -> bool:
    """Whether a field of a row may hold `value`: of its numbers only an error may be 0."""
    kind = Measurement.__dataclass_fields__[name].type
    if value is None:
        return Measurement.__dataclass_fields__[name].default is None
    if kind is int or kind == int | None:
        return type(value) is int and value > 0
    if kind is float:
        least = 0.0 if name == "error" else math.ulp(0.0)
        return isinstance(value, int | float) and least <= value < math.inf
    return isinstance(value, dict if name == "versions" else str)


def _geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def _no_table(source: str, got: str) -> ConfigError:
    return ConfigError.about(
        f"table of measurements in {source}",
        expected="a JSON list of rows as `paceline bench attention --save` writes them",
        got=got,
        remedy="name a new file, or one that it wrote",
    )
