"""What layers of linear attention hand to their backends, by kind."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from paceline.attention.linear.shape import GDN, MAMBA2

NORM_EPS = 1e-6  # in the norms of a gated delta net's queries and keys


class GdnInputs(NamedTuple):
    """Gated delta net (arXiv:2412.06464): a token's rows before the convolution."""

    qkv: Tensor  # [padded_tokens, key_heads, channels // key_heads]  a head's query, key, values
    conv_weight: Tensor  # [channels, width]  the token's own tap last
    decay: Tensor  # [padded_tokens, value_heads]  float32  log; at most 0
    beta: Tensor  # [padded_tokens, value_heads]  float32  0 to 1


class Mamba2Inputs(NamedTuple):
    """Mamba 2 (arXiv:2405.21060): a token's rows before the convolution."""

    xbc: Tensor  # [padded_tokens, channels]  values x, keys B, queries C, head by head
    conv_weight: Tensor  # [channels, width]  the token's own tap last
    conv_bias: Tensor | None  # [channels]
    decay: Tensor  # [padded_tokens, value_heads]  float32  log; at most 0
    dt: Tensor  # [padded_tokens, value_heads]  float32  times x is what is written
    skip: Tensor  # [value_heads]  times x is added to what is read


INPUTS: Mapping[str, Any] = {GDN: GdnInputs, MAMBA2: Mamba2Inputs}
