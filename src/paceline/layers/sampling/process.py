"""Logits processors and filters, defined once over rows = request x position.

Order: the processors of the table, built-in ones first; then temperature, top-k, top-p, min-p, the
order in which `transformers` applies its processors and warpers (generation/utils.py,
`_get_logits_processor`).  Device-only, static shapes, recordable.
"""

import torch
from torch import Tensor

from paceline.core.errors import KernelArgumentError, message
from paceline.layers.sampling.table import SamplingTable

_WEIGHT_SCALE = 2.0**40  # fixed point of top-p masses: a sum over 2^22 tokens stays in int64


def process_logits(
    logits: Tensor,
    *,
    rows: Tensor,
    positions: Tensor,
    table: SamplingTable,
    token_ids: Tensor,
    histories: Tensor | None = None,
) -> Tensor:
    """Every processor of `table` in order: [num_rows, vocab] float32, a new tensor.

    logits: [num_rows, vocab] float32; rows, positions: [num_rows] int64 (table row; tokens known
    before the one to sample); token_ids: [table rows, max_tokens] int32, the known tokens first.
    histories: [num_rows, max_tokens] int32, where rows of one request know different tokens (nodes
    of a tree of drafts): a processor then finds every row's columns and tokens at the row's own
    index.  Raises KernelArgumentError when a processor returns another shape or dtype.
    """
    at = rows if histories is None else torch.arange(rows.shape[0], device=rows.device)
    for stage in table.stages:
        state = (
            table.state(stage, token_ids)
            if histories is None
            else table.state_of_rows(stage, rows, histories)
        )
        changed = stage.processor.apply(logits, at, positions, state)
        if changed.shape != logits.shape or changed.dtype != torch.float32:
            raise KernelArgumentError(
                message(
                    f"logits returned by {type(stage.processor).__name__}",
                    expected=f"float32 {list(logits.shape)}",
                    got=f"{changed.dtype} {list(changed.shape)}",
                    remedy="return a changed copy of the logits it was given",
                )
            )
        logits = changed
    return logits


def keep_mask(scaled: Tensor, *, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Which tokens may be sampled: [num_rows, vocab] bool; the most likely one always may.

    scaled: [num_rows, vocab] float32, logits / temperature with the row's maximum at 0;
    top_k: [num_rows] int64; top_p, min_p: [num_rows] float32.  The cut of top-k and of top-p is a
    value, so tokens tied with the last one kept are kept too, whatever their ids.  Masses are
    summed in fixed point, where the order of summation cannot matter.
    """
    ranked = torch.sort(scaled, dim=-1, descending=True).values
    last_k = top_k.clamp(max=scaled.shape[-1])[:, None] - 1
    k_cut = ranked.gather(-1, last_k)  # [num_rows, 1]

    weights = torch.exp(ranked).mul_(_WEIGHT_SCALE).to(torch.int64)
    weights = weights.masked_fill_(ranked < k_cut, 0)
    mass_before = weights.cumsum(-1) - weights
    wanted = weights.sum(-1, keepdim=True).to(torch.float64) * top_p[:, None]
    num_wanted = (mass_before.to(torch.float64) < wanted).sum(-1, keepdim=True).clamp_(min=1)
    p_cut = ranked.gather(-1, num_wanted - 1)
    p_cut = torch.where(top_p[:, None] < 1.0, p_cut, k_cut)

    return (scaled >= torch.maximum(k_cut, p_cut)) & (torch.exp(scaled) >= min_p[:, None])
