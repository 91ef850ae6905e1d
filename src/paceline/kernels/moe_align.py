"""moe_align: (token, expert) pairs in the order of their experts, cut into blocks of one expert.

A grouped product walks blocks of at most `block_rows` pairs that share an expert.  How many blocks
there are depends on the routing; `max_blocks` is what no routing exceeds, and blocks past the live
ones are empty.  Example: 3 tokens, 2 experts each, 4 experts, block_rows 2

    expert_ids  [[1, 3], [1, 0], [1, 3]]    pair p is slot p % 2 of token p // 2
    order       [3, 0, 2, 4, 1, 5]          expert 0 has pair 3, expert 1 pairs 0, 2, 4, ...
    blocks      (0, 0, 1), (1, 1, 3), (1, 3, 4), (3, 4, 6), (0, 0, 0)

Of ranks that hold whole experts each has blocks of its own alone, counted from its first:

    of experts 2 and 3 (1, 4, 6), (0, 0, 0), (0, 0, 0), (0, 0, 0)
"""

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.core.parallel import Span


class Alignment(NamedTuple):
    """Where a grouped product finds its rows."""

    order: Tensor  # [tokens * experts_per_token]  int32  pairs, by expert, then as they come
    blocks: Tensor  # [max_blocks, 3]  int32  expert, begin, end in `order`; empty: zeros


def max_blocks(num_pairs: int, num_experts: int, block_rows: int) -> int:
    """Blocks of `num_experts` that no routing exceeds: every expert that can be live opens one, of
    one pair."""
    opened = min(num_pairs, num_experts)
    return opened + (num_pairs - opened) // block_rows


def moe_align_reference(expert_ids: Tensor, experts: Span, block_rows: int) -> Alignment:
    """The definition.  expert_ids: [tokens, experts_per_token] int32; experts: whose blocks."""
    flat = expert_ids.flatten()
    order = flat.argsort(stable=True)
    rows, begin = [], 0
    for expert, count in enumerate(flat.bincount(minlength=experts.total).tolist()):
        if experts.first <= expert < experts.end:
            for start in range(begin, begin + count, block_rows):
                end = min(start + block_rows, begin + count)
                rows.append((expert - experts.first, start, end))
        begin += count
    unused = max_blocks(flat.shape[0], experts.size, block_rows) - len(rows)
    blocks = torch.tensor(rows + [(0, 0, 0)] * unused, dtype=torch.int32).view(-1, 3)
    return Alignment(order.int(), blocks.to(flat.device))
