"""The compiled kernels of experts at the sizes of real models, on memory that starts as NaN."""

import pytest
import torch
from moe_cases import CLAMPED, SILU, Case, in_float32, make_case, of_rank, theirs
from packed_cases import KINDS, experts_of_rank, relative
from torch import Tensor

from paceline.core.parallel import Parallel, whole
from paceline.kernels._triton.moe_align import launch_moe_align
from paceline.kernels.moe_align import moe_align_reference
from paceline.kernels.moe_experts import moe_experts, moe_experts_reference
from paceline.kernels.moe_route import Routing, moe_route, moe_route_reference
from paceline.kernels.packed_experts import (
    PackedExpertWeights,
    PackedMatrices,
    packed_experts,
    packed_experts_reference,
)
from paceline.kernels.packed_weight import encode
from paceline.kernels.sigmoid_gate import sigmoid_gate

# Warnings of drivers and compilers are shown and fail nothing.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("nan_memory"),
]

# experts, experts per token, hidden, inter, gate
SHAPES = {
    "qwen3-30b-a3b": (128, 8, 2048, 768, SILU),
    "gpt-oss-20b": (32, 4, 2880, 2880, CLAMPED),
    "odd": (6, 3, 200, 72, CLAMPED),
}


def case_of(shape: str, tokens: int, dtype: torch.dtype, *, live: int | None = None) -> Case:
    experts, per_token, hidden, inter, gate = SHAPES[shape]
    settings = {"gate": gate, "dtype": dtype, "device": "cuda", "live": live}
    return make_case(tokens, experts, per_token, hidden=hidden, inter=inter, **settings)


def run(case: Case) -> Tensor:
    return moe_experts(case.x, case.routing, case.weights, case.gate, experts=case.experts)


def error(found: Tensor, exact: Tensor) -> float:
    return (found.float() - exact).square().mean().sqrt().item()


def reference(case: Case) -> Tensor:
    """In float32: plain products, without TF32, of the same numbers."""
    wide = in_float32(case)
    return moe_experts_reference(wide.x, wide.routing, wide.weights, wide.gate)


@pytest.mark.parametrize("tokens", [1, 8, 64, 300, 1024, 4096])
@pytest.mark.parametrize("shape", SHAPES)
def test_experts_are_as_exact_as_those_of_transformers(shape: str, tokens: int) -> None:
    case = case_of(shape, tokens, torch.bfloat16)
    exact = reference(case)
    assert error(run(case), exact) < 1.1 * error(theirs(case), exact)
    total = sum(run(of_rank(case, rank, 3)).float() for rank in range(3))
    assert error(total, exact) < 1.1 * error(theirs(case), exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [1, 64, 300, 1100])
def test_other_dtypes_are_exact(dtype: torch.dtype, tokens: int) -> None:
    case = case_of("qwen3-30b-a3b", tokens, dtype)
    # float32 sums of 2,048 products differ in their order.
    slack = (64 if dtype == torch.float32 else 8) * torch.finfo(dtype).eps
    torch.testing.assert_close(run(case).float(), reference(case), rtol=slack, atol=slack)


@pytest.mark.parametrize("tokens", [3, 1024, 1100])
def test_experts_without_tokens_are_not_read(tokens: int) -> None:
    case = case_of("qwen3-30b-a3b", tokens, torch.bfloat16, live=10)
    expected = run(case)
    case.weights.gate_up[10:] = float("nan")
    case.weights.down[10:] = float("nan")
    assert torch.equal(run(case), expected)
    assert expected.isfinite().all()


@pytest.mark.parametrize(
    ("tokens", "experts"),
    [(1, 128), (5, 128), (12, 512), (64, 128), (64, 512), (1000, 128), (8192, 128)],
)
@pytest.mark.parametrize("live", [None, 9])
def test_routing_and_alignment_equal_their_references(
    tokens: int, experts: int, live: int | None
) -> None:
    logits = torch.randn(tokens, experts, device="cuda")
    if live is not None:
        logits[:, live:] -= 100.0
    for renormalize in (False, True):
        found = moe_route(logits, 8, renormalize=renormalize)
        wanted = moe_route_reference(logits, 8, renormalize=renormalize)
        assert torch.equal(found.expert_ids, wanted.expert_ids)
        torch.testing.assert_close(found.weights, wanted.weights, rtol=1e-5, atol=1e-7)
    for rows in (16, 64, 128):
        for held in (whole(experts), *(Parallel(rank, 3).spread(experts) for rank in range(3))):
            aligned = launch_moe_align(found.expert_ids, held, rows)
            expected = moe_align_reference(found.expert_ids, held, rows)
            assert torch.equal(aligned.order, expected.order)
            assert torch.equal(aligned.blocks, expected.blocks)


