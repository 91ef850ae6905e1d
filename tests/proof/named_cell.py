"""A cell of the suite by its id, on this machine's CPU."""

import torch

from paceline.proof.check.cell import CellResult, RunnerKind
from paceline.proof.rig.contenders import contender, state_contender
from paceline.proof.rig.harness import run_cell
from paceline.proof.suite.cases import cases
from paceline.proof.suite.states import STATE_METHODS, state_cases

CASES = {(case.method, case.mode.value, case.name): case for case in (*cases(), *state_cases())}


def run_named(cell_id: str) -> CellResult:
    """Run method/backend/mode/runner/variant.  Raises KeyError where the suite has no such case,
    ConfigError for a backend that there is not."""
    method, backend, mode, runner, name = cell_id.split("/")
    of_states = method in STATE_METHODS
    who = state_contender(backend, method) if of_states else contender(backend, "cpu")
    return run_cell(CASES[method, mode, name], who, RunnerKind(runner), torch.device("cpu"))
