"""Log-probabilities of given tokens and of the most likely ones, of a model's distribution."""

from typing import NamedTuple

import torch
from torch import Tensor


class SampledLogprobs(NamedTuple):
    """Natural logs; rows of logits that are not finite hold anything."""

    chosen: Tensor  # [num_rows]  float32
    top_ids: Tensor  # [num_rows, min(top, vocab)]  int64  most likely first
    top_values: Tensor  # [num_rows, min(top, vocab)]  float32


def token_logprobs(logits: Tensor, token_ids: Tensor, *, top: int) -> SampledLogprobs:
    """log softmax of `logits` at `token_ids`, and its `top` largest values.

    logits: [num_rows, vocab], any floating dtype; token_ids: [num_rows] int64.  Device-only,
    static shapes, recordable; mutates nothing.
    """
    logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    best = torch.topk(logprobs, min(top, logits.shape[-1]), dim=-1)
    chosen = logprobs.gather(-1, token_ids[:, None])[:, 0]
    return SampledLogprobs(chosen, best.indices, best.values)
