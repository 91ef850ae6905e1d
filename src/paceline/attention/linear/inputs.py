"""What layers of linear attention hand to their backends, by kind."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from paceline.attention.linear.shape import GDN, MAMBA2
from paceline.kernels.decay_rates import RawRates

NORM_EPS = 1e-6  # in the norms of a gated delta net's queries and keys
# Of each value head: the decay, log and at most 0, and the rate, each [padded_tokens, value_heads]
# float32; or what they are made of, for backends whose kernels make them.
HeadRates = RawRates | tuple[Tensor, Tensor]


def made_rates(rates: HeadRates) -> tuple[Tensor, Tensor]:
    """(decay, rate), each [padded_tokens, value_heads] float32."""
    return rates.made() if isinstance(rates, RawRates) else rates


class GdnInputs(NamedTuple):
    """Gated delta net (arXiv:2412.06464): a token's rows before the convolution."""

    qkv: Tensor  # [padded_tokens, key_heads, channels // key_heads]  a head's query, key, values
    conv_weight: Tensor  # [channels, width]  the token's own tap last
    rates: HeadRates  # the rate is beta, 0 to 1


class Mamba2Inputs(NamedTuple):
    """Mamba 2 (arXiv:2405.21060): a token's rows before the convolution."""

    xbc: Tensor  # [padded_tokens, channels]  values x, keys B, queries C, head by head
    conv_weight: Tensor  # [channels, width]  the token's own tap last
    conv_bias: Tensor | None  # [channels]
    rates: HeadRates  # the rate is dt, which times x is what is written
    skip: Tensor  # [value_heads]  times x is added to what is read


INPUTS: Mapping[str, Any] = {GDN: GdnInputs, MAMBA2: Mamba2Inputs}
