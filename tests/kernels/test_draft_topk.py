"""draft_topk: the op and its Triton kernels against a stable sort and a softmax of torch."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline.core.errors import KernelArgumentError
from paceline.kernels._triton.draft_topk import launch_draft_topk
from paceline.kernels.draft_topk import DraftNoise, TopDrafts, draft_topk
from paceline.layers.sampling import gumbel
from paceline.runner.recording.recorded import RecordedGraph

Run = Callable[..., TopDrafts]
BLOCK = 64  # small vocabularies have several


def run_op(
    logits: Tensor, k: int, *, noise: DraftNoise | None = None, d2t: Tensor | None = None
) -> TopDrafts:
    drawn = noise or make_noise(len(logits))
    return draft_topk(logits, k, **drawn._asdict(), d2t=d2t, noise=noise is not None)


def run_triton(
    logits: Tensor, k: int, *, noise: DraftNoise | None = None, d2t: Tensor | None = None
) -> TopDrafts:
    shape = (logits.shape[0], k)
    out = TopDrafts(torch.full(shape, -77), torch.full(shape, math.nan))
    launch_draft_topk(logits, out, noise=noise, d2t=d2t, block_vocab=BLOCK)
    return out


# The interpreter computes with NumPy, which warns where a number wraps or is not finite.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
RUNS = pytest.mark.parametrize("run", [run_op, run_triton], ids=["op", "triton"])


def make_noise(rows: int, *, seed: int = 0) -> DraftNoise:
    """Every third row draws none."""
    generator = torch.Generator().manual_seed(seed)
    temperature = torch.rand(rows, generator=generator) * 1.5 + 0.1
    temperature[::3] = 0.0
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    return DraftNoise(temperature, seeds, torch.randint(0, 10_000, (rows,), generator=generator))


def make_logits(rows: int, vocab: int, *, seed: int = 0) -> Tensor:
    """Rows lie apart, as a slice of a wider tensor."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, 2 * vocab, generator=generator) * 3)[:, :vocab]


def sorted_drafts(logits: Tensor, k: int) -> TopDrafts:
    order = logits.double().sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return TopDrafts(order, logits.double().log_softmax(-1).gather(1, order).float())


def assert_same(found: TopDrafts, wanted: TopDrafts, *, atol: float = 1e-6) -> None:
    assert torch.equal(found.tokens, wanted.tokens)
    torch.testing.assert_close(found.scores, wanted.scores, rtol=1e-5, atol=atol)


