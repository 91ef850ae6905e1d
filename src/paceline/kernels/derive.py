"""derive: every length, position, offset and table of a step, from the rows of its requests.

Worked example: page size 4; row 3 decodes at length 6, row 5 prefills 3 tokens after a hit of 4.

    facts         rows [3, 5]  extend [1, 3]         one group, page_table rows 3: [7, 2]  5: [9, 4]
    prefix_lens   [6, 4]                             kv_committed of the rows
    kv_lens       [7, 7]                             prefix + extend
    cu_seqlens_q  [0, 1, 4]
    req_ids       [0, 1, 1, 1]                       which request each token belongs to
    positions     [6, 4, 5, 6]                       prefix + offset in the request
    out_cache_loc [2*4+2, 4*4+0, 4*4+1, 4*4+2]       page_table[req, pos // 4] * 4 + pos % 4
    logits_loc    [0, 3]                             last token of each request
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.core.padding import PAD_ROW
from paceline.core.step import FinishCode
from paceline.kernels._check import reject
from paceline.kernels.custom_op import define_op


class RequestRows(NamedTuple):
    """What is known of every request, one row each; row 0 holds the padding facts."""

    kv_committed: Tensor  # [rows]  int32  tokens whose KV is in the cache
    finish: Tensor  # [rows]  int32  FinishCode
    token_ids: Tensor  # [rows, max_tokens]  int32
    page_tables: Sequence[Tensor]  # [num_groups] of [rows, max_pages]  int32


class DerivedStep(NamedTuple):
    """What derive writes; meanings and padding as in step_view.StepView."""

    row_ids: Tensor  # [padded_reqs]  int64
    prefix_lens: Tensor  # [padded_reqs]  int32
    extend_lens: Tensor  # [padded_reqs]  int32
    kv_lens: Tensor  # [padded_reqs]  int32
    cu_seqlens_q: Tensor  # [padded_reqs + 1]  int32  the leading 0 is there already
    logits_loc: Tensor  # [padded_reqs]  int64
    req_ids: Tensor  # [padded_tokens]  int64
    positions: Tensor  # [padded_tokens]  int64
    input_ids: Tensor  # [padded_tokens]  int64
    page_tables: Sequence[Tensor]  # [num_groups] of [padded_reqs, max_pages]  int32
    out_cache_locs: Sequence[Tensor]  # [num_groups] of [padded_tokens]  int64


def derive_reference(
    facts: Tensor,
    rows: RequestRows,
    out: DerivedStep,
    *,
    page_sizes: Sequence[int],
    offsets: Tensor,
) -> None:
    """The definition, and the CPU's path; arguments and mutation as `derive`."""
    reqs, tokens = out.row_ids.shape[0], out.positions.shape[0]
    staged_rows = facts[:reqs, 0].long()
    running = rows.finish.index_select(0, staged_rows) == FinishCode.RUNNING
    torch.mul(staged_rows, running, out=out.row_ids)
    out.extend_lens.copy_(facts[:reqs, 1])
    torch.index_select(rows.kv_committed, 0, out.row_ids, out=out.prefix_lens)
    torch.add(out.prefix_lens, out.extend_lens, out=out.kv_lens)
    torch.cumsum(out.extend_lens, 0, dtype=torch.int32, out=out.cu_seqlens_q[1:])
    torch.sub(out.cu_seqlens_q[1:], 1, out=out.logits_loc)

    offsets = offsets[:tokens]
    torch.searchsorted(out.cu_seqlens_q[1:], offsets, right=True, out=out.req_ids)
    first_position = out.prefix_lens - out.cu_seqlens_q[:-1]
    torch.add(first_position.index_select(0, out.req_ids), offsets, out=out.positions)
    token_rows = out.row_ids.index_select(0, out.req_ids)
    history = rows.token_ids.view(-1)
    token_index = token_rows * rows.token_ids.shape[1] + out.positions
    out.input_ids.copy_(history.index_select(0, token_index))

    is_live = token_rows != PAD_ROW
    for table, table_out, loc_out, page_size in zip(
        rows.page_tables, out.page_tables, out.out_cache_locs, page_sizes, strict=True
    ):
        torch.index_select(table, 0, out.row_ids, out=table_out)
        page_index = token_rows * table.shape[1] + out.positions // page_size
        page = table.view(-1).index_select(0, page_index)
        slot = page.long() * page_size + out.positions % page_size
        torch.mul(slot, is_live, out=loc_out)


def _derive_cuda(facts: Tensor, *fields: Any) -> None:
    from paceline.kernels._triton.derive import launch_derive

    rows, out = RequestRows(*fields[:4]), DerivedStep(*fields[4:15])
    launch_derive(facts, rows, out, page_sizes=fields[15], max_extend_len=fields[16])


_DERIVE = define_op(
    "derive(Tensor facts, Tensor kv_committed, Tensor finish, Tensor token_ids, "
    "Tensor[] page_tables, Tensor(a!) row_ids, Tensor(b!) prefix_lens, Tensor(c!) extend_lens, "
    "Tensor(d!) kv_lens, Tensor(e!) cu_seqlens_q, Tensor(f!) logits_loc, Tensor(g!) req_ids, "
    "Tensor(h!) positions, Tensor(i!) input_ids, Tensor(j!)[] step_page_tables, "
    "Tensor(k!)[] out_cache_locs, int[] page_sizes, int max_extend_len) -> ()",
    cpu=None,
    cuda=_derive_cuda,
)


def derive(
    facts: Tensor,
    rows: RequestRows,
    out: DerivedStep,
    *,
    page_sizes: Sequence[int],
    max_extend_len: int,
    offsets: Tensor,
) -> None:
    """Fill `out` in place from `facts` and `rows`; its shapes say the step's padded size.

    facts: [>= padded_reqs, 3] int32 row, extend length, emits; page_sizes: [num_groups] tokens;
    max_extend_len: no extend length exceeds it; offsets: [>= padded_tokens] int32 0, 1, 2, ...
    A frozen row (its finish code is not RUNNING) becomes a padded row.  The contents of facts are
    trusted: they live on the device.  On a CPU these are torch's operators, which a recorded graph
    replays on fixed storages.  Graph-safe: the grid depends on shapes and on max_extend_len only.
    Raises KernelArgumentError.
    """
    _check_rows(facts, rows)
    if facts.device.type == "cpu":
        derive_reference(facts, rows, out, page_sizes=page_sizes, offsets=offsets)
        return
    _DERIVE(facts, *rows, *out, page_sizes, max_extend_len)


def _check_rows(facts: Tensor, rows: RequestRows) -> None:
    """The kernel reads columns one element apart."""
    tables = {f"page_tables[{i}]": table for i, table in enumerate(rows.page_tables)}
    for name, tensor in {"facts": facts, "token_ids": rows.token_ids, **tables}.items():
        if tensor.dim() != 2 or tensor.dtype != torch.int32 or tensor.stride(1) != 1:
            reject(
                name,
                expected="int32 [rows, columns] with a contiguous last dimension",
                got=tensor,
                remedy="pass the request table's own tensors",
            )
