"""Attention over a paged KV cache: the definition, split-KV decode, and extend."""

from paceline.kernels.paged_attention.call import PagedCache, PagedCall, PagedRows, Weighing
from paceline.kernels.paged_attention.decode import paged_decode
from paceline.kernels.paged_attention.extend import paged_extend
from paceline.kernels.paged_attention.reference import paged_attention_reference
from paceline.kernels.paged_attention.splits import (
    SplitWorkspace,
    decode_splits,
    split_workspace,
)

__all__ = [
    "PagedCache",
    "PagedCall",
    "PagedRows",
    "SplitWorkspace",
    "Weighing",
    "decode_splits",
    "paged_attention_reference",
    "paged_decode",
    "paged_extend",
    "split_workspace",
]
