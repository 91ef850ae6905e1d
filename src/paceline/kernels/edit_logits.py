"""edit_logits: logit bias, penalties and min tokens, each on the few logits it names.

The definition is the built-in processors of layers/sampling/built_in.py, in their order, which
compute every logit of every row.  Here a row costs what it asks for: its biased ids, its own
history, its stop ids.  A row that asks for nothing is not touched.
"""

from functools import reduce
from operator import or_
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.request.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_IDS, Asks
from paceline.kernels._check import reject
from paceline.kernels.custom_op import Run, define_op, host_array

NO_DRAFT = -1
_BIAS, _PENALISE, _MIN_TOKENS = int(Asks.BIAS), int(Asks.PENALISE), int(Asks.MIN_TOKENS)
_PLACES = np.arange(max(MAX_LOGIT_BIAS, MAX_STOP_IDS))


class SampledRows(NamedTuple):
    """Where each row of logits stands, and what is known before it.

    Known are the first positions[n] - (drafts of row n) tokens of token_ids[rows[n]], then the
    drafts of row n.
    """

    rows: Tensor  # [num_rows]  int64  row of the request table
    positions: Tensor  # [num_rows]  int64  tokens known before the one to sample
    token_ids: Tensor  # [table rows, max_tokens]  int32
    drafts: Tensor | None  # [num_rows, width]  int64  NO_DRAFT: none; None: no row has any


class Edits(NamedTuple):
    """Columns of the request table: what its rows ask, by table row."""

    asks: Tensor  # [table rows]  int64  Asks
    bias_ids: Tensor  # [table rows, MAX_LOGIT_BIAS]  int64
    bias_values: Tensor  # [table rows, MAX_LOGIT_BIAS]  float32
    bias_count: Tensor  # [table rows]  int64  the first so many count
    repetition: Tensor  # [table rows]  float32  1 = none
    presence: Tensor  # [table rows]  float32  0 = none
    frequency: Tensor  # [table rows]  float32  0 = none
    prompt_len: Tensor  # [table rows]  int64  tokens
    min_len: Tensor  # [table rows]  int64  no stop while fewer tokens are known
    stop_ids: Tensor  # [table rows, MAX_STOP_IDS]  int64
    num_stop_ids: Tensor  # [table rows]  int64  the first so many count


class HostEdits(NamedTuple):
    """`Edits` as arrays over their memory."""

    asks: NDArray[np.int64]
    bias_ids: NDArray[np.int64]
    bias_values: NDArray[np.float32]
    bias_count: NDArray[np.int64]
    repetition: NDArray[np.float32]
    presence: NDArray[np.float32]
    frequency: NDArray[np.float32]
    prompt_len: NDArray[np.int64]
    min_len: NDArray[np.int64]
    stop_ids: NDArray[np.int64]
    num_stop_ids: NDArray[np.int64]

    @staticmethod
    def over(edits: Edits) -> "HostEdits":
        return HostEdits(*map(host_array, edits))


class HostRows(NamedTuple):
    """`SampledRows` as arrays over their memory."""

    rows: NDArray[np.int64]
    positions: NDArray[np.int64]
    token_ids: NDArray[np.int32]
    drafts: NDArray[np.int64] | None

    @staticmethod
    def over(at: SampledRows) -> "HostRows":
        drafts = None if at.drafts is None else host_array(at.drafts)
        rows, positions, token_ids = map(host_array, at[:3])
        return HostRows(rows, positions, token_ids, drafts)


class Undo(NamedTuple):
    """Logits before an edit."""

    rows: NDArray[np.int64] | int  # [ids], or of all; of the logits
    ids: NDArray[np.int64]  # [ids]
    values: NDArray[np.float32]  # [ids]


def kinds_of(asks: NDArray[np.int64]) -> int:
    """What any of the rows asks: `Asks`.  asks: [num_rows]."""
    return reduce(or_, set(asks.tolist()), 0)


def rows_that_ask(asks: NDArray[np.int64], kind: int) -> NDArray[np.int64]:
    """The rows of the logits that ask for `kind`: [rows].  asks: [num_rows] Asks."""
    # numpy's loops take an array at once; a scalar is looked at in each call.
    ns: NDArray[np.int64] = (asks & np.array(kind)).nonzero()[0]
    return ns


def edit_rows(
    logits: NDArray[np.float32],
    asks: NDArray[np.int64],
    kinds: int,
    at: HostRows,
    host: HostEdits,
) -> list[Undo]:
    """Edit the rows that ask, in place; returns what `undo_edits` takes.

    logits: [num_rows, vocab]; asks: [num_rows] Asks of each; kinds: `kinds_of` them.
    """
    undo: list[Undo] = []
    vocab = logits.shape[1]
    if kinds & _BIAS:
        ns = rows_that_ask(asks, _BIAS)
        rows, ids, places = _listed(ns, at, host.bias_ids, host.bias_count, vocab)
        values = logits[rows, ids]
        undo.append(Undo(rows, ids, values))
        bias = host.bias_values[at.rows[rows], places]
        logits[rows, ids] = values + bias  # a row has each id once
    if kinds & _PENALISE:
        for n in rows_that_ask(asks, _PENALISE).tolist():
            row, of_row = at.rows[n], logits[n]
            ids, num_prompt = _history(at, n, host.prompt_len[row], vocab=vocab)
            undo.append(Undo(n, ids, of_row[ids]))
            of_row[ids] = _penalised(of_row, ids, ids[num_prompt:], host, row)
    if kinds & _MIN_TOKENS:
        ns = rows_that_ask(asks, _MIN_TOKENS)
        ns = ns[at.positions[ns] < host.min_len[at.rows[ns]]]
        if len(ns):
            rows, ids, _ = _listed(ns, at, host.stop_ids, host.num_stop_ids, vocab)
            undo.append(Undo(rows, ids, logits[rows, ids]))
            logits[rows, ids] = -np.inf
    return undo


