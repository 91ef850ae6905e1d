"""Classes that a third party brings: a fault is a failing cell that names it; the run ends."""

import io
import json
import re
from pathlib import Path

import pytest
import torch

from paceline.core.errors import ConfigError
from paceline.proof.check.cell import RunnerKind, Status
from paceline.proof.check.flags import FLAGS
from paceline.proof.check.run import run_check
from paceline.proof.rig.contenders import contender
from paceline.proof.rig.harness import run_cell
from paceline.proof.suite.cases import cases

CASES = {f"{case.method}/{case.mode.value}/{case.name}": case for case in cases()}
DECODE = "dense/decode/tiny-page16"
VERIFY = "dense/target_verify/tiny-topk4"
FROZEN = "dense/draft_decode/tiny-frozen-kv"


def run(name, case=DECODE, runner=RunnerKind.RECORDED):
    return run_cell(CASES[case], contender(name, "cpu"), runner, torch.device("cpu"))


@pytest.mark.parametrize("case", [DECODE, VERIFY, FROZEN])
@pytest.mark.parametrize("runner", [RunnerKind.EAGER, RunnerKind.RECORDED], ids=lambda r: r.value)
def test_a_class_without_a_fault_is_proven(case, runner):
    result = run("rogue_backends:Faultless", case, runner)
    assert result.status is Status.PROVEN, result.reason


FAULTS = [
    ("WrongShape", DECODE, r"out of forward must be .*\[3, 4, 64\], got .*\[4, 3, 64\]"),
    ("FewerRows", DECODE, r"out of forward must be .*, got .*\[2, 4, 64\]"),
    ("WrongDtype", DECODE, "got torch.float64"),
    ("ReturnsNothing", DECODE, "NoneType"),
    ("ScribblesOnThePool", DECODE, r"V of layer 0: slots \[\d+\] do not hold what the step was"),
    ("ScribblesOnTheStep", DECODE, "kv_lens must be .*, got"),
    ("ScribblesOnThePageTable", DECODE, "page table row 1 of group 0 must be .*, got"),
    ("PlansOnce", DECODE, r"error .* is allowed, at|got moved: backend.first.torch.Size\("),
    ("Zeros", DECODE, "error .* is allowed, at"),
    ("Raises", DECODE, "raised MemoryError: no room for a workspace"),
]


@pytest.mark.parametrize("runner", [RunnerKind.EAGER, RunnerKind.RECORDED], ids=lambda r: r.value)
@pytest.mark.parametrize(("name", "case", "text"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_a_fault_is_a_failing_cell_that_says_so(name, case, text, runner):
    result = run(f"rogue_backends:{name}", case, runner)
    assert result.status is Status.FAILING
    assert re.search(text, result.reason), result.reason


def test_a_host_read_fails_in_a_graph_and_is_named():
    assert run("rogue_backends:ReadsOnTheHost", runner=RunnerKind.EAGER).status is Status.PROVEN
    result = run("rogue_backends:ReadsOnTheHost")
    assert result.status is Status.FAILING
    assert result.reason.startswith("raised HostReadError: ")


def check(*names, path, limit_s):
    """The exit code of a run of one cell on each of these classes, and its cells by class."""
    values = {flag.name: False if flag.kind is bool else flag.default for flag in FLAGS}
    values |= {
        "device": "cpu",
        "workers": 1,
        "backend": [f"rogue_backends:{name}" for name in names],
        "filter": f"dense/*/eager/{DECODE.rpartition('/')[2]}",
        "json": str(path),
    }
    code = run_check(values, limit_s=limit_s, out=io.StringIO(), err=io.StringIO())
    cells = json.loads(path.read_text())["cells"]
    return code, {cell["backend"].partition(":")[2]: cell for cell in cells}


@pytest.mark.usefixtures("warm_workers")
def test_a_run_outlives_classes_that_end_their_process(tmp_path):
    names = ["Exits", "Leaves", "Faultless", "Hangs"]
    code, found = check(*names, path=tmp_path / "out.json", limit_s=3.0)
    assert code == 1
    assert found["Exits"]["reason"] == "its process ended: exit code 9"
    assert found["Leaves"]["reason"] == "SystemExit: 4"
    assert found["Hangs"]["status"] == "timed_out"
    assert found["Hangs"]["reason"] == "did nothing for 3 s"
    assert found["Faultless"]["status"] == "proven", found["Faultless"]


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("ForgetsName", "no name of type str"),
        ("ForgetsCapabilities", "no capabilities of type Capabilities"),
        ("ForgetsPlan", "no plan"),
        ("ForgetsHostPlan", "no host_plan, which its capabilities declare"),
        ("ForgetsDefaults", "no default for its constructor's depth"),
        (
            "ForgetsAll",
            "no name of type str, no capabilities of type Capabilities, no forward, "
            "no make_buffers, no plan",
        ),
    ],
)
def test_an_incomplete_class_is_refused(name, missing):
    with pytest.raises(ConfigError) as caught:
        contender(f"rogue_backends:{name}", "cpu")
    assert f"backend rogue_backends:{name} must be complete, got {missing}; define" in str(
        caught.value
    )


@pytest.mark.parametrize("runner", [RunnerKind.EAGER, RunnerKind.RECORDED], ids=lambda r: r.value)
def test_the_example_of_the_documentation_passes_its_cells(monkeypatch, runner):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "attention"))
    chosen = [case for case in CASES.values() if case.is_interpreted]
    who = contender("example_backend:DenseBackend", "cpu")
    results = [run_cell(case, who, runner, torch.device("cpu")) for case in chosen]
    assert not [result for result in results if result.status is Status.FAILING]
    proven = {result.mode for result in results if result.status is Status.PROVEN}
    assert {"extend", "decode", "draft_extend"} <= proven
    assert all(result.reason for result in results if result.status is Status.REFUSED)
