"""The list of cells whose digests are compared on an H200."""

from itertools import product
from pathlib import Path

from paceline.proof.check.baseline import read_cells
from paceline.proof.check.matrix import RUNNERS, cells_of
from paceline.proof.check.run import selection_of
from paceline.proof.suite.cases import cases

LIST = Path(__file__).parents[2] / "benchmarks" / "h200_cells.txt"
MOST = 250
BACKENDS = ("triton", "triton+flashinfer", "flashinfer", "fa4")


def test_the_list_names_cells_of_every_mode_backend_and_runner():
    named = read_cells(LIST)
    values = dict.fromkeys(("backend", "state_backend", "method", "mode", "filter"))
    values |= {"cells": str(LIST), "quick": False, "full": False}
    cells = cells_of(selection_of(values, "cuda"), cases())
    assert {cell.id for cell in cells} == named
    assert len(named) <= MOST
    modes = {case.mode for case in cases()}
    for mode, backend, runner in product(modes, BACKENDS, RUNNERS["cuda"]):
        assert any(
            (cell.case.mode, cell.backend, cell.runner) == (mode, backend, runner) for cell in cells
        ), (mode, backend, runner)