def undo_edits(logits: NDArray[np.float32], undo: list[Undo]) -> None:
    """Put back what `edit_rows` changed."""
    for rows, ids, values in reversed(undo):
        logits[rows, ids] = values


def _listed(
    ns: NDArray[np.int64],
    at: HostRows,
    ids: NDArray[np.int64],
    counts: NDArray[np.int64],
    vocab: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """What a table lists for the rows `ns` of the logits, but for ids outside the vocabulary:
    (row of the logits, id, place in its list), each [listed].

    ids: [table rows, width]; counts: [table rows] the first so many count.
    """
    rows = at.rows[ns]
    counts = counts[rows]
    each = counts.tolist()
    most = max(each)
    listed = ids[:, :most][rows]
    # An id below 0 is a large number.
    is_token = listed.view(np.uint64) < np.array(vocab, np.uint64)
    if min(each) < most:
        is_token &= _PLACES[:most] < counts[:, None]
    which, places = is_token.nonzero()
    return ns[which], listed[which, places], places


def _history(
    at: HostRows, n: int, prompt_len: np.int64, *, vocab: int
) -> tuple[NDArray[np.int64], int]:
    """The ids that row `n` knows, in order: [known]; and how many of them are prompt."""
    drafts = at.rows[:0] if at.drafts is None else at.drafts[n]
    drafts = drafts[drafts != NO_DRAFT]
    num_old = int(at.positions[n]) - len(drafts)
    ids = np.concatenate((at.token_ids[at.rows[n], :num_old].astype(np.int64), drafts))
    is_token = (ids >= 0) & (ids < vocab)
    return ids[is_token], int(np.count_nonzero(is_token[:prompt_len]))


def _penalised(
    logits: NDArray[np.float32],
    known: NDArray[np.int64],
    said: NDArray[np.int64],
    host: HostEdits,
    row: np.int64,
) -> NDArray[np.float32]:
    """The products and sums of `Penalties.apply`; an id known twice gets the same value twice.

    logits: [vocab]; known: [known] ids, of which `said` are output.  Returns [known].
    """
    counts = np.zeros(len(logits), dtype=np.float32)
    np.add.at(counts, said, np.float32(1))
    num_output, values = counts[known], logits[known]
    repetition = host.repetition[row]
    values = np.where(values < 0, values * repetition, values / repetition)
    presence = host.presence[row] * (num_output > 0).astype(np.float32)
    edited: NDArray[np.float32] = values - presence - host.frequency[row] * num_output
    return edited


def _bind_edit_logits(logits: Tensor, *fields: Tensor | None) -> Run:
    at = HostRows.over(SampledRows(*fields[:4]))  # type: ignore[arg-type]
    edits = HostEdits.over(Edits(*fields[4:]))  # type: ignore[arg-type]
    values = host_array(logits)

    def run() -> None:
        asks = edits.asks[at.rows]
        edit_rows(values, asks, kinds_of(asks), at, edits)

    return run


def _edit_logits_cuda(logits: Tensor, *fields: Tensor | None) -> None:
    from paceline.kernels._triton.edit_logits import launch_edit_logits, zero_counts

    at, edits = SampledRows(*fields[:4]), Edits(*fields[4:])  # type: ignore[arg-type]
    launch_edit_logits(logits, zero_counts(logits), at, edits)


def _scratch(logits: Tensor, *_: Tensor | None) -> tuple[int, ...]:
    """How often each row has each token."""
    return (4 * logits.numel(),)


ROWS_SCHEMA = "Tensor rows, Tensor positions, Tensor token_ids, Tensor? drafts"
EDITS_SCHEMA = ", ".join(f"Tensor {name}" for name in Edits._fields)
_EDIT_LOGITS = define_op(
    f"edit_logits(Tensor(a!) logits, {ROWS_SCHEMA}, {EDITS_SCHEMA}) -> ()",
    bind=_bind_edit_logits,
    cuda=_edit_logits_cuda,
    scratch=_scratch,
)


def edit_logits(logits: Tensor, at: SampledRows, edits: Edits) -> None:
    """Apply what the rows ask, in place.

    logits: [num_rows, vocab] float32, the last dimension contiguous.  Ids outside the vocabulary
    touch nothing.  Mutates logits alone.  Recordable.  Raises KernelArgumentError.
    """
    if logits.ndim != 2 or logits.dtype != torch.float32 or logits.stride(1) != 1:
        reject(
            "logits",
            expected="float32 [num_rows, vocab], contiguous rows",
            got=logits,
            remedy="pass a copy in float32",
        )
    _EDIT_LOGITS(logits, *at, *edits)
