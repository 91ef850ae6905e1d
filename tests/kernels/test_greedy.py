"""greedy: the op and its Triton kernels against torch's argmax."""

import math

import pytest
import torch
from torch import Tensor

from paceline.core.errors import KernelArgumentError
from paceline.kernels.greedy import greedy

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def run_triton(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks of 64 tokens, so that small vocabularies have several."""
    from paceline.kernels._triton.greedy import launch_greedy

    token_ids = torch.full(logits.shape[:1], -77)
    finite = torch.ones(logits.shape[0], dtype=torch.bool)
    launch_greedy(logits, token_ids, finite, block_vocab=64)
    return token_ids, finite


RUNS = pytest.mark.parametrize("run", [greedy, run_triton], ids=["op", "triton"])


@RUNS
@pytest.mark.parametrize("vocab", [1, 64, 131, 1000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_token_is_the_argmax(run: object, vocab: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(5, 2 * vocab, generator=generator) * 3).to(dtype)[:, :vocab]
    token_ids, finite = run(logits)
    assert torch.equal(token_ids, logits.float().argmax(-1))
    assert (token_ids.dtype, finite.tolist()) == (torch.int64, [True] * 5)


@RUNS
def test_ties_go_to_the_lowest_token_within_and_across_blocks(run: object) -> None:
    logits = torch.full((4, 200), -5.0)
    for row, tied in enumerate([(3, 4), (199, 7), (64, 63), (150, 129)]):
        logits[row, list(tied)] = 2.0
    logits = torch.cat([logits, torch.zeros(1, 200)])
    logits[4, ::2] = -0.0
    assert run(logits)[0].tolist() == [3, 7, 63, 129, 0]


@RUNS
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_that_is_not_finite_gets_token_zero_and_says_so(
    run: object, bad: float, dtype: torch.dtype
) -> None:
    logits = torch.randn(6, 131, generator=torch.Generator().manual_seed(0)).to(dtype)
    wanted = logits.float().argmax(-1)
    for row, token in ((0, 0), (2, 77), (5, 130)):
        logits[row, token] = bad
        wanted[row] = 0
    token_ids, finite = run(logits)
    assert finite.tolist() == [False, True, False, True, True, False]
    assert torch.equal(token_ids, wanted)


@RUNS
def test_the_largest_numbers_are_finite(run: object) -> None:
    limit = torch.finfo(torch.float16).max
    logits = torch.full((2, 70), limit, dtype=torch.float16)
    logits[1] = -limit
    token_ids, finite = run(logits)
    assert (token_ids.tolist(), finite.tolist()) == ([0, 0], [True, True])


@RUNS
def test_no_rows_give_no_tokens(run: object) -> None:
    token_ids, finite = run(torch.empty(0, 131))
    assert (token_ids.shape, finite.shape) == ((0,), (0,))


@pytest.mark.parametrize(
    "logits",
    [torch.zeros(4), torch.zeros(2, 4, dtype=torch.int32), torch.zeros(4, 2).T],
    ids=["shape", "dtype", "stride"],
)
def test_bad_argument_is_named_with_what_was_expected(logits: Tensor) -> None:
    text = r"logits must be float32, bfloat16 or float16 \[num_rows, vocab\], contiguous rows, got"
    with pytest.raises(KernelArgumentError, match=text):
        greedy(logits)
