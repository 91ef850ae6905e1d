"""Keyed Gumbel noise: the published generator, the right law, and nothing of the batch in it."""

import math

import numpy as np
import pytest
import torch

from paceline.core.request.sampling_params import MAX_COMPLETIONS
from paceline.core.seeds import child_seed
from paceline.kernels.gumbel import splitmix64
from paceline.layers.sampling.noise import coins, draft_seeds, gumbel

# Outputs of the SplitMix64 reference code for seed 1234567 (Rosetta Code, "Pseudo-random
# numbers/Splitmix64").
PUBLISHED = (
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
)
LONG = torch.int64


def test_splitmix64_gives_the_published_outputs():
    bits = splitmix64(torch.tensor(1234567), torch.arange(5))
    assert tuple(value % 2**64 for value in bits.tolist()) == PUBLISHED


@pytest.mark.parametrize("state", [0, -1, 2**63 - 1, -(2**63), 0x1234567890ABCDEF])
def test_splitmix64_equals_unsigned_arithmetic(state):
    bits = splitmix64(torch.tensor(state), torch.arange(50))
    assert [value % 2**64 for value in bits.tolist()] == _splitmix64_python(state, 50)


def _splitmix64_python(state: int, count: int) -> list[int]:
    outputs = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = state % 2**64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        outputs.append(z ^ (z >> 31))
    return outputs


def _sample_noise(seed: int = 5, rows: int = 100, vocab_size: int = 2000) -> np.ndarray:
    seeds = torch.full((rows,), seed, dtype=LONG)
    return gumbel(seeds, torch.arange(rows), vocab_size).double().numpy()


def _ks_statistic(values: np.ndarray) -> float:
    ranked = np.sort(values.ravel())
    n = len(ranked)
    cdf = np.exp(-np.exp(-ranked))
    steps = np.arange(n + 1) / n
    return max(np.abs(cdf - steps[1:]).max(), np.abs(cdf - steps[:-1]).max()) * math.sqrt(n)


def test_noise_follows_the_gumbel_law():
    noise = _sample_noise()
    assert abs(noise.mean() - 0.5772156649) < 0.01  # Euler's constant
    assert abs(noise.var() - math.pi**2 / 6) < 0.03
    assert _ks_statistic(noise) < 1.63  # the 1% critical value


@pytest.mark.parametrize("axis", ["token", "position", "seed"])
def test_neighbours_along_each_key_are_uncorrelated(axis):
    if axis == "seed":
        seeds = torch.arange(100)
        noise = gumbel(seeds, torch.full((100,), 7, dtype=LONG), 2000).double().numpy()
    else:
        noise = _sample_noise()
    a, b = (noise[:, :-1], noise[:, 1:]) if axis == "token" else (noise[:-1], noise[1:])
    correlation = np.corrcoef(a.ravel(), b.ravel())[0, 1]
    assert abs(correlation) < 4 / math.sqrt(a.size)


def test_noise_depends_on_each_part_of_the_key():
    base = gumbel(torch.tensor([1]), torch.tensor([2]), 64)
    assert (gumbel(torch.tensor([2]), torch.tensor([2]), 64) != base).all()
    assert (gumbel(torch.tensor([1]), torch.tensor([3]), 64) != base).all()
    assert (gumbel(torch.tensor([2]), torch.tensor([1]), 64) != base).all()


def test_noise_is_the_same_bits_in_any_batch():
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**62), 2**62, (37,), generator=generator)
    positions = torch.randint(0, 100_000, (37,), generator=generator)
    whole = gumbel(seeds, positions, 1003)
    for row in range(37):
        alone = gumbel(seeds[row : row + 1], positions[row : row + 1], 1003)
        assert torch.equal(alone[0], whole[row])
    order = torch.randperm(37, generator=generator)
    assert torch.equal(gumbel(seeds[order], positions[order], 1003), whole[order])


def test_noise_of_a_token_does_not_depend_on_the_vocabulary_size():
    seeds, positions = torch.tensor([3]), torch.tensor([4])
    assert torch.equal(gumbel(seeds, positions, 500)[:, :77], gumbel(seeds, positions, 77))


def test_noise_is_finite_at_both_ends_of_the_uniform(monkeypatch):
    ends = torch.tensor([[0, -1]])
    monkeypatch.setattr("paceline.kernels.gumbel.splitmix64", lambda state, index: ends)
    noise = gumbel(torch.tensor([0]), torch.tensor([0]), 2)
    assert noise.tolist()[0] == pytest.approx(
        [41 * math.log(2), -math.log(24 * math.log(2))], rel=1e-6
    )


def test_argmax_with_noise_draws_from_the_softmax():
    num_draws = 40_000
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -3.0])
    noise = gumbel(torch.full((num_draws,), 11, dtype=LONG), torch.arange(num_draws), 6)
    counts = torch.bincount((logits + noise).argmax(-1), minlength=6).double()
    expected = torch.softmax(logits.double(), 0) * num_draws
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_square < 15.09  # 5 degrees of freedom, 1%


def test_every_use_of_a_seed_has_a_stream_of_its_own():
    """Coins are no outputs of the stream of drafts, and no completion's seed is that of drafts."""
    seeds, positions = torch.arange(5), torch.arange(5) + 30
    drafts = draft_seeds(seeds)
    of_drafts = splitmix64(drafts, positions) & (2**40 - 1)
    assert not torch.isclose(coins(seeds, positions), of_drafts * 2.0**-40).any()
    for seed, other in zip(seeds.tolist(), drafts.tolist(), strict=True):
        assert other not in {child_seed(seed, index) for index in range(MAX_COMPLETIONS + 1)}
