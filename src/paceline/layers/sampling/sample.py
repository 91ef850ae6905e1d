"""sample: from logits to tokens, the same function in every phase and at every position."""

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.errors import KernelArgumentError
from paceline.core.request.sampling_params import SamplerTier
from paceline.kernels.draw import draw, draw_reference, scores_reference
from paceline.kernels.edit_logits import SampledRows, edit_logits
from paceline.kernels.greedy import greedy
from paceline.kernels.mask_tokens import Masks, mask_tokens, rows_are_finite
from paceline.layers.sampling.logprobs import token_logprobs
from paceline.layers.sampling.noise import coins
from paceline.layers.sampling.process import process_logits
from paceline.layers.sampling.rejection import DrawnDrafts, PlainRows, reject
from paceline.layers.sampling.table import SamplingTable


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sampled:
    """What was sampled at each row.  Log-probabilities are natural logs of the raw distribution:
    before masks, bias, penalties, temperature and filters.  Rows that are not finite hold token 0
    and meaningless log-probabilities.
    """

    token_ids: Tensor  # [num_rows]  int64
    finite: Tensor  # [num_rows]  bool  False: the row's logits held NaN or inf
    chosen_logprob: Tensor | None  # [num_rows]  float32
    top_ids: Tensor | None  # [num_rows, min(top_logprobs, vocab)]  int64  most likely first
    top_values: Tensor | None  # [num_rows, min(top_logprobs, vocab)]  float32


def unsampled(num_rows: int, like: Tensor) -> Sampled:
    """Token 0 at each row: of a step none of whose rows wants a token.  like: int64."""
    finite = torch.ones(num_rows, dtype=torch.bool, device=like.device)
    return Sampled(
        token_ids=like.new_zeros(num_rows),
        finite=finite,
        chosen_logprob=None,
        top_ids=None,
        top_values=None,
    )


def sample(
    logits: Tensor,
    *,
    rows: Tensor,
    positions: Tensor,
    table: SamplingTable,
    token_ids: Tensor,
    tier: SamplerTier,
    top_logprobs: int,
    drafts: Tensor | None = None,
    histories: Tensor | None = None,
    drawn: DrawnDrafts | None = None,
    masks: Masks | None = None,
) -> Sampled:
    """One token per row: argmax(logits / temperature + Gumbel noise) over the tokens that pass
    the filters, or the plain argmax where the temperature is 0.  Ties go to the lowest id.  Where
    `drawn` drafts are verified, requests that sample take those that `reject` keeps.

    logits: [num_rows, vocab] float32, bfloat16 or float16, raw; rows: [num_rows] int64 rows of the
    table; positions: [num_rows] integers, the index the sampled token will have, which is the
    number of tokens known before it; token_ids: [table rows, max_tokens] int32 history.  Where
    rows of one request know different tokens: drafts, [num_rows, width] int64, those that each
    row knows behind its request's history (SampledRows); and histories, [num_rows, max_tokens]
    int32, each row's own, read where plug-ins run.  drawn: of rows that are chains
    behind each request's root, read unless the tier is greedy.  masks: the tokens that each row may
    take; a copy of the logits is masked before anything else sees it.  Python branches on `tier`,
    `top_logprobs` (0 = none) and what is None; mutates nothing; no host reads; recordable.
    Raises KernelArgumentError.
    """
    if not logits.is_floating_point() or logits.ndim != 2:
        got = f"{logits.dtype} {list(logits.shape)}"
        remedy = "pass what the language-model head returned"
        raise KernelArgumentError.about(
            "logits", expected="floating-point [num_rows, vocab]", got=got, remedy=remedy
        )
    allowed = logits
    if masks is not None:
        allowed = logits.clone()
        mask_tokens(allowed, masks)
    if tier is SamplerTier.GREEDY:
        chosen, finite = greedy(allowed, masks)
    else:
        at = SampledRows(rows, positions.long(), token_ids, drafts)
        if tier is SamplerTier.BY_ROW and drawn is None:
            chosen, finite = draw(allowed, at, table.laws, table.edits, masks)
        else:
            finite = rows_are_finite(allowed, masks)
            plug_ins = tier is SamplerTier.PLUG_INS
            processed = _processed(allowed, at, table, histories, plug_ins=plug_ins)
            chosen = _draw_or_reject(processed, at, table, drawn).masked_fill(~finite, 0)
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


def _processed(
    logits: Tensor,
    at: SampledRows,
    table: SamplingTable,
    histories: Tensor | None,
    *,
    plug_ins: bool,
) -> Tensor:
    """[num_rows, vocab] float32: a copy of the logits as their requests want them."""
    if plug_ins:
        return process_logits(
            logits.float(),
            rows=at.rows,
            positions=at.positions,
            table=table,
            token_ids=at.token_ids,
            histories=histories,
        )
    copy = logits.to(torch.float32, copy=True)
    edit_logits(copy, at, table.edits)
    return copy


def _draw_or_reject(
    logits: Tensor, at: SampledRows, table: SamplingTable, drawn: DrawnDrafts | None
) -> Tensor:
    """[num_rows] int64: a sample of each row, by the definition; of rows of temperature 0, the
    argmax.  logits: [num_rows, vocab] float32, processed.
    """
    laws = table.laws.of(at.rows)
    if drawn is None:
        return draw_reference(logits, laws, at.positions)
    plain = scores_reference(logits, laws, at.positions)
    drafts = (laws.temperature > 0) & (table.max_drafts[at.rows] > 0)
    toss = coins(laws.seed, at.positions)
    return reject(PlainRows(*plain, toss, drafts), drawn)
