"""draw: one token of each row by the row's own parameters: argmax, or a sample of its law.

A row of temperature 0 takes the first of its largest logits.  Any other takes the largest of
(logits - their maximum) * (1 / temperature) + Gumbel noise, among the tokens that top-k, top-p and
min-p keep.  `draw_reference` is the definition; the kernels skip, row by row, what cannot change
the answer: filters that are off, noise of tokens that are filtered out or cannot win.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.request.sampling_params import Asks
from paceline.kernels.custom_op import Run, define_op, host_array
from paceline.kernels.draw_cpu import RowLaw, draw_row
from paceline.kernels.edit_logits import (
    EDITS_SCHEMA,
    ROWS_SCHEMA,
    Edits,
    HostEdits,
    HostRows,
    SampledRows,
    edit_rows,
    kinds_of,
    rows_that_ask,
    undo_edits,
)
from paceline.kernels.gumbel import gumbel_at
from paceline.kernels.keep_mask import keep_mask
from paceline.kernels.mask_tokens import Masks, bind_rows_are_finite, require_logits

_DRAWS = int(Asks.DRAW)
TOKENS_OF_BLOCK = 2048  # of a row, of one program on a GPU
BUCKETS = 16  # of a block, between which the cut of a filter is looked for
_SMALL_VOCAB = 8192  # below it the rows that sample go together through the definition


class Laws(NamedTuple):
    """Columns of the request table: what its rows draw from, by table row."""

    temperature: Tensor  # [table rows]  float32  0 = greedy
    top_k: Tensor  # [table rows]  int64
    top_p: Tensor  # [table rows]  float32  1 = keep all
    min_p: Tensor  # [table rows]  float32  0 = keep all
    seed: Tensor  # [table rows]  int64

    def of(self, rows: Tensor) -> "Laws":
        """The columns of `rows` [num_rows] int64, in that order."""
        return Laws(*(column[rows] for column in self))


class Scores(NamedTuple):
    """What the definition compares."""

    scores: Tensor  # [num_rows, vocab]  float32  their argmax is the token
    law: (
        Tensor  # [num_rows, vocab]  float32  (logits - maximum) * (1 / temperature), -inf: filtered
    )
    noise: Tensor  # [num_rows, vocab]  float32  standard Gumbel


def scores_reference(logits: Tensor, laws: Laws, positions: Tensor) -> Scores:
    """The definition, over rows that are finite.

    logits: [num_rows, vocab] float32, edited; laws: of each row; positions: [num_rows] int64.  The
    maximum is subtracted before the product, and 1 / temperature is finite: nothing becomes NaN.
    """
    temperature = laws.temperature[:, None]
    is_greedy = temperature == 0
    inverse = 1.0 / temperature.masked_fill(is_greedy, 1.0)
    scaled = logits - logits.amax(-1, keepdim=True)
    scaled = scaled * inverse.clamp(max=torch.finfo(torch.float32).max)
    keep = keep_mask(scaled, top_k=laws.top_k, top_p=laws.top_p, min_p=laws.min_p)
    scaled.masked_fill_(~keep, float("-inf"))
    token_ids = torch.arange(logits.shape[1], device=logits.device)
    noise = gumbel_at(laws.seed, positions, token_ids)
    return Scores(torch.where(is_greedy, logits, scaled + noise), scaled, noise)


def draw_reference(logits: Tensor, laws: Laws, positions: Tensor) -> Tensor:
    """[num_rows] int64: the definition's tokens; ties go to the lowest id.  Arguments as above."""
    return scores_reference(logits, laws, positions).scores.argmax(-1)