@RUNS
@pytest.mark.parametrize("sizes", [(1, 1), (64, 4), (131, 1), (131, 16), (70, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_drafts_are_the_largest_logits_with_their_log_softmax(
    run: Run, sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    vocab, k = sizes
    logits = make_logits(3, vocab, seed=vocab + k).to(dtype)
    assert_same(run(logits, k), sorted_drafts(logits, k))


@RUNS
def test_ties_go_to_the_lowest_draft_ids_within_and_across_blocks(run: Run) -> None:
    logits = torch.full((3, 200), -5.0)
    logits[0, [199, 64, 63, 4, 3]] = 2.0
    logits[1, [150, 20]] = 7.0
    logits[2] = 0.0
    logits[2, ::2] = -0.0
    found = run(logits, 4).tokens.tolist()
    assert found == [[3, 4, 63, 64], [20, 150, 0, 1], [0, 1, 2, 3]]


@RUNS
def test_the_worked_example_holds(run: Run) -> None:
    logits, d2t = torch.tensor([[1.0, 3.0, 3.0, math.nan]]), torch.tensor([5, 5, 7, 7])
    found = run(logits, 2, d2t=d2t)
    assert found.tokens.tolist() == [[6, 9]]
    assert found.scores.tolist()[0] == pytest.approx([-0.7586, -0.7586], abs=1e-4)


@RUNS
def test_rows_that_sample_draw_the_noise_of_the_target(run: Run) -> None:
    """Of the target's token ids: the draft vocabulary is every second of it."""
    logits, noise = make_logits(7, 150), make_noise(7)
    d2t = torch.arange(150)
    every_token = gumbel(noise.seeds, noise.positions, 300)
    drawn = every_token[:, ::2] * noise.temperature[:, None]
    wanted = sorted_drafts(logits + drawn, 4)
    found = run(logits, 4, noise=noise, d2t=d2t)
    assert_same(found, wanted._replace(tokens=wanted.tokens * 2), atol=2e-5)
    plain = run(logits, 4, d2t=d2t)
    same = (plain.tokens == found.tokens).all(1)
    assert same.tolist() == [row % 3 == 0 for row in range(7)]


def test_the_noise_of_the_kernel_is_the_noise_of_the_sampler() -> None:
    """Of 4,096 tokens each, both tails included: the argmax is among the largest."""
    noise = DraftNoise(torch.ones(3), torch.tensor([0, -1, 77]), torch.tensor([0, 5, 10**6]))
    out = TopDrafts(torch.zeros(3, 16, dtype=torch.int64), torch.zeros(3, 16))
    launch_draft_topk(torch.zeros(3, 4096), out, noise=noise, d2t=None, block_vocab=4096)
    drawn = gumbel(noise.seeds, noise.positions, 4096)
    wanted = sorted_drafts(drawn, 16)
    assert_same(out, wanted, atol=2e-5)


@RUNS
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_give_different_tokens_in_range(run: Run, bad: float) -> None:
    logits = torch.stack((torch.full((131,), bad), make_logits(1, 131)[0]))
    for noise in (None, make_noise(2)._replace(temperature=torch.ones(2))):
        found = run(logits, 16, noise=noise)
        assert found.scores[0].tolist() == [-math.inf] * 16
        assert found.scores[1].isfinite().all()
        for tokens in found.tokens.tolist():
            assert len(set(tokens) & set(range(131))) == 16


@RUNS
def test_a_nan_among_numbers_counts_as_minus_infinity(run: Run) -> None:
    logits = make_logits(2, 131)
    wanted = logits.masked_fill(torch.arange(131) % 5 == 0, -math.inf)
    logits[:, ::5] = math.nan
    assert_same(run(logits, 6), sorted_drafts(wanted, 6))


@RUNS
def test_a_block_of_impossible_tokens_has_no_share(run: Run) -> None:
    logits = make_logits(2, 131)
    logits[:, : BLOCK + 3] = -math.inf
    assert_same(run(logits, 6), sorted_drafts(logits, 6))


@RUNS
def test_no_rows_give_no_drafts(run: Run) -> None:
    assert run(torch.empty(0, 131), 2).tokens.shape == (0, 2)


def test_the_op_replays_on_new_logits_and_seeds() -> None:
    logits, noise, kept = make_logits(4, 90), make_noise(4), []
    graph = RecordedGraph(poison=True)
    graph.capture(lambda: kept.append(run_op(logits, 3, noise=noise)))
    logits.copy_(make_logits(4, 90, seed=9))
    noise.seeds.copy_(make_noise(4, seed=9).seeds)
    graph.replay()
    assert_same(kept[0], run_op(logits, 3, noise=noise))


def test_bad_arguments_are_named_with_what_was_expected() -> None:
    logits, noise = torch.zeros(2, 8), make_noise(2)
    with pytest.raises(KernelArgumentError, match=r"logits must be float32, bfloat16 or float16"):
        run_op(logits.long(), 2)
    with pytest.raises(KernelArgumentError, match=r"k must be 1 to 8, got 9; lower --spec"):
        run_op(logits, 9)
    with pytest.raises(KernelArgumentError, match=r"k must be 1 to 16, got 17"):
        run_op(torch.zeros(2, 80), 17)
    with pytest.raises(KernelArgumentError, match=r"d2t must be int64 \[8\], as many as logits"):
        run_op(logits, 2, d2t=torch.zeros(7, dtype=torch.int64))
    with pytest.raises(KernelArgumentError, match=r"seeds must be contiguous int64 \[2\], one per"):
        run_op(logits, 2, noise=noise._replace(seeds=noise.seeds[:1]))