@pytest.mark.parametrize("tokens", [1, 64])
def test_sigmoid_gates_are_those_of_torch(tokens: int) -> None:
    x = torch.randn(tokens, 16, 256, device="cuda").bfloat16()
    rows = torch.randn(tokens, 16, 512, device="cuda").bfloat16() * 4.0
    for gate in (rows[..., 256:], rows[:, :1, :1]):
        found = sigmoid_gate(x, gate).view(x.shape)
        torch.testing.assert_close(found, x * gate.sigmoid(), rtol=2**-6, atol=0.0)


@pytest.mark.parametrize("tokens", [1, 64, 1100])
def test_a_graph_follows_the_routing_of_each_replay(tokens: int) -> None:
    """Captured over one routing, replayed over others, bit-equal to eager; then skewed to one."""
    case = case_of("qwen3-30b-a3b", tokens, torch.bfloat16)
    logits = torch.zeros(tokens, 128, device="cuda")

    def step() -> Tensor:
        routing = moe_route(logits, 8, renormalize=True)
        return moe_experts(case.x, routing, case.weights, case.gate)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for skew in (0.0, 0.0, 100.0):
        logits.normal_()
        logits[:, 20:28] += skew
        case.x.normal_()
        graph.replay()
        replayed = out.clone()
        assert torch.equal(replayed, step())


@pytest.mark.parametrize("kind", ["int4-g128", "fp8-g128"])
def test_ranks_with_whole_experts_compute_their_part(kind: str) -> None:
    """One process plays each of three ranks in turn; then one in a graph, over other routings."""
    experts, hidden, inter, slots = 16, 2048, 768, 4
    packing, rng = KINDS[kind], torch.Generator("cuda").manual_seed(0)
    weights = PackedExpertWeights(
        *(
            PackedMatrices(encode(noise(experts * rows, columns, rng), packing), packing, columns)
            for rows, columns in ((2 * inter, hidden), (hidden, inter))
        )
    )
    held = [Parallel(rank, 3).spread(experts) for rank in range(3)]
    parts = [experts_of_rank(weights, each) for each in held]
    for tokens in (1, 7, 64, 700):
        x = torch.randn(tokens, hidden, generator=rng, device="cuda").bfloat16()
        logits = torch.randn(tokens, experts, generator=rng, device="cuda")
        routing = moe_route(logits, slots, renormalize=True)
        exact = packed_experts_reference(x.float(), routing, weights, SILU).double()
        total = torch.zeros_like(exact)
        for part, its in zip(parts, held, strict=True):
            ours = packed_experts(x, routing, part, SILU, experts=its)
            wanted = packed_experts_reference(x.float(), routing, part, SILU, its)
            assert torch.equal(ours.ne(0).any(1), wanted.ne(0).any(1))
            assert relative(ours, wanted.double()) < 4.6e-3  # see test_gpu_linear
            total += ours
        assert relative(total, exact) < 4.6e-3

    x, logits = x[:64].clone(), logits[:64].clone()

    def step() -> Tensor:
        routing = moe_route(logits, slots, renormalize=True)
        return packed_experts(x, routing, parts[1], SILU, experts=held[1])

    graph = torch.cuda.CUDAGraph()
    step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = step()
    for skew in (0.0, 100.0, -100.0):  # to its experts, then to the others'
        logits.normal_()
        logits[:, held[1].first : held[1].end] += skew
        graph.replay()
        replayed = out.clone()
        assert torch.equal(replayed, step())
        assert bool(replayed.any()) == (skew >= 0.0)


def noise(rows: int, columns: int, rng: torch.Generator) -> Tensor:
    return torch.randn(rows, columns, generator=rng, device="cuda") / columns**0.5


@pytest.mark.parametrize("tokens", [300, 3000])
def test_repeated_runs_give_the_same_bits(tokens: int) -> None:
    case = case_of("gpt-oss-20b", tokens, torch.bfloat16)
    first = run(case)
    assert all(torch.equal(run(case), first) for _ in range(5))


def test_logits_that_are_not_finite_still_name_experts() -> None:
    logits = torch.zeros(3, 6, device="cuda")
    logits[0], logits[1], logits[2, ::2] = float("nan"), float("-inf"), float("nan")
    found: Routing = moe_route(logits, 4, renormalize=True)
    assert found.expert_ids.min() >= 0
    assert found.expert_ids.max() < 6
    assert found.weights[0].isnan().all()
