"""What a vendor's kernel should answer: a softmax in float64, one key at a time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Row:
    """One query and what it may look at."""

    query: Tensor  # [heads, dim]
    keys: Tensor  # [keys of its request, kv_heads, dim]
    values: Tensor  # [keys of its request, kv_heads, dim]
    seen: Sequence[int]  # which of them


def by_hand(
    rows: Sequence[Row],
    *,
    scale: float,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out [rows, heads, dim], natural lse [rows, heads]) in float64; a row that sees nothing gets
    0 and -inf.

    sinks: [heads] score of a key without a value; None has none.
    """
    heads, dim = rows[0].query.shape
    out, total = torch.zeros(len(rows), heads, dim).double(), torch.zeros(len(rows), heads).double()
    for index, row in enumerate(rows):
        for head in range(heads):
            kv_head = head // (heads // row.keys.shape[1])
            for key in row.seen:
                product = row.query[head].double() @ row.keys[key, kv_head].double()
                score = scale * float(product)
                if soft_cap is not None:
                    score = soft_cap * math.tanh(score / soft_cap)
                total[index, head] += math.exp(score)
                out[index, head] += math.exp(score) * row.values[key, kv_head].double()
            if sinks is not None:
                total[index, head] += math.exp(sinks[head])
    return (out / total.unsqueeze(2)).nan_to_num(0.0), total.log()


def gathered(cache: Tensor, pages: Sequence[int], keys: int) -> Tensor:
    """[keys, kv_heads, dim] of a cache [pages, page_size, kv_heads, dim]."""
    return cache[list(pages)].flatten(0, 1)[:keys]
