"""What a wrong answer looks like: the classic mistakes that would give the same numbers."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from paceline.proof.oracle.tolerance import Expectation
from paceline.proof.oracle.wrong import wrong_answers

NEAR = 0.1  # of the distance to the right answer: as near is alike
TIED = 1.5  # times the least distance: as likely as the likeliest
MOST = 3  # names


def likely_mistakes(expectation: Expectation, layer: int, out: Tensor) -> list[str]:
    """The mistakes that give nearly `out` [num_tokens, heads, v_head_dim]; several where as likely.

    Rows that hold no numbers, or whose output is dropped, are left aside.
    """
    case, batch = expectation.case, expectation.case.batches[expectation.index]
    exact = expectation.exact[layer]
    if out.shape != exact.shape:
        return []
    rows = out.isfinite().flatten(1).all(1) & ~torch.tensor(batch.is_dropped)
    found = wrong_answers(case, batch, expectation.data, layer)
    return _nearest(out[rows], exact[rows], {name: each[rows] for name, each in found.items()})


def likely_lse_mistakes(expectation: Expectation, layer: int, lse: Tensor) -> list[str]:
    """Likewise of lse [num_tokens, heads], where both are numbers."""
    exact, sinks = expectation.lses[layer], expectation.data.sinks
    if lse.shape != exact.shape:
        return []
    batch = expectation.case.batches[expectation.index]
    is_number = lse.isfinite() & exact.isfinite() & ~torch.tensor(batch.is_dropped).unsqueeze(1)
    others = {
        "logarithm to base 2": exact / math.log(2),
        "logarithm to base 10": exact / math.log(10),
        "sign turned": -exact,
        "sum without its logarithm": exact.exp(),
    }
    if sinks is not None:
        others["sinks counted"] = torch.logaddexp(exact, sinks[layer].expand_as(exact))
    numbers = {name: each[is_number] for name, each in others.items()}
    return _nearest(lse[is_number], exact[is_number], numbers)


def _nearest(got: Tensor, exact: Tensor, others: Mapping[str, Tensor]) -> list[str]:
    off = float((got - exact).norm())
    distances = {name: float((got - other).norm()) for name, other in others.items()}
    if not distances or off == 0.0:
        return []
    least = min(distances.values())
    near = [name for name, d in distances.items() if d <= min(NEAR * off, TIED * least)]
    return near[:MOST]