def _bind_draw(logits: Tensor, *fields: Tensor | None) -> Run:
    at = SampledRows(*fields[:4])  # type: ignore[arg-type]
    laws, edits = Laws(*fields[4:9]), Edits(*fields[9:-3])  # type: ignore[arg-type]
    mask_ids, token_ids, finite = fields[-3:]
    assert token_ids is not None
    assert finite is not None
    host_at, host_laws = HostRows.over(at), tuple(map(host_array, laws))
    host_edits, is_finite = HostEdits.over(edits), host_array(finite)
    note_finite = bind_rows_are_finite(mask_ids, finite)
    chosen = host_array(token_ids)
    given = host_array(logits) if logits.dtype == torch.float32 else None

    def draw_rows(wide: Tensor, values: NDArray[np.float32], ns: NDArray[np.int64]) -> None:
        """Draw for the rows `ns` of the logits, edited."""
        if wide.shape[1] <= _SMALL_VOCAB:
            some = torch.from_numpy(ns)
            rows = laws.of(at.rows[some])
            chosen[ns] = draw_reference(wide[some], rows, at.positions[some]).numpy()
            return
        for n in ns.tolist():
            row = host_at.rows[n]
            of_row = [column[row].item() for column in host_laws]
            law = RowLaw._make([*of_row, int(host_at.positions[n])])
            chosen[n] = draw_row(values[n], int(chosen[n]), law)

    def run() -> None:
        wide = logits.float()
        note_finite(wide)
        values = host_array(wide) if given is None else given
        asks = host_edits.asks[host_at.rows]
        kinds = kinds_of(asks)
        undo = edit_rows(values, asks, kinds, host_at, host_edits)
        try:
            values.argmax(-1, out=chosen)
            if kinds & _DRAWS:
                ns = rows_that_ask(asks, _DRAWS)
                draw_rows(wide, values, ns[is_finite[ns]])
        finally:
            undo_edits(values, undo)
        chosen[~is_finite] = 0

    return run


def _draw_cuda(logits: Tensor, *fields: Tensor | None) -> None:
    from paceline.kernels._triton.draw import launch_draw

    at = SampledRows(*fields[:4])  # type: ignore[arg-type]
    laws, edits = Laws(*fields[4:9]), Edits(*fields[9:-3])  # type: ignore[arg-type]
    mask_ids, token_ids, finite = fields[-3:]
    assert token_ids is not None
    assert finite is not None
    launch_draw(logits, at, laws, edits, token_ids, finite, mask_ids=mask_ids)


def _scratch(logits: Tensor, *_: Tensor | None) -> tuple[int, ...]:
    """Edited logits, what is known of blocks and rows, masses and sums of blocks, keys, cuts; how
    often each token is known is gone when its keys are made."""
    rows, vocab = logits.shape
    blocks, entries = rows * -(-vocab // TOKENS_OF_BLOCK), 4 * rows * vocab
    known = (8 * blocks, 4 * blocks, 4 * rows, 20 * rows, 12 * rows)
    return entries, *known, 4 * BUCKETS * blocks, 8 * rows, 16 * blocks, entries, 4 * rows


_LAWS_SCHEMA = ", ".join(f"Tensor {name}" for name in Laws._fields)
_DRAW = define_op(
    f"draw(Tensor logits, {ROWS_SCHEMA}, {_LAWS_SCHEMA}, {EDITS_SCHEMA}, "
    "Tensor? mask_ids, Tensor(a!) drawn, Tensor(b!) finite) -> ()",
    bind=_bind_draw,
    cuda=_draw_cuda,
    scratch=_scratch,
)


def draw(
    logits: Tensor, at: SampledRows, laws: Laws, edits: Edits, masks: Masks | None = None
) -> tuple[Tensor, Tensor]:
    """(token_ids [num_rows] int64, finite [num_rows] bool); a row that is not finite gets token 0.

    logits: [num_rows, vocab] float32, bfloat16 or float16, raw, the last dimension contiguous;
    masks: of logits behind `mask_tokens`, where the -inf of a row that has one is no fault.
    Every row costs what it asks for.  Mutates nothing: on a CPU float32 logits hold their edits
    while the operator runs.  Recordable.  Raises KernelArgumentError.
    """
    require_logits(logits)
    num_rows = logits.shape[:1]
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    finite = torch.empty(num_rows, dtype=torch.bool, device=logits.device)
    mask_ids = None if masks is None else masks.ids
    _DRAW(logits, *at, *laws, *edits, mask_ids, token_ids, finite)
    return token_ids, finite
