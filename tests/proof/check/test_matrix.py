"""Which cells a selection has, and that a run outlives whatever a cell does to its process."""

import itertools
import multiprocessing
import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from fake_harness import HARNESS, case

from paceline.core.errors import ConfigError
from paceline.proof.check import workers
from paceline.proof.check.cell import RunnerKind, Status
from paceline.proof.check.filters import parse_filter
from paceline.proof.check.matrix import (
    MOST_LOST,
    Cell,
    Selection,
    absence,
    cells_of,
    execute,
    run_cells,
)
from paceline.proof.check.workers import LastResult, ProcessUsage, usage_of
from paceline.proof.suite.modes import ForwardMode

pytestmark = pytest.mark.usefixtures("warm_workers")
CASES = [
    case("short"),
    case("long", is_quick=False),
    case("short", mode=ForwardMode.TARGET_VERIFY),
    case("narrow", method="swa"),
]


def select(*, cases=CASES, backends=("torch",), **fields):
    return [cell.id for cell in cells_of(selection(backends=backends, **fields), cases)]


def selection(*, backends=("torch",), device_type="cpu", **fields):
    return Selection(device_type=device_type, backends=backends, **fields)


def run(*names, workers=1, limit_s=30.0, backends=("torch",)):
    """The results of one eager cell per case and backend, by backend and name."""
    cells = [
        Cell(case=case(name), backend=backend, runner=RunnerKind.EAGER)
        for backend in backends
        for name in names
    ]
    results = list(
        run_cells(cells, device_type="cpu", workers=workers, limit_s=limit_s, harness=HARNESS)
    )
    assert sorted(r.id for r in results) == sorted(cell.id for cell in cells)
    return {result.variant: result for result in results}


def test_cells_are_cases_times_backends_times_the_runners_of_the_device():
    assert select(backends=("a", "b"), methods=("swa",)) == [
        "swa/a/decode/eager/narrow",
        "swa/a/decode/recorded/narrow",
        "swa/b/decode/eager/narrow",
        "swa/b/decode/recorded/narrow",
    ]
    assert select(methods=("swa",), device_type="cuda") == [
        "swa/torch/decode/eager/narrow",
        "swa/torch/decode/cuda_graph/narrow",
    ]


def test_the_full_suite_holds_the_quick_one():
    quick, full = select(), select(is_full=True)
    assert set(full) - set(quick) == {f"dense/torch/decode/{r}/long" for r in ("eager", "recorded")}


def test_methods_modes_and_filter_all_apply():
    wanted = parse_filter("not recorded")
    assert select(modes=("decode", "target_verify"), methods=("dense",), wanted=wanted) == [
        "dense/torch/decode/eager/short",
        "dense/torch/target_verify/eager/short",
    ]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"methods": ("mla",)}, "--method must be one of dense, swa, got 'mla'"),
        ({"modes": ("verify",)}, "--mode must be one of decode, target_verify, got 'verify'"),
        (
            {"wanted": parse_filter("absent")},
            "the selection must be true for some of 6 cells, such as dense/torch/decode/eager/"
            "short, got none; change --filter",
        ),
    ],
)
def test_a_selection_of_nothing_is_refused(fields, text):
    with pytest.raises(ConfigError, match=text):
        cells_of(selection(**fields), CASES)


def test_every_outcome_of_a_cell_is_reported_and_the_run_goes_on():
    found = run("passes", "fails", "raises", "exits", "leaves", "refused", "emulated", workers=2)
    assert {name: result.status for name, result in found.items()} == {
        "passes": Status.PROVEN,
        "fails": Status.FAILING,
        "raises": Status.FAILING,
        "exits": Status.FAILING,
        "leaves": Status.FAILING,
        "refused": Status.REFUSED,
        "emulated": Status.EMULATED,
    }
    assert found["passes"].error == 0.25
    assert found["raises"].reason == "RuntimeError: the harness itself broke"
    assert found["exits"].reason == "its process ended: exit code 7"
    assert found["leaves"].reason == "SystemExit: 5"


def test_a_segmentation_fault_and_a_hang_lose_their_own_cells_only():
    found = run("segfaults", "hangs", "passes-1", "passes-2", limit_s=3.0)
    assert found["segfaults"].reason == "its process ended: killed by SIGSEGV"
    assert found["hangs"].status is Status.TIMED_OUT
    assert found["hangs"].reason == "did nothing for 3 s"
    assert found["passes-1"].status is found["passes-2"].status is Status.PROVEN


def test_a_cell_that_computes_for_ever_is_ended_by_its_cpu_time():
    found = run("spins", limit_s=1.0)
    assert found["spins"].status is Status.TIMED_OUT
    assert found["spins"].reason == "took more than 1 s of CPU time"


