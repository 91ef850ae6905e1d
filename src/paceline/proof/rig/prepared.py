"""A case made ready: what every backend and runner shares."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from paceline.proof.oracle.batch_data import BatchData
from paceline.proof.oracle.inputs import make_inputs
from paceline.proof.oracle.states import (
    StateData,
    StateExpectation,
    expect_states,
    make_states,
)
from paceline.proof.oracle.tolerance import Expectation, expect
from paceline.proof.rig.placement import BatchPlacement, place
from paceline.proof.suite.case import Case


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedCase:
    """One case with its numbers and right answers; nothing mutates it."""

    case: Case
    places: tuple[BatchPlacement, ...]  # [num_batches]
    data: tuple[BatchData, ...]  # [num_batches]
    expectations: tuple[Expectation, ...]  # [num_batches]
    blind: tuple[str, ...]  # what the comparison would accept, by batch and layer; none is well


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedStates:
    """The same of a case whose layers keep states."""

    case: Case
    places: tuple[BatchPlacement, ...]  # [num_batches]
    data: tuple[StateData, ...]  # [num_batches]
    expectations: tuple[StateExpectation, ...]  # [num_batches]
    blind: tuple[str, ...]


@lru_cache(maxsize=1)  # cells come case by case
def prepare_case(case: Case) -> PreparedCase:
    """Make the inputs and ask the oracle: more work than most backends have with the case."""
    indices = range(len(case.batches))
    data = tuple(make_inputs(case, index) for index in indices)
    expectations = tuple(expect(case, index, data[index]) for index in indices)
    return PreparedCase(
        case=case,
        places=tuple(place(case, index) for index in indices),
        data=data,
        expectations=expectations,
        blind=_blind(case, expectations),
    )


@lru_cache(maxsize=1)
def prepare_states(case: Case) -> PreparedStates:
    """Likewise."""
    indices = range(len(case.batches))
    data = tuple(make_states(case, index) for index in indices)
    expectations = tuple(expect_states(case, index, data[index]) for index in indices)
    return PreparedStates(
        case=case,
        places=tuple(place(case, index) for index in indices),
        data=data,
        expectations=expectations,
        blind=_blind(case, expectations),
    )


def _blind(case: Case, expectations: Sequence[Expectation | StateExpectation]) -> tuple[str, ...]:
    """What the comparisons would accept, by batch and layer."""
    return tuple(
        f"batch {index}, layer {layer}: {name}"
        for index, expectation in enumerate(expectations)
        for layer in range(len(case.layers))
        for name in expectation.blind(layer)
    )
