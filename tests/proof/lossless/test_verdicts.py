"""A tie is what rounding can do to a choice, and nothing else is."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.request.sampling_params import SamplerTier, SamplingParams
from paceline.layers.sampling import SamplingTable, sample
from paceline.proof.lossless.verdicts import (
    TIE_ULPS,
    Parting,
    Verdict,
    first_difference,
    gap_ulps,
    part,
)

GREEDY = SamplingParams(temperature=0.0, seed=0)
CPU = torch.device("cpu")
VOCAB = 24


def test_a_greedy_gap_is_counted_in_ulps_at_the_largest_logit():
    logits = torch.tensor([-64.0, 7.0, 8.0])
    gap = gap_ulps(logits, (2, 1), params=GREEDY, position=5, dtype=torch.bfloat16)
    assert gap == 1.0 / (64 * 2**-7)


def test_a_token_behind_the_best_two_is_measured_from_the_best():
    logits = torch.tensor([4.0, 3.9, 3.0])
    gap = gap_ulps(logits, (1, 2), params=GREEDY, position=5, dtype=torch.float16)
    assert gap == pytest.approx(1.0 / (4 * 2**-10))


def test_answers_part_at_the_first_token_that_differs_or_is_missing():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2, 3], [1, 2]) == 2
    assert first_difference([], [1]) == 0


def test_an_answer_that_ends_early_is_a_bug_whatever_the_logits():
    found = part([1, 2], [1], _unread, params=GREEDY, num_known=3, dtype=torch.float32)
    assert found == Parting(index=1, wanted=2, got=None, gap_ulps=None)
    assert found.verdict(torch.float32) is Verdict.BUG


def test_the_logits_are_those_behind_what_both_answers_share():
    seen = []

    def logits_behind(shared):
        seen.append(list(shared))
        return torch.zeros(10)

    found = part(
        [1, 2, 3], [1, 2, 4], logits_behind, params=GREEDY, num_known=3, dtype=torch.float32
    )
    assert seen == [[1, 2]]
    assert found is not None
    assert found.verdict(torch.float32) is Verdict.TIE


def _unread(_):
    raise AssertionError("there is no second token to compare")


def sampled(logits: torch.Tensor, params: SamplingParams, position: int) -> int:
    """What the engine's sampler takes."""
    table = SamplingTable(2, CPU)
    row = table.pack(params, prompt_len=1, max_len=100, eos_token_ids=(), default_seed=0)
    table.floats[1] = torch.from_numpy(row.floats)
    table.ints[1] = torch.from_numpy(row.ints)
    found = sample(
        logits.unsqueeze(0),
        rows=torch.tensor([1]),
        positions=torch.tensor([position]),
        table=table,
        token_ids=torch.zeros(2, 100, dtype=torch.int32),
        tier=SamplerTier.BY_ROW,
        top_logprobs=0,
    )
    return int(found.token_ids)


@settings(deadline=None, max_examples=200)
@given(
    seed=st.integers(0, 10**6),
    temperature=st.sampled_from([0.0, 0.3, 0.8, 2.0]),
    top_p=st.sampled_from([0.3, 0.8, 0.95, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_rounding_alone_never_makes_a_bug(seed, temperature, top_p, dtype):
    """Logits that lie close together, moved by half the bound of a gap each."""
    generator = torch.Generator().manual_seed(seed)
    bound = TIE_ULPS[dtype] * torch.finfo(dtype).eps
    logits = torch.randn(VOCAB, generator=generator) * 4 * bound - 1.0
    logits[::3] = torch.randn(len(logits[::3]), generator=generator)
    noise = (torch.rand(VOCAB, generator=generator) - 0.5) * bound * float(logits.abs().max())
    params = SamplingParams(temperature=temperature, top_p=top_p, seed=seed)
    pair = sampled(logits, params, 7), sampled(logits + noise * 0.99, params, 7)
    gap = gap_ulps(logits, pair, params=params, position=7, dtype=dtype)
    assert gap <= TIE_ULPS[dtype]


def test_a_token_that_top_p_keeps_out_is_never_a_tie():
    logits = torch.tensor([5.0, 4.0, -20.0])
    params = SamplingParams(temperature=0.5, top_p=0.5, seed=3)
    gap = gap_ulps(logits, (0, 2), params=params, position=7, dtype=torch.bfloat16)
    assert math.isinf(gap)


def test_a_seeded_gap_counts_the_noise():
    """Of two equal logits the noise decides: the other one is no tie."""
    logits = torch.zeros(2)
    logits[1] = 1e-6
    params = SamplingParams(temperature=1.0, seed=3)
    logits = torch.cat((logits, torch.tensor([-30.0])))
    winner = sampled(logits, params, 7)
    gap = gap_ulps(logits, (winner, 1 - winner), params=params, position=7, dtype=torch.float32)
    assert gap > TIE_ULPS[torch.float32]
    greedy = gap_ulps(logits, (0, 1), params=GREEDY, position=7, dtype=torch.float32)
    assert greedy < 1
