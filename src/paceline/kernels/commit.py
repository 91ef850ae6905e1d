"""commit: what a step changed, back into the rows of its requests; and the results the host reads.

A row is frozen at an end token or a stop id (the token itself is emitted), at its length limit, or
when its logits are not finite (no token is emitted); the first of these codes in the order failed,
stopped, at its limit is the one reported.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.core.padding import PAD_PREFIX_LEN, PAD_ROW
from paceline.core.step import FinishCode
from paceline.kernels._check import reject
from paceline.kernels.custom_op import define_op


class CommittedRows(NamedTuple):
    """The columns that commit writes, one row per request; row 0 holds the padding facts."""

    kv_committed: Tensor  # [rows]  int32  tokens whose KV is in the cache
    finish: Tensor  # [rows]  int32  FinishCode
    token_ids: Tensor  # [rows, max_tokens]  int32


class EndRules(NamedTuple):
    """When a row is finished."""

    stop_ids: Tensor  # [rows, max_stop_ids]  int64  unused entries equal no token
    max_len: Tensor  # [rows]  int64  finished once this many tokens are known


class StepTokens(NamedTuple):
    """What a step knows of its requests, and what it sampled."""

    facts: Tensor  # [padded_reqs, 3]  int32  row, extend length, emits (0 or 1)
    row_ids: Tensor  # [padded_reqs]  int64  padding: PAD_ROW
    kv_lens: Tensor  # [padded_reqs]  int32
    token_ids: Tensor  # [padded_reqs]  int64  sampled
    finite: Tensor  # [padded_reqs]  bool  False: the row's logits held NaN or inf


def commit_reference(
    rows: CommittedRows, ends: EndRules, step: StepTokens, results: Tensor
) -> None:
    """The definition, and the CPU's path; arguments and mutation as `commit`."""
    is_live = step.row_ids != PAD_ROW
    wants_token = is_live & (step.facts[:, 2] != 0)
    emits = wants_token & step.finite

    kv_committed = step.kv_lens.where(is_live, PAD_PREFIX_LEN)
    rows.kv_committed.index_copy_(0, step.row_ids, kv_committed)

    # Rows that emit nothing write token 0 at [PAD_ROW, 0], all of them the same value.
    column = step.kv_lens * emits
    flat_index = step.row_ids * emits * rows.token_ids.shape[1] + column
    token_ids = (step.token_ids * emits).int()
    rows.token_ids.view(-1).index_copy_(0, flat_index, token_ids)

    finish = _finish_codes(ends, step, emits=emits, failed=wants_token & ~step.finite)
    rows.finish.index_copy_(0, step.row_ids, finish)
    torch.stack((emits.int(), token_ids, finish), dim=1, out=results)


def _finish_codes(
    ends: EndRules,
    step: StepTokens,
    *,
    emits: Tensor,  # [padded_reqs]  bool
    failed: Tensor,  # [padded_reqs]  bool  wanted a token, logits not finite
) -> Tensor:
    """[padded_reqs]  int32  FinishCode of each row after this step."""
    stop_ids = ends.stop_ids.index_select(0, step.row_ids)
    is_stop = (stop_ids == step.token_ids.unsqueeze(1)).any(1) & emits
    known = step.kv_lens + 1
    at_limit = (known >= ends.max_len.index_select(0, step.row_ids)) & emits
    codes = at_limit.int().mul_(int(FinishCode.LENGTH))
    codes.masked_fill_(is_stop, int(FinishCode.STOP_TOKEN))
    return codes.masked_fill_(failed, int(FinishCode.NON_FINITE))


def _commit_cuda(*tensors: Tensor) -> None:
    from paceline.kernels._triton.commit import launch_commit

    rows, ends = CommittedRows(*tensors[:3]), EndRules(*tensors[3:5])
    launch_commit(rows, ends, StepTokens(*tensors[5:10]), tensors[10])


_COMMIT = define_op(
    "commit(Tensor(a!) kv_committed, Tensor(b!) finish, Tensor(c!) history, Tensor stop_ids, "
    "Tensor max_len, Tensor facts, Tensor row_ids, Tensor kv_lens, Tensor token_ids, "
    "Tensor finite, Tensor(d!) results) -> ()",
    cpu=None,
    cuda=_commit_cuda,
)


def commit(rows: CommittedRows, ends: EndRules, step: StepTokens, results: Tensor) -> None:
    """Advance every live row to its kv_len; append and emit the token of rows that emit.

    results: [padded_reqs, 3] int32 emitted (0 or 1), token id (0 where none), FinishCode.  Mutates
    `rows` and `results`; row 0 keeps the padding facts.  A live row is in a step once.  On a CPU
    these are torch's operators, which a recorded graph replays on fixed storages.  Graph-safe: the
    grid depends on shapes only.  Raises KernelArgumentError.
    """
    reqs = step.row_ids.shape[0]
    if step.token_ids.shape != (reqs,) or step.token_ids.dtype != torch.int64:
        reject(
            "token_ids",
            expected=f"int64 [{reqs}]",
            got=step.token_ids,
            remedy="pass what was sampled at each request's last token",
        )
    if results.shape != (reqs, 3) or not results.is_contiguous():
        reject(
            "results",
            expected=f"int32 [{reqs}, 3]",
            got=results,
            remedy="pass the first rows of the step's results",
        )
    if results.device.type == "cpu":
        commit_reference(rows, ends, step, results)
        return
    _COMMIT(*rows, *ends, *step, results)
