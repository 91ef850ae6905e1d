"""The harness: runs one cell through the real runner and compares it with the oracle.

Every batch of a case goes the way of a request in the engine: it joins rows of the request table,
its pages are written there, its step is filled, derived, planned, run (eagerly, or as the replay of
one graph for all batches) and committed.  What was not to be read is poisoned before; what was not
to be written is compared after.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from paceline.attention.contract import AttentionBackend
from paceline.attention.states import StateBackend
from paceline.proof.check.cell import CellResult, RunnerKind, Status
from paceline.proof.rig.contenders import Contender, for_case, is_emulated, refusals
from paceline.proof.rig.prepared import (
    PreparedCase,
    PreparedStates,
    prepare_case,
    prepare_states,
)
from paceline.proof.rig.rig import Rig
from paceline.proof.rig.state_rig import StateRig
from paceline.proof.suite.case import Case

_LONGEST_REASON = 2000  # characters


@dataclass(frozen=True, slots=True)
class Finding:
    """What a case came to: the worst answer, or the first fault."""

    error: float
    tolerance: float
    fault: str | None
    digest: str | None = None  # of every batch; None while not all have run


def run_cell(case: Case, who: Contender, runner: RunnerKind, device: torch.device) -> CellResult:
    """Run one cell.  A fault of the backend makes it failing; nothing is raised for one."""
    began = time.process_time()
    told = partial(_result, case, who, runner, began)
    ran_as = None  # not known of a class that cannot say what it can
    try:
        ran_as = _composition(case, who)
        reasons = refusals(case, who, runner, device)
        if reasons:
            return told(Status.REFUSED, "; ".join(reasons), ran_as=ran_as)
        finding = examine(prepare(case), who, runner, device)
    except Exception as error:  # noqa: BLE001  a backend may raise anything; the run goes on
        reason = f"raised {type(error).__name__}: {error}"
        return told(Status.FAILING, reason, ran_as=ran_as)
    passed = Status.EMULATED if is_emulated(case, who, device.type) else Status.PROVEN
    status = passed if finding.fault is None else Status.FAILING
    return told(status, finding.fault, ran_as=ran_as, finding=finding)


def prepare(case: Case) -> PreparedCase | PreparedStates:
    """The numbers and the right answers of a case, by what its layers do."""
    return prepare_case(case) if case.state_every is None else prepare_states(case)


def examine(
    prepared: PreparedCase | PreparedStates,
    who: Contender,
    runner: RunnerKind,
    device: torch.device,
) -> Finding:
    """Launch every batch and judge every layer; stops at the first fault."""
    worst = Finding(0.0, 1.0, None)
    if prepared.blind:
        return replace(worst, fault=f"the comparison would accept {', '.join(prepared.blind)}")
    case, backend = prepared.case, for_case(who, prepared.case)
    rig: Rig | StateRig
    if isinstance(prepared, PreparedStates):
        assert isinstance(backend, StateBackend), "others are refused"
        rig = StateRig(prepared, backend, runner, device)
    else:
        assert isinstance(backend, AttentionBackend), "others are refused"
        rig = Rig(prepared, backend, runner, device)
    for index, repeat in _launches(case, runner):
        faults = rig.launch(index)
        found = Finding(*rig.judge(index))
        faults += [] if found.fault is None else [found.fault]
        if faults:
            again = " again" if repeat else ""
            return replace(found, fault=f"batch {index}{again}: {'; '.join(faults)}")
        worst = max(worst, found, key=lambda finding: finding.error / finding.tolerance)
    return replace(worst, fault=rig.unproven(), digest=rig.digest())


def _launches(case: Case, runner: RunnerKind) -> Iterator[tuple[int, bool]]:
    """(batch, whether it is launched a second time): a graph is captured at its key's second use,
    so that the batches behind the first are all replays."""
    yield 0, False
    if runner is not RunnerKind.EAGER:
        yield 0, True
    for index in range(1, len(case.batches)):
        yield index, False


def _cut(reason: str | None) -> str | None:
    if reason is None or len(reason) <= _LONGEST_REASON:
        return reason
    left = len(reason) - _LONGEST_REASON
    return f"{reason[:_LONGEST_REASON]} ... and {left} more characters"


def _composition(case: Case, who: Contender) -> str | None:
    """cascade(...) where a case is more than the backend alone can mask."""
    composed = for_case(who, case)
    return None if composed is who.backend else composed.name


def _result(
    case: Case,
    who: Contender,
    runner: RunnerKind,
    began: float,
    status: Status,
    reason: str | None,
    *,
    ran_as: str | None,
    finding: Finding | None = None,
) -> CellResult:
    return CellResult(
        method=case.method,
        backend=who.name,
        mode=case.mode.value,
        runner=runner.value,
        variant=case.name,
        status=status,
        reason=_cut(reason),
        error=None if finding is None else finding.error,
        tolerance=None if finding is None else finding.tolerance,
        ran_as=ran_as,
        digest=None if finding is None or finding.fault is not None else finding.digest,
        seconds=time.process_time() - began,
    )
