"""A case made ready: what every backend and runner shares."""

from dataclasses import dataclass
from functools import lru_cache

from paceline.proof.oracle.batch_data import BatchData
from paceline.proof.oracle.inputs import make_inputs
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
        blind=tuple(
            f"batch {index}, layer {layer}: {name}"
            for index, expectation in enumerate(expectations)
            for layer in range(len(case.layers))
            for name in expectation.blind(layer)
        ),
    )
