"""moe_experts: the op and its Triton kernels against transformers' expert modules."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from moe_cases import CLAMPED, SILU, Case, in_float32, make_case, nonsense, of_rank, theirs
from torch import Tensor

from paceline.core.errors import KernelArgumentError
from paceline.core.parallel import Span, whole
from paceline.kernels.moe_align import Alignment, max_blocks
from paceline.kernels.moe_experts import SwiGLU, moe_experts, moe_experts_reference
from paceline.kernels.moe_route import Routing

Run = Callable[[Case], Tensor]


def run_op(case: Case) -> Tensor:
    return moe_experts(case.x, case.routing, case.weights, case.gate, case.plus, case.experts)


def run_reference(case: Case) -> Tensor:
    return moe_experts_reference(case.x, case.routing, case.weights, case.gate, case.experts)


def run_triton(case: Case) -> Tensor:
    from paceline.kernels._triton.moe_experts import launch_moe_experts

    out = torch.full_like(case.x, float("nan"))
    launch_moe_experts(
        case.x,
        case.routing,
        case.weights,
        gate=case.gate,
        experts=case.experts or whole(len(case.weights.down)),
        plus=case.plus,
        out=out,
    )
    return out


RUNS = pytest.mark.parametrize(
    "run", [run_op, run_reference, run_triton], ids=["op", "reference", "triton"]
)
KERNELS = pytest.mark.parametrize("run", [run_op, run_triton], ids=["op", "triton"])
GATES = pytest.mark.parametrize("gate", [SILU, CLAMPED], ids=["silu", "clamped"])


@RUNS
@GATES
@pytest.mark.parametrize(
    "sizes", [(1, 8, 3, 40, 24), (7, 6, 2, 33, 17), (5, 4, 4, 64, 64)], ids=str
)
def test_experts_equal_transformers(run: Run, gate: SwiGLU, sizes: tuple[int, ...]) -> None:
    tokens, experts, per_token, hidden, inter = sizes
    case = make_case(tokens, experts, per_token, hidden=hidden, inter=inter, gate=gate)
    torch.testing.assert_close(run(case), theirs(case), rtol=1e-5, atol=2e-6)


@RUNS
@GATES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_is_no_worse_than_that_of_transformers(
    run: Run, gate: SwiGLU, dtype: torch.dtype
) -> None:
    case = make_case(6, 5, 3, hidden=48, inter=40, gate=gate, dtype=dtype)
    exact = theirs(in_float32(case))

    def error(found: Tensor) -> Tensor:
        return (found.float() - exact).square().mean().sqrt()

    # Triton's interpreter cuts a bfloat16 off where a GPU rounds.
    slack = 2.0 if run is run_triton and dtype == torch.bfloat16 else 1.1
    assert run(case).dtype == dtype
    assert error(run(case)) < slack * error(theirs(case))


@KERNELS
def test_an_expert_without_tokens_is_not_read(run: Run) -> None:
    case = make_case(5, 8, 2, hidden=32, inter=16, live=3)
    assert case.routing.expert_ids.max() < 3
    expected = run(case)
    case.weights.gate_up[3:] = float("nan")
    case.weights.down[3:] = float("nan")
    assert torch.equal(run(case), expected)


@RUNS
@pytest.mark.parametrize("tokens", [1, 6])
def test_parts_of_ranks_with_whole_experts_sum_to_all_of_them(
    run: Run, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """7 experts are 3, 2 and 2; a token whose experts are all elsewhere has 0, whatever lies where
    their results would."""
    case = make_case(tokens, 7, 3, hidden=40, inter=24, gate=CLAMPED)
    expected, parts = run(case), [of_rank(case, rank, 3) for rank in range(3)]
    monkeypatch.setattr(torch, "empty", nonsense)
    found = [run(part) for part in parts]
    for part, computed in zip(parts, found, strict=True):
        held, ids = part.experts, case.routing.expert_ids
        assert held is not None
        has_some = ((ids >= held.first) & (ids < held.end)).any(1)
        assert torch.equal(computed.ne(0).any(1), has_some)
    torch.testing.assert_close(sum(found), expected, rtol=1e-5, atol=2e-6)


@KERNELS
def test_a_token_that_is_not_finite_touches_no_other(run: Run) -> None:
    case = make_case(6, 4, 2, hidden=32, inter=16)
    expected = run(case)
    case.x[2] = float("nan")
    found = run(case)
    assert found[2].isnan().all()
    others = [0, 1, 3, 4, 5]
    assert torch.equal(found[others], expected[others])


@KERNELS
def test_other_tokens_of_a_step_do_not_change_a_token(run: Run) -> None:
    """As padded rows are: there, and of no account."""
    case = make_case(6, 4, 2, hidden=32, inter=16)
    rows = slice(0, 3)
    few = Routing(case.routing.weights[rows], case.routing.expert_ids[rows])
    alone = run(replace(case, x=case.x[rows], routing=few))
    torch.testing.assert_close(run(case)[rows], alone, rtol=1e-5, atol=1e-6)


@KERNELS
def test_tokens_may_lie_apart_and_there_may_be_none(run: Run) -> None:
    case = make_case(4, 4, 2, hidden=32, inter=16)
    wide = torch.full((4, 80), float("nan"))
    wide[:, :32] = case.x
    assert torch.equal(run(replace(case, x=wide[:, :32])), run(case))
    none = Routing(case.routing.weights[:0], case.routing.expert_ids[:0])
    assert run(replace(case, x=case.x[:0], routing=none)).shape == (0, 32)


@KERNELS
@pytest.mark.parametrize("tokens", [1, 4])
def test_what_is_to_be_added_is_added_to_the_rounded_sum(run: Run, tokens: int) -> None:
    case = make_case(tokens, 4, 3, hidden=40, inter=16, dtype=torch.bfloat16)
    alone, plus = run(case), torch.randn(tokens, 40).bfloat16()
    torch.testing.assert_close(
        run(replace(case, plus=plus)), alone + plus, rtol=2.0**-7, atol=2.0**-7
    )
    exact = make_case(tokens, 4, 3, hidden=40, inter=16)
    added = replace(exact, plus=plus.float())
    assert torch.equal(run(added), run(exact) + plus.float())


def test_a_token_too_wide_for_registers_takes_the_tiles_of_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from paceline.kernels._triton import moe_one_token

    case = make_case(1, 4, 3, hidden=40, inter=24)
    monkeypatch.setattr(moe_one_token, "_MOST_ELEMENTS", 4 * 32 - 1)
    assert not moe_one_token.fits_one_token(case.x, case.weights)
    torch.testing.assert_close(run_triton(case), theirs(case), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("tokens", "is_tiled", "taken"),
    [(64, False, ("tiles", 64)), (65, False, ("groups", 128)), (65, True, ("tiles", 16))],
)
def test_groups_have_blocks_of_their_own_from_so_many_pairs_of_any_expert_on(
    monkeypatch: pytest.MonkeyPatch, tokens: int, is_tiled: bool, taken: tuple[str, int]
) -> None:
    """More than 32 of each of 4 experts, of which this rank has 2."""
    moe_groups = pytest.importorskip("paceline.kernels._triton.moe_groups")
    from paceline.kernels._triton import moe_experts as kernels

    case = of_rank(make_case(tokens, 4, 2, hidden=8, inter=6, dtype=torch.half), 0, 2)
    found: list[tuple[str, int]] = []

    def note(kind: str) -> Callable[..., None]:
        def products(
            x: Tensor, shares: Tensor, weights: object, aligned: Alignment, parts: Tensor, **_: Any
        ) -> None:
            parts.zero_()
            found.append((kind, len(aligned.blocks)))

        return products

    monkeypatch.setattr(kernels, "fits_groups", lambda x, weights, pairs: pairs > 32)
    monkeypatch.setattr(kernels, "_launch_products", note("tiles"))
    monkeypatch.setattr(moe_groups, "launch_group_products", note("groups"))
    kernels.launch_moe_experts(
        case.x,
        case.routing,
        case.weights,
        gate=case.gate,
        experts=case.experts,
        plus=None,
        out=torch.empty_like(case.x),
        tiles=kernels.expert_tiles(1, 1, torch.float32) if is_tiled else None,
    )
    kind, rows = taken
    assert found == [(kind, max_blocks(2 * tokens, 2, rows))]


def test_blocks_of_several_rows_and_a_last_partial_one_are_whole() -> None:
    """19 tokens of which each takes expert 0: blocks of 16 rows and of 3."""
    case = make_case(19, 3, 1, hidden=24, inter=16, live=1)
    assert (case.routing.expert_ids == 0).all()
    torch.testing.assert_close(run_triton(case), theirs(case), rtol=1e-5, atol=2e-6)


def test_bad_arguments_are_named_with_what_was_expected() -> None:
    case = make_case(3, 4, 2, hidden=8, inter=6)
    few = Routing(case.routing.weights[:2], case.routing.expert_ids)
    wide = Routing(case.routing.weights, case.routing.expert_ids.long())
    half = case.weights._replace(down=case.weights.down.half())
    short = case.weights._replace(gate_up=case.weights.gate_up[:, :10])
    bias = case.weights._replace(down_bias=torch.zeros(4, 6))
    for wrong, text in (
        (replace(case, x=case.x.t()), "x must be [tokens, hidden] with a contiguous last dim"),
        (replace(case, routing=few), "routing.weights must be torch.float32 [3, experts_per"),
        (replace(case, routing=wide), "routing.expert_ids must be torch.int32 [3, experts_per"),
        (replace(case, weights=half), "weights.down must be torch.float32 [4, 8, 6] on cpu"),
        (replace(case, weights=short), "weights.gate_up must be torch.float32 [4, 12, 8] on"),
        (replace(case, plus=case.x[:2]), "plus must be torch.float32 [3, 8] on cpu, contiguous"),
        (replace(case, plus=case.x.half()), "plus must be torch.float32 [3, 8] on cpu, contig"),
        (replace(case, weights=bias), "weights.down_bias must be torch.float32 [4, 8] on cpu"),
    ):
        with pytest.raises(KernelArgumentError, match=re.escape(text)):
            run_op(wrong)


@pytest.mark.parametrize("experts", [Span(0, 3, 8), Span(-1, 4, 8), Span(5, 4, 8)])
def test_experts_that_the_weights_are_not_of_are_refused(experts: Span) -> None:
    case = replace(make_case(3, 4, 2, hidden=8, inter=6), experts=experts)
    told = r"experts must be 4, as the weights have, .* got -?\d to \d of 8; pass the span"
    with pytest.raises(KernelArgumentError, match=told):
        run_op(case)
