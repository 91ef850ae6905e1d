"""moe_route and moe_align: routing as in transformers, and pairs in the order of their experts."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from paceline.core.errors import KernelArgumentError
from paceline.core.model.config import ExpertChoice
from paceline.core.parallel import Parallel, Span, whole
from paceline.kernels.moe_align import Alignment, max_blocks, moe_align_reference
from paceline.kernels.moe_choose import moe_choose
from paceline.kernels.moe_route import Routing, moe_route, moe_route_reference

Run = Callable[[Tensor, int, bool], Routing]


def run_op(logits: Tensor, experts_per_token: int, renormalize: bool) -> Routing:
    return moe_route(logits, experts_per_token, renormalize=renormalize)


def run_reference(logits: Tensor, experts_per_token: int, renormalize: bool) -> Routing:
    return moe_route_reference(logits, experts_per_token, renormalize=renormalize)


def run_triton(logits: Tensor, experts_per_token: int, renormalize: bool) -> Routing:
    from paceline.kernels._triton.moe_route import launch_moe_route

    shape = (logits.shape[0], experts_per_token)
    weights = torch.full(shape, float("nan"))
    expert_ids = torch.full(shape, -1, dtype=torch.int32)
    launch_moe_route(logits, renormalize, weights, expert_ids)
    return Routing(weights, expert_ids)


RUNS = pytest.mark.parametrize(
    "run", [run_op, run_reference, run_triton], ids=["op", "reference", "triton"]
)


def their_routing(logits: Tensor, experts_per_token: int, renormalize: bool) -> Routing:
    """Qwen 3 MoE's, whose router is the identity here, so that it gives the logits."""
    num_experts = logits.shape[1]
    config = Qwen3MoeConfig(
        num_experts=num_experts,
        hidden_size=num_experts,
        num_experts_per_tok=experts_per_token,
        norm_topk_prob=renormalize,
    )
    router = Qwen3MoeTopKRouter(config)
    router.weight = torch.nn.Parameter(torch.eye(num_experts), requires_grad=False)
    _, weights, ids = router(logits)
    return Routing(weights, ids.int())


def test_experts_whose_sigmoids_round_to_one_are_told_apart_by_their_logits() -> None:
    logits = torch.tensor([[30.0, 40.0, -1.0]])
    found = moe_choose(logits, None, 1, ExpertChoice(sigmoid=True), renormalize=False)
    assert (found.expert_ids.tolist(), found.weights.tolist()) == ([[1]], [[1.0]])


@RUNS
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("sizes", [(5, 6, 2), (1, 128, 8), (3, 40, 40)], ids=str)
def test_routing_equals_transformers(
    run: Run, renormalize: bool, sizes: tuple[int, int, int]
) -> None:
    tokens, num_experts, experts_per_token = sizes
    logits = torch.randn(tokens, num_experts, generator=torch.Generator().manual_seed(0)) * 2
    found = run(logits, experts_per_token, renormalize)
    wanted = their_routing(logits, experts_per_token, renormalize)
    assert torch.equal(found.expert_ids, wanted.expert_ids)
    torch.testing.assert_close(found.weights, wanted.weights, rtol=1e-5, atol=1e-7)


