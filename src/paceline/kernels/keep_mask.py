"""keep_mask: which tokens pass top-k, top-p and min-p.

This is the definition, by sorting.  `kernels/draw.py` finds the same tokens without a sort.
"""

import torch
from torch import Tensor

WEIGHT_SCALE = 2.0**40  # fixed point of top-p masses: a sum over 2^22 tokens stays in int64


def keep_mask(scaled: Tensor, *, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Which tokens may be sampled: [num_rows, vocab] bool; the most likely one always may.

    scaled: [num_rows, vocab] float32, logits by temperature, the row's maximum at 0;
    top_k: [num_rows] int64; top_p, min_p: [num_rows] float32.  The cut of top-k and of top-p is a
    value, so tokens tied with the last one kept are kept too, whatever their ids.  Masses are
    summed in fixed point, where the order of summation cannot matter.
    """
    ranked = torch.sort(scaled, dim=-1, descending=True).values
    last_k = top_k.clamp(max=scaled.shape[-1])[:, None] - 1
    k_cut = ranked.gather(-1, last_k)  # [num_rows, 1]

    weights = torch.exp(ranked).mul_(WEIGHT_SCALE).to(torch.int64)
    weights = weights.masked_fill_(ranked < k_cut, 0)
    mass_before = weights.cumsum(-1) - weights
    wanted = weights.sum(-1, keepdim=True).to(torch.float64) * top_p[:, None]
    num_wanted = (mass_before.to(torch.float64) < wanted).sum(-1, keepdim=True).clamp_(min=1)
    p_cut = ranked.gather(-1, num_wanted - 1)
    p_cut = torch.where(top_p[:, None] < 1.0, p_cut, k_cut)

    return (scaled >= torch.maximum(k_cut, p_cut)) & (torch.exp(scaled) >= min_p[:, None])
