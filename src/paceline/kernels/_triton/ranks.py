"""Ranks: a float32 and an index in one int64, so that one maximum finds the best and breaks ties.

The order is that of the numbers, -0.0 equal to 0.0; of equal numbers the one of the lowest index
ranks highest.  NaN has no place in it.
"""

import triton
import triton.language as tl

TAKEN = tl.constexpr(-(2**63))  # below every rank


@triton.jit
def rank_of(
    values,  # float32, no NaN
    indices,  # int32 or int64, below 2^31
):
    """int64 ranks, all different where the indices are."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0xFFFFFFFF - indices.to(tl.int64))


@triton.jit
def value_of(ranks):
    """float32 value of a rank."""
    ordered = (ranks >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def index_of(ranks):
    """int64 index of a rank."""
    return 0xFFFFFFFF - (ranks & 0xFFFFFFFF)


@triton.jit
def take_best(
    ranks,  # [entries] int64
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """[BLOCK_K] int64: the K highest ranks, the best first; TAKEN behind them."""
    slots = tl.arange(0, BLOCK_K)
    best = tl.full((BLOCK_K,), TAKEN, tl.int64)
    for slot in tl.static_range(K):
        top = tl.max(ranks, axis=0)
        best = tl.where(slots == slot, top, best)
        ranks = tl.where(ranks == top, TAKEN, ranks)
    return best
