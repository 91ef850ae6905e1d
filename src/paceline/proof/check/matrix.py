"""The matrix: which cells a selection has, and how they are run apart from this process.

cases x backends x runners -> Cell -> a worker process -> CellResult.  Imports torch nowhere: the
workers do, after their environment is set.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from paceline.attention.names import parse, singles
from paceline.core.errors import ConfigError
from paceline.core.plugins import can_find
from paceline.proof.check.cell import CellResult, RunnerKind, Status
from paceline.proof.check.filters import Filter
from paceline.proof.check.workers import LastResult, Lost, Task, Workers
from paceline.proof.suite.case import Case

RUNNERS = {
    "cpu": (RunnerKind.EAGER, RunnerKind.RECORDED),
    "cuda": (RunnerKind.EAGER, RunnerKind.CUDA_GRAPH),
}
_VENDORS = (
    *("flashinfer", "fa4", "fa3", "flashinfer_mla", "flashmla"),
    *("trtllm_mla", "cutedsl_mla", "tokenspeed_mla", "cutlass_mla", "trtllm_mha"),
)
BACKENDS = {
    "cpu": ("triton", "triton+flashinfer", "torch", *_VENDORS, "flex"),
    "cuda": ("triton", "triton+flashinfer", *_VENDORS, "flex"),
}
LIBRARIES = {  # modules, of which one must be there
    "flashinfer": ("flashinfer",),
    "fa4": ("flash_attn.cute",),
    "fa3": (
        "flash_attn_interface",
        "flash_attn_3.flash_attn_interface",
        "sgl_kernel.flash_attn",
    ),
    "flashinfer_mla": ("flashinfer",),
    "flashmla": ("sgl_kernel.flash_mla",),
    "trtllm_mla": ("flashinfer.mla",),
    "cutedsl_mla": ("flashinfer.mla",),
    "tokenspeed_mla": ("tokenspeed_mla",),
    "cutlass_mla": ("sgl_kernel",),
    "trtllm_mha": ("flashinfer.decode",),
}
QUICK_LIMIT_S = 60.0  # of CPU time, of a cell of the quick suite on a CPU
LIMIT_S = 300.0  # of any other: long contexts, and on a GPU what is compiled first
MOST_LOST = 3  # processes a backend may end before the rest of its cells are left out


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One case on one backend with one runner, before it is run."""

    case: Case
    backend: str
    runner: RunnerKind

    @property
    def id(self) -> str:
        """As CellResult.id."""
        return self.result(Status.NOT_RUN).id

    def result(self, status: Status, reason: str | None = None) -> CellResult:
        """What is known of the cell without a comparison."""
        return CellResult(
            method=self.case.method,
            backend=self.backend,
            mode=self.case.mode.value,
            runner=self.runner.value,
            variant=self.case.name,
            status=status,
            reason=reason,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which cells are wanted."""

    device_type: str  # "cpu" or "cuda"
    backends: tuple[str, ...]
    state_backends: tuple[str, ...] = ()  # of cases whose layers keep states
    methods: tuple[str, ...] = ()  # empty: all
    modes: tuple[str, ...] = ()  # empty: all
    wanted: Filter | None = None
    names: frozenset[str] | None = None  # ids, of cases that are not quick too
    is_full: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Harness:
    """What a worker calls; functions of modules, because they are sent by their names."""

    prepare: Callable[[], None]
    resolve: Callable[[str, str], None]  # backend, device type; raises what is wrong with the name
    resolve_states: Callable[[str, str], None]  # the same of a state backend
    execute: Callable[[Cell, str], CellResult]  # cell, device type


def cells_of(selection: Selection, cases: Iterable[Case]) -> list[Cell]:
    """Case after case.  Raises ConfigError when a part of the selection selects nothing."""
    listed = list(cases)
    _require_known("--method", selection.methods, {case.method for case in listed})
    _require_known("--mode", selection.modes, {case.mode.value for case in listed})
    cells = [
        Cell(case=case, backend=backend, runner=runner)
        for case in listed
        for backend in _contenders(selection, case)
        for runner in RUNNERS[selection.device_type]
        if (selection.is_full or selection.names is not None or case.is_quick)
        and case.method in (selection.methods or (case.method,))
        and case.mode.value in (selection.modes or (case.mode.value,))
    ]
    if selection.names is not None:
        cells = _named(cells, selection.names)
    chosen = [cell for cell in cells if selection.wanted is None or selection.wanted(cell.id)]
    if not chosen:
        example = f", such as {cells[0].id}" if cells else ""
        raise ConfigError.about(
            "the selection",
            expected=f"true for some of {len(cells)} cells{example}",
            got="none",
            remedy="change --filter, --method or --mode, or use --full",
        )
    return chosen


def _contenders(selection: Selection, case: Case) -> tuple[str, ...]:
    return selection.backends if case.state_every is None else selection.state_backends


def run_cells(
    cells: Sequence[Cell],
    *,
    device_type: str,
    workers: int,
    limit_s: float,
    harness: Harness,
) -> Iterator[CellResult]:
    """The result of every cell as it comes.

    limit_s: CPU time of one cell.

    Raises ConfigError before the first cell when a backend's name cannot be
    resolved; whatever a backend does later is a failing cell.
    """
    pool: Workers[int, CellResult | None] = Workers(
        workers,
        limit_s=limit_s,
        prepare=harness.prepare,
        environment=_environment(device_type),
    )
    with pool:
        _require_resolved(pool, cells, device_type, harness)
        queue = _Queue(cells)

        def take(last: int | None) -> Task[int, CellResult | None] | None:
            index = queue.take(last)
            return (
                None if index is None else Task(index, harness.execute, (cells[index], device_type))
            )

        for index, outcome in pool.run_queue(take):
            cell = cells[index]
            if isinstance(outcome, Lost):
                queue.lost[cell.backend] += outcome.with_process
                status = Status.TIMED_OUT if outcome.is_late else Status.FAILING
                yield cell.result(status, outcome.reason)
            elif outcome is not None:
                yield outcome
        yield from queue.left_out


class _Queue:
    """Hands out cells case by case: whoever made a case ready runs its other cells too.

    lost: processes that each backend ended; one that ended too many is left out.
    """

    def __init__(self, cells: Sequence[Cell]) -> None:
        self._cells = cells
        self._waiting: dict[Case, deque[int]] = {}
        for index, cell in enumerate(cells):
            self._waiting.setdefault(cell.case, deque()).append(index)
        self._fresh = deque(self._waiting)  # cases that nobody has begun, or that are done
        self.lost: Counter[str] = Counter()
        self.left_out: list[CellResult] = []

    def take(self, last: int | None) -> int | None:
        """The next cell for a worker whose last one this was; None when all are taken."""
        case = None if last is None else self._cells[last].case
        while self._waiting:
            while case not in self._waiting:
                case = self._fresh.popleft() if self._fresh else next(iter(self._waiting))
            mine = self._waiting[case]
            index = mine.popleft()
            if not mine:
                del self._waiting[case]
            cell = self._cells[index]
            if self.lost[cell.backend] < MOST_LOST:
                return index
            reason = f"{MOST_LOST} cells of {cell.backend} before it ended their process"
            self.left_out.append(cell.result(Status.NOT_RUN, reason))
        return None


def prepare() -> None:
    """The slow imports of a worker."""
    import paceline.proof.rig.harness  # noqa: F401


def resolve(backend: str, device_type: str) -> None:
    """Raises what keeps `backend` from being a contender."""
    from paceline.proof.rig.contenders import contender

    contender(backend, device_type)


def resolve_states(backend: str, device_type: str) -> None:
    """The same of a state backend."""
    from paceline.proof.rig.contenders import state_contender

    state_contender(backend)


def absence(cell: Cell, device_type: str) -> str | None:
    """Why nothing here can run the cell, whatever its backend would say; None when it can be run.

    On a GPU a vendor's library has no stand-in; on a CPU Triton's interpreter takes hours for
    what is not made for it.
    """
    if cell.case.state_every is not None:
        return None
    for name in singles(parse(cell.backend)):
        modules = LIBRARIES.get(name, ())
        if device_type == "cuda" and modules and not any(map(can_find, modules)):
            return f"{name} needs the module {' or '.join(modules)}, which is not installed"
        if device_type == "cpu" and name == "triton" and not cell.case.is_interpreted:
            return "too large for Triton's interpreter; run it on a GPU"
    return None


def execute(cell: Cell, device_type: str) -> CellResult:
    """Run one cell in this process, or say why it is not run."""
    absent = absence(cell, device_type)
    if absent is not None:
        return cell.result(Status.NOT_RUN, absent)
    import torch

    from paceline.proof.rig.contenders import contender, state_contender
    from paceline.proof.rig.harness import run_cell

    is_of_states = cell.case.state_every is not None
    name = cell.backend
    if is_of_states:
        found = state_contender(name, cell.case.method)
    else:
        found = contender(name, device_type)
    result = run_cell(cell.case, found, cell.runner, torch.device(device_type))
    if result.status is Status.FAILING and device_type == "cuda":
        _require_sound_device(result)
    return result


HARNESS = Harness(prepare=prepare, resolve=resolve, resolve_states=resolve_states, execute=execute)


def _require_sound_device(result: CellResult) -> None:
    """An illegal access makes every later call of its process fail: such a process ends here."""
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise LastResult(result) from error


def _environment(device_type: str) -> dict[str, str]:
    """What is read while a worker imports its libraries.

    The oracle's tensors are small: a second thread gains nothing, and threads of several workers
    that wait for one another's cores take a hundred times as long.
    """
    if device_type == "cpu":
        return {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    return {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}


def _require_resolved(
    pool: Workers[int, CellResult | None],
    cells: Sequence[Cell],
    device_type: str,
    harness: Harness,
) -> None:
    pairs = ((cell.case.state_every is not None, cell.backend) for cell in cells)
    names = list(dict.fromkeys(pairs))
    jobs = [
        Task(index, harness.resolve_states if of_states else harness.resolve, (name, device_type))
        for index, (of_states, name) in enumerate(names)
    ]
    for index, outcome in pool.run(jobs):  # type: ignore[arg-type]
        if isinstance(outcome, Lost):
            of_states, name = names[index]
            raise ConfigError.about(
                "--state-backend" if of_states else "--backend",
                expected="a backend that can be loaded",
                got=f"{name!r} ({outcome.reason})",
                remedy="mend that, or check the spelling and PYTHONPATH",
            )


def _named(cells: Sequence[Cell], names: frozenset[str]) -> list[Cell]:
    """Raises ConfigError for a name that no cell has."""
    unknown = sorted(names - {cell.id for cell in cells})
    if unknown:
        raise ConfigError.about(
            "--cells",
            expected="names of cells of this device's backends, methods and modes",
            got=f"{len(unknown)} others, such as {unknown[0]!r}",
            remedy="take them out, or name their backend with --backend",
        )
    return [cell for cell in cells if cell.id in names]


def _require_known(flag: str, asked: tuple[str, ...], known: set[str]) -> None:
    for name in asked:
        if name not in known:
            raise ConfigError.about(
                flag,
                expected=f"one of {', '.join(sorted(known))}",
                got=repr(name),
                remedy="name one of these",
            )
