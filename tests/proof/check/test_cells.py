"""The cells of the quick suite, run as tests: every case on the torch backend, in one runner or the
other; on the emulators and in Triton's interpreter a choice of cases that covers each pair of axes.
The rest is slow.

    pytest tests/proof/check/test_cells.py -k "fa4 and decode and page-edges"
"""

import os
from collections.abc import Iterator
from itertools import combinations

import pytest
from named_cell import run_named

from paceline.core.model.lookback import Chunk
from paceline.proof.check.cell import Status
from paceline.proof.check.matrix import BACKENDS, RUNNERS, Cell, absence
from paceline.proof.suite.case import Case
from paceline.proof.suite.cases import cases

QUICK = [case for case in cases() if case.is_quick]
RUN = {Status.PROVEN, Status.EMULATED}
INTERPRETS = os.environ["TRITON_INTERPRET"] == "1"
REFUSABLE = set(BACKENDS["cpu"]) - {"torch", "triton"}
ELSEWHERE = {"trtllm_mla", "cutedsl_mla", "tokenspeed_mla", "cutlass_mla", "trtllm_mha"}


def traits(case: Case) -> set[tuple[str, object]]:
    """What a case has of each axis."""
    return {
        ("mode", case.mode),
        ("mask", case.mask(case.batches[0])),
        ("page size", case.page_size),
        ("group", case.num_heads // case.num_kv_heads),
        ("window", any(isinstance(layer.window, int) for layer in case.layers)),
        ("chunks", any(isinstance(layer.window, Chunk) for layer in case.layers)),
        ("layers", len(case.layers)),
        ("layout", case.layout),
        ("dtype", case.kv_dtype or case.dtype),
        ("score", (case.soft_cap is not None, case.sinks)),
        ("frozen", any(batch.frozen for batch in case.batches)),
        ("encoder", case.reads_encoder),
    }


def pairs(case: Case) -> set[frozenset[tuple[str, object]]]:
    """Every two traits that meet in a case."""
    return {frozenset(pair) for pair in combinations(sorted(traits(case), key=repr), 2)}


def pairwise(of: list[Case]) -> list[Case]:
    """The fewest cases, nearly, that have every pair of traits that any has."""
    held = [pairs(case) for case in of]
    missing = set().union(*held)
    chosen = []
    while missing:
        best = max(range(len(of)), key=lambda number: len(held[number] & missing))
        chosen.append(of[best])
        missing -= held[best]
    return chosen


def cells() -> Iterator[object]:
    """Every quick cell of a CPU."""
    few = pairwise([case for case in QUICK if not case.is_interpreted])
    tiny = pairwise([case for case in QUICK if case.is_interpreted])
    for turn, case in enumerate(QUICK):  # case after case: each is made ready once
        for number, name in enumerate(BACKENDS["cpu"]):
            cell = Cell(case=case, backend=name, runner=RUNNERS["cpu"][0])
            if absence(cell, "cpu") or ("triton" in name and not INTERPRETS):
                continue
            for runner in RUNNERS["cpu"]:
                cell = Cell(case=case, backend=name, runner=runner)
                is_its_turn = (number + turn) % 2 == RUNNERS["cpu"].index(runner)
                chosen = few if "triton" not in name else tiny
                is_chosen = case in chosen and name not in ELSEWHERE  # test_blackwell_cells.py
                is_fast = is_its_turn and (name == "torch" or is_chosen)
                if name == "flex":  # which refuses to be recorded, at once
                    is_fast = case.is_interpreted
                yield pytest.param(cell.id, marks=[] if is_fast else pytest.mark.slow)


@pytest.mark.parametrize("cell_id", list(cells()))
def test_a_cell_equals_the_oracle(cell_id):
    result = run_named(cell_id)
    if result.status in RUN:
        assert result.reason is None
        assert result.error <= result.tolerance
        return
    assert result.status is Status.REFUSED, result.reason
    assert result.reason
    assert result.backend in REFUSABLE
