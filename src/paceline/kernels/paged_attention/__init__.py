"""Attention over a paged KV cache: the definition, split-KV decode, and extend."""

from paceline.kernels.paged_attention.decode import (
    decode_splits,
    decode_workspace,
    paged_decode,
)
from paceline.kernels.paged_attention.extend import paged_extend
from paceline.kernels.paged_attention.reference import paged_attention_reference

__all__ = [
    "decode_splits",
    "decode_workspace",
    "paged_attention_reference",
    "paged_decode",
    "paged_extend",
]
