"""sample: from logits to tokens, the same function in every phase and at every position."""

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.errors import KernelArgumentError, message
from paceline.core.sampling_params import SamplerTier
from paceline.kernels.greedy import greedy
from paceline.layers.sampling.logprobs import token_logprobs
from paceline.layers.sampling.noise import coins, gumbel
from paceline.layers.sampling.process import keep_mask, process_logits
from paceline.layers.sampling.rejection import DrawnDrafts, PlainRows, reject
from paceline.layers.sampling.table import SamplingTable


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sampled:
    """What was sampled at each row.  Log-probabilities are natural logs of the raw distribution:
    before bias, penalties, temperature and filters.  Rows that are not finite hold token 0 and
    meaningless log-probabilities.
    """

    token_ids: Tensor  # [num_rows]  int64
    finite: Tensor  # [num_rows]  bool  False: the row's logits held NaN or inf
    chosen_logprob: Tensor | None  # [num_rows]  float32
    top_ids: Tensor | None  # [num_rows, min(top_logprobs, vocab)]  int64  most likely first
    top_values: Tensor | None  # [num_rows, min(top_logprobs, vocab)]  float32


def sample(
    logits: Tensor,
    *,
    rows: Tensor,
    positions: Tensor,
    table: SamplingTable,
    token_ids: Tensor,
    tier: SamplerTier,
    top_logprobs: int,
    histories: Tensor | None = None,
    drawn: DrawnDrafts | None = None,
) -> Sampled:
    """One token per row: argmax(logits / temperature + Gumbel noise) over the tokens that pass
    the filters, or the plain argmax where the temperature is 0.  Ties go to the lowest id.  Where
    `drawn` drafts are verified, requests that sample take those that `reject` keeps.

    logits: [num_rows, vocab] float32, bfloat16 or float16, raw; rows: [num_rows] int64 rows of the
    table; positions: [num_rows] integers, the index the sampled token will have, which is the
    number of tokens known before it; token_ids: [table rows, max_tokens] int32 history, the first
    positions[n] entries known; histories: [num_rows, max_tokens] int32, each row's own, where rows
    of one request know different tokens, read by the full tier alone; drawn: of rows that are
    chains behind each request's root, read unless the tier is greedy.  Python branches on `tier`,
    `top_logprobs` (0 = none) and what is None; mutates nothing; no host reads; recordable.
    Raises KernelArgumentError.
    """
    if not logits.is_floating_point() or logits.ndim != 2:
        got = f"{logits.dtype} {list(logits.shape)}"
        remedy = "pass what the language-model head returned"
        raise KernelArgumentError(
            message("logits", expected="floating-point [num_rows, vocab]", got=got, remedy=remedy)
        )
    if tier is SamplerTier.GREEDY:
        chosen, finite = greedy(logits)
    else:
        logits, positions = logits.float(), positions.long()
        # One pass: a NaN or an infinity stays one in the sum, which no real logits can overflow.
        finite = torch.isfinite(logits.sum(-1))
        processed = logits
        if tier is SamplerTier.FULL:
            processed = process_logits(
                logits,
                rows=rows,
                positions=positions,
                table=table,
                token_ids=token_ids,
                histories=histories,
            )
        chosen = _draw(processed, rows, positions, table=table, drawn=drawn)
        chosen = chosen.masked_fill(~finite, 0)
    if not top_logprobs:
        return Sampled(
            token_ids=chosen, finite=finite, chosen_logprob=None, top_ids=None, top_values=None
        )
    logprobs = token_logprobs(logits, chosen, top=top_logprobs)
    return Sampled(
        token_ids=chosen,
        finite=finite,
        chosen_logprob=logprobs.chosen,
        top_ids=logprobs.top_ids,
        top_values=logprobs.top_values,
    )


def _draw(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    *,
    table: SamplingTable,
    drawn: DrawnDrafts | None,
) -> Tensor:
    """[num_rows] int64: a sample of each row; of rows of temperature 0, the argmax.

    The maximum is subtracted before the division, so that no temperature can overflow.
    """
    temperature = table.temperature[rows][:, None]  # [num_rows, 1]
    is_greedy = temperature == 0
    scaled = logits - logits.amax(-1, keepdim=True)
    scaled = scaled / temperature.masked_fill(is_greedy, 1.0)
    keep = keep_mask(
        scaled, top_k=table.top_k[rows], top_p=table.top_p[rows], min_p=table.min_p[rows]
    )
    scaled.masked_fill_(~keep, float("-inf"))
    noise = gumbel(table.seed[rows], positions, logits.shape[-1])
    scores = torch.where(is_greedy, logits, scaled + noise)
    if drawn is None:
        return scores.argmax(-1)
    drafts = ~is_greedy[:, 0] & (table.max_drafts[rows] > 0)
    toss = coins(table.seed[rows], positions)
    return reject(PlainRows(scores, scaled, noise, toss, drafts), drawn)
