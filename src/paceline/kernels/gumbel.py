"""Keyed Gumbel noise: a pure function of (seed, position, token id).

The generator is SplitMix64 (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators",
OOPSLA 2014; finaliser "Mix13" of David Stafford), entered at any index of its stream and nested
three deep: the seed's stream is split by position, and that one's by token.  The Triton twin is
in _triton/gumbel.py.
"""

import torch
from torch import Tensor


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned 64-bit value."""
    return value - 2**64 if value >= 2**63 else value


_GOLDEN_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Logical shift; torch's own is arithmetic."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def splitmix64(state: Tensor, index: Tensor) -> Tensor:
    """Output number `index` (from 0) of the SplitMix64 stream that starts at `state`.

    state, index: int64, broadcast together; the result holds 64 random bits as int64.  Products
    and sums wrap, as the algorithm wants.
    """
    bits = state + (index + 1) * _GOLDEN_GAMMA
    bits = (bits ^ _shift_right(bits, 30)) * _MIX_1
    bits = (bits ^ _shift_right(bits, 27)) * _MIX_2
    return bits ^ _shift_right(bits, 31)


def gumbel_at(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise [num_rows, num_tokens] float32 for each (seed, position, token id).

    seeds, positions: [num_rows] int64; token_ids: [num_tokens] int64, the same for every row, or
    [num_rows, num_tokens].  With w uniform in (0, 1), −log1p(−w) is exponential and its negative
    log is Gumbel.  The 40 bits behind w put the largest value at 41·ln 2 ≈ 28.4, so the upper
    tail, which decides the argmax, is not cut where float32's 24 bits would cut it.
    """
    by_seed = splitmix64(seeds, torch.zeros_like(seeds))  # [num_rows]
    by_position = splitmix64(by_seed, positions)  # [num_rows]
    return noise_of(_shift_right(splitmix64(by_position[:, None], token_ids), 24))


def noise_of(bits: Tensor) -> Tensor:
    """The noise of 40 random bits each: float32, of the same shape.  bits: int64; low bits are high
    noise."""
    uniform = (bits.to(torch.float32) + 0.5) * 2.0**-40
    uniform = uniform.clamp_(max=1.0 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()
