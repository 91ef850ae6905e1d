"""The keyed noise of kernels/gumbel.py within a kernel, equal up to the rounding of float32."""

import triton
import triton.language as tl


@triton.jit
def splitmix64(
    state,  # uint64
    index,  # uint64
):
    """Output number `index` of the SplitMix64 stream that starts at `state`; all wraps."""
    bits = state + (index + 1) * 0x9E3779B97F4A7C15
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    return bits ^ (bits >> 31)


@triton.jit
def gumbel_at(
    seed,  # int64
    position,  # int64
    token_ids,  # [tokens] int64
):
    """[tokens] float32 standard Gumbel noise."""
    by_seed = splitmix64(seed.to(tl.uint64, bitcast=True), tl.zeros((1,), tl.uint64))
    by_position = splitmix64(by_seed, position.to(tl.uint64, bitcast=True))
    bits = splitmix64(by_position, token_ids.to(tl.uint64, bitcast=True)) >> 24
    uniform = (bits.to(tl.int64, bitcast=True).to(tl.float32) + 0.5) * 9.094947017729282e-13
    exponential = _minus_log1p_minus(tl.minimum(uniform, 1.0 - 5.960464477539063e-08))
    return -tl.log(exponential)


@triton.jit
def _minus_log1p_minus(
    x,  # float32 in (0, 1)
):
    """-log(1 - x), precise for small x too: 2 artanh(x / (2 - x)) by its series below 1/2."""
    ratio = x / (2.0 - x)
    square = ratio * ratio
    series = 1.0 / 15.0
    series = series * square + 1.0 / 13.0
    series = series * square + 1.0 / 11.0
    series = series * square + 1.0 / 9.0
    series = series * square + 1.0 / 7.0
    series = series * square + 1.0 / 5.0
    series = series * square + 1.0 / 3.0
    series = series * square + 1.0
    return tl.where(x < 0.5, 2.0 * ratio * series, -tl.log(tl.maximum(1.0 - x, 5.9e-08)))
