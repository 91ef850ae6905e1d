"""A backend's step over a built case, and its comparison with the walk."""

from dataclasses import replace

import torch
from attention_cases import Built, walk, wrong_meanings
from torch import Tensor

from paceline.attention.contract import AttentionBackend, AttentionSpec, Limits, Part

# Of outputs that are sums of up to 23 values of size 50: rounding of sums and of weights.
TOLERANCE = {torch.float32: 2e-4, torch.float16: 0.15, torch.bfloat16: 0.7}
LSE_TOLERANCE = 2e-5


def limits(built: Built, *specs: AttentionSpec) -> Limits:
    """The least a backend must allocate for this one step; specs: of other layers than its own."""
    layers, is_prefix = specs or (built.layer.spec,), built.case.part is Part.PREFIX
    return replace(built.paged.limits, layers=layers, prefix_alone=is_prefix)


def run(backend: AttentionBackend, built: Built) -> tuple[Tensor, Tensor | None]:
    """(out, lse) of the live tokens in float64, from a fresh plan."""
    plan = backend.plan(built.view, backend.make_buffers(limits(built)))
    k, v = built.paged.fresh_rows()
    out, lse = backend.forward(built.q, k, v, built.layer, plan, built.case.part)
    assert out.shape == (built.q.shape[0], built.case.heads, built.case.v_head_dim)
    assert out.dtype is built.case.dtype
    return live(built, out), None if lse is None else live(built, lse)


def live(built: Built, rows: Tensor) -> Tensor:
    """Those of live tokens, in float64."""
    return rows[: built.paged.batch.num_live].double()


def difference(out: Tensor, wanted: Tensor) -> float:
    """The largest difference of an element; NaN counts as infinite."""
    found = (out - wanted).abs().max().item()
    return float("inf") if found != found else found


def assert_is_the_walk(
    built: Built,
    out: Tensor,
    lse: Tensor | None,
    *,
    tolerance: float,
    lse_tolerance: float = LSE_TOLERANCE,
) -> None:
    """The answer against the walk; then against every wrong meaning, which must be told apart."""
    wanted, wanted_lse = walk(built)
    assert difference(out, wanted) < tolerance
    if lse is not None:
        assert difference(lse.exp(), wanted_lse.exp()) <= lse_tolerance * wanted_lse.exp().max()
        assert torch.equal(lse.isinf(), wanted_lse.isinf())
    if not wanted.any():  # a window of the row itself sees no prefix: nothing to get wrong
        return
    for name, (wrong, _) in wrong_meanings(built).items():
        assert difference(out, wrong) > 2 * tolerance, f"{name} passes for the right answer"
