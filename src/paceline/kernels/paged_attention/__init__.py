"""Attention over a paged KV cache: the definition, split-KV decode, and extend."""

from paceline.kernels.paged_attention.call import PagedCache, PagedCall, PagedRows, Weighing
from paceline.kernels.paged_attention.decode import paged_decode
from paceline.kernels.paged_attention.extend import paged_extend
from paceline.kernels.paged_attention.reference import paged_attention_reference
from paceline.kernels.paged_attention.shared_prefix import (
    SharedPrefixes,
    SharingRule,
    find_shared,
    shared_prefixes,
    sharing_rule,
)
from paceline.kernels.paged_attention.splits import (
    SplitWorkspace,
    decode_splits,
    split_workspace,
)

__all__ = [
    "PagedCache",
    "PagedCall",
    "PagedRows",
    "SharedPrefixes",
    "SharingRule",
    "SplitWorkspace",
    "Weighing",
    "decode_splits",
    "find_shared",
    "paged_attention_reference",
    "paged_decode",
    "paged_extend",
    "shared_prefixes",
    "sharing_rule",
    "split_workspace",
]
