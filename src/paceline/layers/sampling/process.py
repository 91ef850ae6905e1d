"""Logits processors, defined once over rows = request x position.

Order: logit bias, repetition penalty, presence and frequency penalties, min tokens; then
temperature, top-k, top-p, min-p, the order in which `transformers` applies its processors and
warpers (generation/utils.py, `_get_logits_processor`).  Each with its neutral parameter returns
its input bit for bit.  Everything is stateless: penalties count the token history anew at every
call, so neither preemption nor speculation can leave a wrong count behind.  Device-only, static
shapes, recordable.
"""

import torch
from torch import Tensor

from paceline.layers.sampling.table import SamplingTable

_WEIGHT_SCALE = 2.0**40  # fixed point of top-p masses: a sum over 2^22 tokens stays in int64


def process_logits(
    logits: Tensor, *, rows: Tensor, positions: Tensor, table: SamplingTable, token_ids: Tensor
) -> Tensor:
    """Logit bias, penalties and min tokens: [num_rows, vocab] float32, a new tensor.

    logits: [num_rows, vocab] float32; rows, positions: [num_rows] int64 (table row; tokens known
    before the one to sample); token_ids: [table rows, max_tokens] int32, the known tokens first.
    """
    biased = _add_bias(logits, rows, table)
    penalised = _penalise(biased, rows, positions, table, token_ids)
    return _forbid_stop(penalised, rows, positions, table)


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


def _add_bias(logits: Tensor, rows: Tensor, table: SamplingTable) -> Tensor:
    ids = table.bias_ids[rows]  # [num_rows, MAX_LOGIT_BIAS]
    used = _is_used(ids, table.num_bias[rows], logits.shape[-1])
    values = table.bias_values[rows].masked_fill(~used, 0.0)
    return logits.scatter_add(1, ids.masked_fill(~used, 0), values)


def _penalise(
    logits: Tensor, rows: Tensor, positions: Tensor, table: SamplingTable, token_ids: Tensor
) -> Tensor:
    """Repetition penalty over prompt and output (Keskar et al., "CTRL", 2019, in the sign-aware
    form of transformers' RepetitionPenaltyLogitsProcessor), then OpenAI's presence and frequency
    penalties over output: logit − presence·[count > 0] − frequency·count.
    """
    vocab_size = logits.shape[-1]
    index = torch.arange(token_ids.shape[1], device=logits.device)[None, :]
    history = token_ids[rows].to(torch.int64)  # [num_rows, max_tokens]
    is_known = (index < positions[:, None]) & (history >= 0) & (history < vocab_size)
    is_output = is_known & (index >= table.prompt_len[rows][:, None])
    # Columns past the history, and all of a padded row, hold anything: they add 0, spread over
    # the vocabulary so that no single address takes every atomic addition.
    ids = torch.where(is_known, history, index % vocab_size)
    zeros = torch.zeros_like(logits, dtype=torch.int32)
    num_seen = zeros.scatter_add(1, ids, is_known.to(torch.int32))
    num_output = zeros.scatter_add(1, ids, is_output.to(torch.int32))

    repetition = table.repetition[rows][:, None]
    repeated = torch.where(logits < 0, logits * repetition, logits / repetition)
    logits = torch.where(num_seen > 0, repeated, logits)
    presence = table.presence[rows][:, None] * (num_output > 0)
    return logits - presence - table.frequency[rows][:, None] * num_output


def _forbid_stop(logits: Tensor, rows: Tensor, positions: Tensor, table: SamplingTable) -> Tensor:
    ids = table.stop_ids[rows]  # [num_rows, MAX_STOP_IDS]
    used = _is_used(ids, table.num_stop_ids[rows], logits.shape[-1])
    forbidden = used & (positions < table.min_len[rows])[:, None]
    values = torch.zeros_like(ids, dtype=torch.float32).masked_fill_(forbidden, float("-inf"))
    return logits.scatter_add(1, ids.masked_fill(~used, 0), values)


def _is_used(ids: Tensor, counts: Tensor, vocab_size: int) -> Tensor:
    """Which id columns hold a token of the vocabulary: [num_rows, width] bool."""
    column = torch.arange(ids.shape[1], device=ids.device)[None, :]
    return (column < counts[:, None]) & (ids >= 0) & (ids < vocab_size)
