"""chain_rows: the rows of a finished step as a drafter takes them in.

Its draft at position p learns from the token at p + 1, which the history knows once the step is
committed: the prompt's next token, an accepted draft, or what was sampled.  After a tree the rows
that were accepted stand first, in the order of their tokens.

Worked example: one request, history [.. a c y] at the positions 7, 8, 9, the last without KV, so
9 tokens committed; a tree of 4 rows of which 0 and 2 were accepted, path [0, 2, 2].

    positions  [7, 8, 9, 10]
    next_ids   [c, y, y, y]      behind the last accepted row: the newest token that is known
    tap_rows   [0, 2, 2, 3]      path, then each row's own index
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.kernels._check import reject
from paceline.kernels.custom_op import define_op
from paceline.kernels.stand_in import device_type


class StepRows(NamedTuple):
    """Where a step's tokens stand, as a causal chain."""

    row_ids: Tensor  # [padded_reqs]  int64
    req_ids: Tensor  # [padded_tokens]  int64
    positions: Tensor  # [padded_tokens]  int64


class ChainRows(NamedTuple):
    """What chain_rows writes."""

    next_ids: Tensor  # [padded_tokens]  int64  the token behind each
    tap_rows: Tensor | None  # [padded_tokens]  int64  row that computed it; None: each its own


def chain_rows_reference(
    history: Tensor, kv_committed: Tensor, rows: StepRows, out: ChainRows, *, path: Tensor | None
) -> None:
    """The definition, and the CPU's path; arguments and mutation as `chain_rows`."""
    token_rows = rows.row_ids.index_select(0, rows.req_ids)
    behind = torch.minimum(rows.positions + 1, kv_committed.index_select(0, token_rows))
    index = token_rows * history.shape[1] + behind
    out.next_ids.copy_(history.view(-1).index_select(0, index))
    if path is None:
        return
    assert out.tap_rows is not None
    reqs, max_path = path.shape
    own = torch.arange(out.tap_rows.shape[0], device=path.device).view(reqs, -1)
    tap_rows = out.tap_rows.view(reqs, -1)
    tap_rows.copy_(own)
    torch.add(path, own[:, :1], out=tap_rows[:, :max_path])


def _chain_rows_cuda(history: Tensor, kv_committed: Tensor, *fields: Any) -> None:
    from paceline.kernels._triton.chain_rows import launch_chain_rows

    rows, path, out = StepRows(*fields[:3]), fields[3], ChainRows(*fields[4:])
    launch_chain_rows(history, kv_committed, rows, out, path=path)


_CHAIN_ROWS = define_op(
    "chain_rows(Tensor history, Tensor kv_committed, Tensor row_ids, Tensor req_ids, "
    "Tensor positions, Tensor? path, Tensor(a!) next_ids, Tensor(b!)? tap_rows) -> ()",
    cpu=None,
    cuda=_chain_rows_cuda,
)


def chain_rows(
    history: Tensor,
    kv_committed: Tensor,
    rows: StepRows,
    out: ChainRows,
    *,
    path: Tensor | None = None,
) -> None:
    """Fill `out` in place: the token behind each row, and after a tree whose row it is.

    history: [table rows, max_tokens] int32, contiguous; kv_committed: [table rows] int32, after the
    step's commit: where in its history a request's newest token stands, which rows further on read
    too, so that no row learns from a token that nobody said.
    path: [padded_reqs, max_path] int64 of commit, where every request brought as many
    rows; None: rows are in the order of their tokens.  On a CPU these are torch's operators, which
    a recorded graph replays on fixed storages.  Graph-safe: the grid depends on shapes only.
    Raises KernelArgumentError.
    """
    tokens = rows.positions.shape
    if history.dim() != 2 or history.dtype != torch.int32 or not history.is_contiguous():
        reject(
            "history",
            expected="contiguous int32 [table rows, max_tokens]",
            got=history,
            remedy="pass the request table's own token_ids",
        )
    if kv_committed.dtype != torch.int32 or kv_committed.shape != history.shape[:1]:
        reject(
            "kv_committed",
            expected=f"int32 [{history.shape[0]}], one for each row of history",
            got=kv_committed,
            remedy="pass the request table's own kv_committed",
        )
    for name, tensor in {"next_ids": out.next_ids, "tap_rows": out.tap_rows}.items():
        if tensor is None and path is None:
            continue
        if tensor is None or tensor.dtype != torch.int64 or tensor.shape != tokens:
            reject(
                name,
                expected=f"int64 {list(tokens)}",
                got=tensor,
                remedy="pass an entry for each row of the step",
            )
    if device_type(history.device) == "cpu":
        chain_rows_reference(history, kv_committed, rows, out, path=path)
        return
    _CHAIN_ROWS(history, kv_committed, *rows, path, *out)
