"""The keyed noise of kernels/gumbel.py within a kernel, equal up to the rounding of float32."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

NEAR = tl.constexpr(1e-3)  # far above what quick logarithms are off


@triton.jit
def splitmix64(
    state,  # uint64
    index,  # uint64
):
    """Output number `index` of the SplitMix64 stream that starts at `state`; all wraps."""
    return _mix(state + (index + 1) * 0x9E3779B97F4A7C15)


@triton.jit
def _mix(
    bits,  # uint64
):
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    return bits ^ (bits >> 31)


@triton.jit
def gumbel_at(
    seed,  # int64
    position,  # int64
    token_ids,  # [tokens] int64, below 2^32 - 1
):
    """[tokens] float32 standard Gumbel noise."""
    x = _uniform_at(seed, position, token_ids)
    rest = 1.0 - x
    lost = (rest - 1.0) + x  # what 1 - x loses by rounding; 0 from 1/2 on
    return -tl.log(lost * (2.0 - rest) - tl.log(rest))


@triton.jit
def near_gumbel_at(
    seed,  # int64
    position,  # int64
    token_ids,  # [tokens] int64, below 2^32 - 1
    LIBDEVICE: tl.constexpr,
):
    """[tokens] float32: the noise by quick logarithms, less than NEAR off.

    -log(1 - x) is its series up to x^4 below 1/8, where that is 5e-5 of it off.
    """
    x = _uniform_at(seed, position, token_ids)
    series = x * (1.0 + x * (0.5 + x * (0.3333333 + x * 0.25)))
    exponential = tl.where(x < 0.125, series, -_quick_log(1.0 - x, LIBDEVICE))
    return -_quick_log(exponential, LIBDEVICE)


@triton.jit
def _quick_log(
    x,  # float32 above 0
    LIBDEVICE: tl.constexpr,
):
    return libdevice.fast_logf(x) if LIBDEVICE else tl.log(x)


@triton.jit
def _uniform_at(
    seed,  # int64
    position,  # int64
    token_ids,  # [tokens] int64, below 2^32 - 1
):
    """[tokens] float32 in (0, 1), of 40 random bits each.

    What is of 32 bits is computed in 32: the bits become a float by two halves, of which the first
    is exact, and the sum is rounded once.
    """
    by_seed = splitmix64(seed.to(tl.uint64, bitcast=True), tl.zeros((1,), tl.uint64))
    by_position = splitmix64(by_seed, position.to(tl.uint64, bitcast=True))
    steps = (token_ids.to(tl.uint32) + 1).to(tl.uint64)
    bits = _mix(by_position + steps * 0x9E3779B97F4A7C15)
    high, low = (bits >> 32).to(tl.uint32), bits.to(tl.uint32)
    first = (high >> 8).to(tl.int32, bitcast=True).to(tl.float32)  # 24 bits
    last = (((high & 255) << 8) | (low >> 24)).to(tl.int32, bitcast=True).to(tl.float32)
    uniform = (first * 65536.0 + last + 0.5) * 9.094947017729282e-13
    return tl.minimum(uniform, 1.0 - 5.960464477539063e-08)
