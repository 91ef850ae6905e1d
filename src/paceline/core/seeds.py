"""SplitMix64 in host integers, and the seeds of a request's completions; see kernels/gumbel.py."""

GOLDEN_GAMMA, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = 2**64


def splitmix64(state: int, index: int) -> int:
    """Output number `index` (from 0) of the stream that starts at `state`: 64 bits, unsigned.

    state, index: signed or not.
    """
    bits = (state + (index + 1) * GOLDEN_GAMMA) % _WORD
    bits = (bits ^ (bits >> 30)) * MIX_1 % _WORD
    bits = (bits ^ (bits >> 27)) * MIX_2 % _WORD
    return bits ^ (bits >> 31)


def child_seed(seed: int, index: int) -> int:
    """The seed of completion `index` of a request, as an int64: `seed` itself for the first, then
    the outputs of its stream.
    """
    if index == 0:
        return seed
    bits = splitmix64(seed, index)
    return bits - _WORD if bits >= _WORD // 2 else bits
