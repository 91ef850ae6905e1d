"""packed_experts through Triton's interpreter against float64."""

import pytest
import torch
from moe_cases import nonsense
from packed_cases import KINDS, experts_of_rank, random_weight, relative

from paceline.core.errors import KernelArgumentError
from paceline.core.parallel import Parallel
from paceline.kernels.moe_experts import ExpertWeights, SwiGLU, moe_experts_reference
from paceline.kernels.moe_route import Routing
from paceline.kernels.packed_experts import (
    PackedExpertWeights,
    PackedMatrices,
    fits_packed_experts,
    packed_experts,
    packed_experts_reference,
)
from paceline.kernels.packed_weight import PackedWeight

pytest.importorskip("triton")

EXPERTS, HIDDEN, INTER, SLOTS = 4, 160, 48, 2
GATE = SwiGLU(1.0, None, 0.0)


def case(
    gate_up: str, down: str, tokens: int
) -> tuple[torch.Tensor, Routing, PackedExpertWeights, ExpertWeights]:
    """x, routing, weights and their numbers in float64."""
    made, numbers = [], []
    for kind, rows, columns in ((gate_up, 2 * INTER, HIDDEN), (down, HIDDEN, INTER)):
        packed, exact = random_weight(EXPERTS * rows, columns, KINDS[kind], seed=rows)
        made.append(PackedMatrices(packed, KINDS[kind], columns))
        numbers.append(exact.unflatten(0, (EXPERTS, rows)))
    rng = torch.Generator().manual_seed(tokens)
    x = torch.full((tokens, HIDDEN + 96), torch.nan).half()[:, :HIDDEN]  # NaN behind the last
    x.copy_(torch.randn(tokens, HIDDEN, generator=rng))
    ids = torch.rand(tokens, EXPERTS, generator=rng).argsort(1)[:, :SLOTS].int().contiguous()
    weights = torch.rand(tokens, SLOTS, generator=rng)
    return (
        x,
        Routing(weights, ids),
        PackedExpertWeights(*made),
        ExpertWeights(numbers[0], None, numbers[1], None),
    )


@pytest.mark.parametrize(
    ("gate_up", "down", "tokens"),
    [("int4-g32-zeros", "int4-row", 5), ("fp8-row", "fp8-row", 1), ("fp8-g128", "int8-row", 40)],
)
def test_experts_equal_those_with_the_numbers(gate_up: str, down: str, tokens: int) -> None:
    x, routing, weights, numbers = case(gate_up, down, tokens)
    plus = torch.ones(tokens, HIDDEN).half()
    exact = moe_experts_reference(x.double(), routing, numbers, GATE)
    assert relative(packed_experts_reference(x, routing, weights, GATE), exact) < 1e-3
    idle = set(range(EXPERTS)) - set(routing.expert_ids.unique().tolist())
    for each in weights:
        for expert in idle:  # which no token takes, and no program reads
            each.packed.scale.chunk(EXPERTS)[expert].fill_(torch.nan)
    ours = packed_experts(x, routing, weights, GATE, plus)
    assert relative(ours, exact + plus.double()) < 1e-3  # of four roundings to float16
    none = Routing(routing.weights[:0], routing.expert_ids[:0])
    assert packed_experts(x[:0], none, weights, GATE, plus[:0]).shape == (0, HIDDEN)


@pytest.mark.parametrize("tokens", [1, 4])
def test_parts_of_ranks_with_whole_experts_sum_to_all_of_them(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 experts are 2, 1 and 1, and what the others' pairs leave is read by nobody."""
    x, routing, weights, numbers = case("int4-g32-zeros", "int4-row", tokens)
    exact = moe_experts_reference(x.double(), routing, numbers, GATE)
    monkeypatch.setattr(torch, "empty", nonsense)
    parts, wanted = [], []
    for rank in range(3):
        held = Parallel(rank, 3).spread(EXPERTS)
        ours = experts_of_rank(weights, held)
        parts.append(packed_experts(x, routing, ours, GATE, experts=held))
        wanted.append(packed_experts_reference(x, routing, ours, GATE, held))
        assert torch.equal(parts[-1].ne(0).any(1), wanted[-1].ne(0).any(1))
    assert relative(torch.stack(parts).double().sum(0), exact) < 1e-3
    assert relative(torch.stack(wanted).double().sum(0), exact) < 1e-3
    with pytest.raises(KernelArgumentError, match="experts must be 1, as the weights have"):
        packed_experts(x, routing, ours, GATE, experts=held._replace(size=2))


def test_operands_that_do_not_fit_are_named() -> None:
    x, routing, weights, _ = case("int4-g128", "int4-row", 3)
    assert not fits_packed_experts(x)  # on a CPU
    with pytest.raises(KernelArgumentError, match="x must be bfloat16 or float16"):
        packed_experts(x.float(), routing, weights, GATE)
    with pytest.raises(KernelArgumentError, match=r"weights\.gate_up must be of 128 columns"):
        packed_experts(x[:, :128], routing, weights, GATE)
    down = weights.down.packed
    one_less = PackedWeight(*(None if each is None else each[HIDDEN:] for each in down))
    fewer = weights._replace(down=weights.down._replace(packed=one_less))
    with pytest.raises(KernelArgumentError, match=r"weights\.down must be 160 rows for each"):
        packed_experts(x, routing, fewer, GATE)
    with pytest.raises(KernelArgumentError, match=r"routing\.weights must be"):
        packed_experts(x[:2], routing, weights, GATE)