def test_a_cell_that_gets_no_core_is_not_idle(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(workers, "usage_of", lambda pid: ProcessUsage(1e-9 * next(clock), False))
    assert run("waits", limit_s=0.1)["waits"].status is Status.PROVEN


def test_a_cell_that_others_keep_from_its_cpu_time_gets_it(monkeypatch):
    clock = itertools.count()  # a hundredth of the limit more at each look
    monkeypatch.setattr(workers, "usage_of", lambda pid: ProcessUsage(0.002 * next(clock), True))
    assert run("waits", limit_s=0.1)["waits"].status is Status.PROVEN


def test_a_system_that_tells_no_cpu_time_goes_by_the_clock(monkeypatch):
    monkeypatch.setattr(workers, "usage_of", lambda pid: None)
    assert run("hangs", limit_s=0.2)["hangs"].reason == "took longer than 0.2 s"


def test_the_cpu_time_of_a_process_grows_with_its_work():
    before, used = usage_of(os.getpid()), time.process_time()
    while time.process_time() - used < 0.05:
        pass
    after = usage_of(os.getpid())
    assert after.seconds > before.seconds
    assert not after.is_asleep
    assert usage_of(None) is None


def test_a_backend_that_keeps_ending_its_process_is_left_out():
    names = [f"exits-{index}" for index in range(MOST_LOST + 2)]
    found = run(*names)
    assert [found[name].status for name in names] == [Status.FAILING] * MOST_LOST + [
        Status.NOT_RUN
    ] * 2
    assert found[names[-1]].reason == "3 cells of torch before it ended their process"


def test_one_backend_ending_its_process_does_not_leave_out_another():
    cells = [Cell(case=case("exits"), backend="a", runner=RunnerKind.EAGER)] * MOST_LOST
    cells += [Cell(case=case("passes"), backend="b", runner=RunnerKind.EAGER)]
    found = run_cells(cells, device_type="cpu", workers=1, limit_s=30.0, harness=HARNESS)
    assert [result.status for result in found if result.backend == "b"] == [Status.PROVEN]


def test_a_process_that_says_it_is_unfit_is_replaced():
    found = run("pid-1", "pid-2", "last", "pid-3")
    assert found["pid-1"].reason == found["pid-2"].reason == found["last"].reason
    assert found["pid-3"].status is Status.REFUSED
    assert found["pid-3"].reason != found["last"].reason


@pytest.mark.parametrize("is_sound", [True, False])
def test_a_process_whose_gpu_is_lost_is_unfit(monkeypatch, is_sound):
    def synchronize():
        if not is_sound:
            raise RuntimeError("an illegal memory access was encountered")

    cell = Cell(case=case("x"), backend="torch", runner=RunnerKind.EAGER)
    result = cell.result(Status.FAILING, "it wrote where it may not")
    monkeypatch.setattr("paceline.proof.rig.harness.run_cell", lambda *_: result)
    monkeypatch.setattr("torch.cuda.synchronize", synchronize)
    if is_sound:
        assert execute(cell, "cuda") is result
        return
    with pytest.raises(LastResult) as last:
        execute(cell, "cuda")
    assert last.value.value is result


def test_what_cells_print_does_not_reach_stdout(capfd, monkeypatch):
    monkeypatch.setattr(workers, "multiprocessing", multiprocessing)  # warm ones print elsewhere
    run("passes")
    out, err = capfd.readouterr()
    assert not out
    assert "what a worker prints is not part of the report" in err


def test_workers_are_told_to_interpret_triton_and_to_use_one_core_each():
    assert run("environment")["environment"].reason == "1 1"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "unheard-of",
            "got 'unheard-of' .ValueError: no such backend.; mend that, or check the spelling",
        ),
        ("ends-the-process", "got 'ends-the-process' .its process ended: exit code 3."),
    ],
)
def test_a_backend_without_a_class_is_refused_before_the_first_cell(name, text):
    with pytest.raises(
        ConfigError, match="--backend must be a backend that can be loaded, " + text
    ):
        run("passes", backends=("torch", name))


def test_what_nothing_here_can_run_says_why():
    cell = Cell(case=case("x"), backend="fa4+flashinfer", runner=RunnerKind.EAGER)
    assert absence(cell, "cpu") is None
    assert "fa4 needs the module flash_attn.cute, which is not installed" in absence(cell, "cuda")
    interpreted = Cell(case=case("x"), backend="triton", runner=RunnerKind.EAGER)
    assert absence(interpreted, "cuda") is None
    assert "too large for Triton's interpreter" in absence(interpreted, "cpu")
    assert absence(replace(interpreted, backend="torch+cascade(triton)"), "cpu")
    small = replace(interpreted, case=replace(interpreted.case, is_interpreted=True))
    assert absence(small, "cpu") is None


def test_choosing_cells_imports_no_torch():
    code = (
        "import sys\n"
        "from paceline.proof.check import matrix, run\n"
        "from paceline.proof.suite.cases import cases\n"
        "matrix.cells_of(matrix.Selection(device_type='cpu', backends=('torch',)), cases())\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_worker_stays_with_its_case_while_there_is_another():
    cells = [
        Cell(case=case(f"pid-{name}"), backend=backend, runner=RunnerKind.EAGER)
        for name in range(6)
        for backend in ("a", "b", "c")
    ]
    found = list(run_cells(cells, device_type="cpu", workers=2, limit_s=30.0, harness=HARNESS))
    by_case: dict[str, set[str | None]] = {}
    for result in found:
        by_case.setdefault(result.variant, set()).add(result.reason)
    assert len(found) == len(cells)
    # The last case may be shared with a worker that has none left.
    assert sum(len(workers) > 1 for workers in by_case.values()) <= 1