@RUNS
def test_renormalised_routing_is_the_softmax_of_the_chosen_as_in_gpt_oss(run: Run) -> None:
    config = GptOssConfig(num_local_experts=6, hidden_size=6, num_experts_per_tok=3)
    router = GptOssTopKRouter(config)
    router.weight = torch.nn.Parameter(torch.eye(6), requires_grad=False)
    logits = torch.randn(7, 6, generator=torch.Generator().manual_seed(1)) * 3
    _, weights, ids = router(logits)
    found = run(logits, 3, True)
    assert torch.equal(found.expert_ids, ids.int())
    torch.testing.assert_close(found.weights, weights, rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter's NumPy
@RUNS
def test_logits_that_are_not_finite_still_name_experts(run: Run) -> None:
    """Each expert once, none past the last: 6 is no power of two."""
    logits = torch.zeros(4, 6)
    logits[0] = float("nan")
    logits[1] = float("-inf")
    logits[2, 2:] = float("inf")
    logits[3, ::2] = float("nan")
    found = run(logits, 4, True)
    for ids in found.expert_ids.tolist():
        assert len(set(ids)) == 4
        assert set(ids) <= set(range(6))
    assert found.weights[0].isnan().all()


@RUNS
def test_rows_may_lie_apart_and_in_another_dtype(run: Run) -> None:
    wide = torch.full((3, 20), float("nan"), dtype=torch.bfloat16)
    wide[:, :6] = torch.randn(3, 6, generator=torch.Generator().manual_seed(2))
    found, wanted = run(wide[:, :6], 2, False), run_reference(wide[:, :6].float(), 2, False)
    assert torch.equal(found.expert_ids, wanted.expert_ids)
    torch.testing.assert_close(found.weights, wanted.weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("run", [run_reference, run_triton], ids=["reference", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_equal_logits_go_to_the_lower_id_and_zeros_have_no_sign(
    run: Run, dtype: torch.dtype
) -> None:
    logits = torch.tensor([[-0.0, 0.0, -3.0, 2.0, 2.0, float("-inf"), -0.5]], dtype=dtype)
    found = run(logits, 7, False)
    assert found.expert_ids.tolist() == [[3, 4, 0, 1, 6, 2, 5]]
    wanted = logits[0].float().softmax(0)[found.expert_ids[0].long()]
    torch.testing.assert_close(found.weights[0], wanted, rtol=1e-6, atol=0.0)


def test_bad_arguments_of_moe_route_are_named() -> None:
    with pytest.raises(KernelArgumentError, match=r"logits must be \[tokens, num_experts\]"):
        moe_route(torch.zeros(3), 1, renormalize=True)
    with pytest.raises(KernelArgumentError, match=r"experts_per_token must be 1 to 4, .* got 5"):
        moe_route(torch.zeros(2, 4), 5, renormalize=True)


def align(expert_ids: Tensor, experts: Span, block_rows: int) -> Alignment:
    from paceline.kernels._triton.moe_align import launch_moe_align

    with pytest.MonkeyPatch.context() as patch:  # what is not written is no expert
        patch.setattr(torch, "empty", lambda *shape, **made: torch.full(shape, -1, **made))
        return launch_moe_align(expert_ids, experts, block_rows)


ALIGN = pytest.mark.parametrize("run", [align, moe_align_reference], ids=["triton", "reference"])


@pytest.fixture
def full_of_nonsense(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is allocated holds -7, where it is often zeros by chance."""
    monkeypatch.setattr(torch, "empty", lambda *size, **how: torch.full(size, -7, **how))


@pytest.mark.usefixtures("full_of_nonsense")
@ALIGN
def test_the_worked_example_of_moe_align_holds(run: Callable[..., Alignment]) -> None:
    ids = torch.tensor([[1, 3], [1, 0], [1, 3]], dtype=torch.int32)
    found = run(ids, whole(4), 2)
    assert found.order.tolist() == [3, 0, 2, 4, 1, 5]
    live = [[0, 0, 1], [1, 1, 3], [1, 3, 4], [3, 4, 6]]
    assert found.blocks.tolist() == [*live, [0, 0, 0]]
    part = run(ids, Span(2, 2, 4), 2)
    assert part.order.tolist() == found.order.tolist()
    assert part.blocks.tolist() == [[1, 4, 6], *([[0, 0, 0]] * 3)]


@ALIGN
@pytest.mark.parametrize(
    "sizes",
    [
        (1, 8, 8, 16),
        (40, 6, 3, 2),
        (100, 40, 4, 16),
        (1100, 5, 2, 64),
        (1093, 40, 8, 128),
        (1093, 256, 8, 128),
    ],
    ids=str,
)
@pytest.mark.parametrize("skew", [1, 6])
def test_blocks_hold_every_pair_once_and_one_expert_each(
    run: Callable[..., Alignment], sizes: tuple[int, ...], skew: int
) -> None:
    """Up to 2,200 pairs: several programs, of which each counts several tiles; 8,744 pairs: what
    these programs counted is added up, of 256 experts 8 programs' counts at a time."""
    tokens, num_experts, per_token, block_rows = sizes
    generator = torch.Generator().manual_seed(skew)
    logits = torch.rand(tokens, num_experts, generator=generator)
    logits[:, : num_experts // 2] += skew - 1  # with a skew the upper half gets few, or none
    ids = logits.topk(per_token).indices.int()
    order, blocks = run(ids, whole(num_experts), block_rows)
    assert sorted(order.tolist()) == list(range(tokens * per_token))
    assert len(blocks) == max_blocks(tokens * per_token, num_experts, block_rows)
    flat, covered = ids.flatten()[order.long()].tolist(), 0
    for expert, begin, end in blocks.tolist():
        if end > begin:
            assert begin == covered
            assert end - begin <= block_rows
            assert flat[begin:end] == [expert] * (end - begin)
            covered = end
    assert covered == tokens * per_token
    wanted = moe_align_reference(ids, whole(num_experts), block_rows)
    assert torch.equal(order, wanted.order)
    assert torch.equal(blocks, wanted.blocks)


@pytest.mark.parametrize("sizes", [(1, 8, 8, 16), (40, 6, 3, 2), (520, 5, 2, 64)], ids=str)
def test_blocks_of_ranks_are_those_of_one_process_by_their_experts(sizes: tuple[int, ...]) -> None:
    tokens, num_experts, per_token, block_rows = sizes
    ids = torch.rand(tokens, num_experts, generator=torch.Generator().manual_seed(tokens))
    ids = ids.topk(per_token).indices.int()
    alone, joined = align(ids, whole(num_experts), block_rows), []
    for rank in range(3):
        held = Parallel(rank, 3).spread(num_experts)
        found, wanted = align(ids, held, block_rows), moe_align_reference(ids, held, block_rows)
        assert torch.equal(found.order, alone.order)
        assert torch.equal(found.blocks, wanted.blocks)
        assert len(found.blocks) == max_blocks(ids.numel(), held.size, block_rows)
        joined += [[e + held.first, b, end] for e, b, end in found.blocks.tolist() if end > b]
    assert joined == [block for block in alone.blocks.tolist() if block[2] > block[1]]


@pytest.mark.usefixtures("full_of_nonsense")
def test_pairs_of_one_expert_keep_their_order() -> None:
    ids = torch.randint(0, 7, (90, 3), generator=torch.Generator().manual_seed(3)).int()
    found, wanted = align(ids, whole(7), 16), moe_align_reference(ids, whole(7), 16)
    assert torch.equal(found.order, wanted.order)
    assert torch.equal(found.blocks, wanted.blocks)


def test_no_routing_needs_more_blocks_than_max_blocks() -> None:
    """Every split of 9 pairs over 3 experts, at every block size."""
    for rows in range(1, 10):
        most = max(
            -(-a // rows) - (-b // rows) - (-(9 - a - b) // rows)
            for a in range(10)
            for b in range(10 - a)
        )
        assert most == max_blocks(9, 3, rows)
