"""derive_rows: every length, position, offset and slot of a step or of a pass of its drafter.

Worked example: page size 4; row 3 decodes at length 6, row 5 prefills 3 tokens after a hit of 4.

    facts         rows [3, 5]  extend [1, 3]         one group, page_table rows 3: [7, 2]  5: [9, 4]
    prefix_lens   [6, 4]                             kv_committed of the rows
    kv_lens       [7, 7]                             prefix + extend
    cu_seqlens_q  [0, 1, 4]
    req_ids       [0, 1, 1, 1]                       which request each token belongs to
    positions     [6, 4, 5, 6]                       prefix + offset in the request
    out_cache_loc [2*4+2, 4*4+0, 4*4+1, 4*4+2]       page_table[req, pos // 4] * 4 + pos % 4
    logits_loc    [0, 3]                             last token of each request

And of a pass over one request of 6 tokens, page-table row [7, 2, 5]: two children of the prefix and
a child of the first.

    parents       [-1, -1, 0]
    prefix_lens   [6]                                committed + advance
    kv_lens       [9]
    positions     [6, 6, 7]                          prefix + depth; a chain: prefix + row
    out_cache_loc [10, 11, 20]                       of 6, 7, 8: rows lie one behind the other
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.core.padding import PAD_PREFIX_LEN, PAD_ROW
from paceline.core.step import FinishCode
from paceline.kernels._check import reject
from paceline.kernels.custom_op import define_op
from paceline.kernels.derive_tree import derive_tree_reference
from paceline.kernels.stand_in import device_type
from paceline.kernels.step_view import GroupView, StepView


class TableRows(NamedTuple):
    """The request table, a row per request, and which of its rows the step runs.

    Row 0 of the table holds the padding facts.  A frozen row (its finish code is not RUNNING)
    becomes a padded row.
    """

    facts: Tensor  # [>= padded_reqs, 3]  int32  row, extend length, emits
    kv_committed: Tensor  # [rows]  int32  tokens whose KV is in the cache
    finish: Tensor  # [rows]  int32  FinishCode
    token_ids: Tensor  # [rows, max_tokens]  int32
    page_tables: Sequence[Tensor]  # [num_groups] of [rows, max_pages]  int32


class PassRows(NamedTuple):
    """A pass of a drafter over the requests of a step, each with as many rows.

    Row ids and page tables are the step's own, and are in the pass's view already.
    """

    committed: Tensor  # [padded_reqs]  int32  the step's prefix_lens
    advance: int  # tokens between those committed and the pass's rows
    parents: Tensor | None  # [padded_reqs, rows]  int32  an earlier row, or -1; None: a chain


def derive_rows_reference(
    source: TableRows | PassRows, view: StepView, *, page_sizes: Sequence[int], offsets: Tensor
) -> None:
    """The definition, and the CPU's path; arguments and mutation as `derive_rows`."""
    if isinstance(source, TableRows):
        _read_table(source, view)
    else:
        _read_pass(source, view)
    torch.add(view.prefix_lens, view.extend_lens, out=view.kv_lens)
    torch.sub(view.cu_seqlens_q[1:], 1, out=view.logits_loc)

    offsets = offsets[: view.padded_tokens]
    torch.searchsorted(view.cu_seqlens_q[1:], offsets, right=True, out=view.req_ids)
    first_position = view.prefix_lens - view.cu_seqlens_q[:-1]
    torch.add(first_position.index_select(0, view.req_ids), offsets, out=view.positions)
    token_rows = view.row_ids.index_select(0, view.req_ids)
    is_live = token_rows != PAD_ROW
    for group, page_size in zip(view.groups, page_sizes, strict=True):
        if page_size:
            _derive_slots(group, view, is_live, page_size)

    if isinstance(source, TableRows):
        token_index = token_rows * source.token_ids.shape[1] + view.positions
        view.input_ids.copy_(source.token_ids.view(-1).index_select(0, token_index))
    elif source.parents is not None:
        assert view.tree_mask is not None, "a pass with parents has a mask"
        derive_tree_reference(
            source.parents.view(-1), view.prefix_lens, view.positions, tree_mask=view.tree_mask
        )


def _read_table(source: TableRows, view: StepView) -> None:
    """Rows, lengths before and in the step, and page tables."""
    staged = source.facts[: view.padded_reqs]
    staged_rows = staged[:, 0].long()
    running = source.finish.index_select(0, staged_rows) == FinishCode.RUNNING
    torch.mul(staged_rows, running, out=view.row_ids)
    view.extend_lens.copy_(staged[:, 1])
    torch.index_select(source.kv_committed, 0, view.row_ids, out=view.prefix_lens)
    torch.cumsum(view.extend_lens, 0, dtype=torch.int32, out=view.cu_seqlens_q[1:])
    for table, group in zip(source.page_tables, view.groups, strict=True):
        torch.index_select(table, 0, view.row_ids, out=group.page_table)


def _read_pass(source: PassRows, view: StepView) -> None:
    """Lengths before and in the pass."""
    rows = view.max_extend_len
    torch.add(source.committed, source.advance, out=view.prefix_lens)
    view.prefix_lens.masked_fill_(view.row_ids == PAD_ROW, PAD_PREFIX_LEN)
    view.extend_lens.fill_(rows)
    torch.arange(0, view.padded_tokens + rows, rows, out=view.cu_seqlens_q)


def _derive_slots(group: GroupView, view: StepView, is_live: Tensor, page_size: int) -> None:
    """Where each token's KV goes.  is_live: [padded_tokens] bool."""
    table = group.page_table
    page_index = view.req_ids * table.shape[1] + view.positions // page_size
    page = table.view(-1).index_select(0, page_index)
    slot = page.long() * page_size + view.positions % page_size
    torch.mul(slot, is_live, out=group.out_cache_loc)


def _derived(view: StepView) -> tuple[Tensor, ...]:
    """What a step and a pass have in common, as the kernels take it."""
    lens = (view.prefix_lens, view.extend_lens, view.kv_lens, view.cu_seqlens_q, view.logits_loc)
    return (view.row_ids, *lens, view.req_ids, view.positions)


def _groups(view: StepView) -> tuple[list[Tensor], list[Tensor]]:
    """(page tables, slots) of every group."""
    return [g.page_table for g in view.groups], [g.out_cache_loc for g in view.groups]


def _derive_table_cuda(*fields: Any) -> None:
    from paceline.kernels._triton.derive import launch_derive

    source, (page_tables, locs, page_sizes, max_extend_len) = TableRows(*fields[:5]), fields[14:]
    groups = [*zip(source.page_tables, page_tables, locs, page_sizes, strict=True)]
    launch_derive(source, fields[5:14], groups, max_extend_len=max_extend_len)


def _derive_pass_cuda(*fields: Any) -> None:
    from paceline.kernels._triton.derive_pass import launch_derive_pass

    source, (tree_mask, page_tables, locs, page_sizes) = PassRows(*fields[:3]), fields[11:]
    groups = [*zip(page_tables, locs, page_sizes, strict=True)]
    launch_derive_pass(source, fields[3:11], groups, tree_mask=tree_mask)


_DERIVE_TABLE = define_op(
    "derive_table(Tensor facts, Tensor kv_committed, Tensor finish, Tensor token_ids, "
    "Tensor[] tables, Tensor(a!) row_ids, Tensor(b!) prefix_lens, Tensor(c!) extend_lens, "
    "Tensor(d!) kv_lens, Tensor(e!) cu_seqlens_q, Tensor(f!) logits_loc, Tensor(g!) req_ids, "
    "Tensor(h!) positions, Tensor(i!) input_ids, Tensor(j!)[] page_tables, "
    "Tensor(k!)[] out_cache_locs, int[] page_sizes, int max_extend_len) -> ()",
    cpu=None,
    cuda=_derive_table_cuda,
)
_DERIVE_PASS = define_op(
    "derive_pass(Tensor committed, int advance, Tensor? parents, Tensor row_ids, "
    "Tensor(a!) prefix_lens, Tensor(b!) extend_lens, Tensor(c!) kv_lens, Tensor(d!) cu_seqlens_q, "
    "Tensor(e!) logits_loc, Tensor(f!) req_ids, Tensor(g!) positions, Tensor(h!)? tree_mask, "
    "Tensor[] page_tables, Tensor(i!)[] out_cache_locs, int[] page_sizes) -> ()",
    cpu=None,
    cuda=_derive_pass_cuda,
)


def derive_rows(
    source: TableRows | PassRows, view: StepView, *, page_sizes: Sequence[int], offsets: Tensor
) -> None:
    """Fill `view` in place from `source`; a padded row has prefix 1 and slot 0.

    page_sizes: [num_groups] tokens, 0 of a STATE group, whose page table holds slots of states;
    offsets: [>= padded_tokens] int32 0, 1, 2, ...
    Of the request table this writes all but the tree mask; the leading 0 of cu_seqlens_q is there
    already.  Of a pass it writes that too, and the mask of a tree; row ids and page tables are read
    and the input ids are not touched.  What facts and parents hold is trusted: it lives on the
    device.  On a CPU these are torch's operators, which a recorded graph replays on fixed storages.
    Graph-safe: the grid depends on shapes and on view.max_extend_len only.
    Raises KernelArgumentError.
    """
    if isinstance(source, TableRows):
        _check_table(source)
    else:
        _check_pass(source, view)
    if device_type(view.positions.device) == "cpu":
        derive_rows_reference(source, view, page_sizes=page_sizes, offsets=offsets)
    elif isinstance(source, TableRows):
        written = (*_derived(view), view.input_ids, *_groups(view))
        _DERIVE_TABLE(*source, *written, page_sizes, view.max_extend_len)
    else:
        _DERIVE_PASS(*source, *_derived(view), view.tree_mask, *_groups(view), page_sizes)


def _check_table(source: TableRows) -> None:
    """The kernel reads columns one element apart."""
    tables = {f"page_tables[{i}]": table for i, table in enumerate(source.page_tables)}
    named = {"facts": source.facts, "token_ids": source.token_ids, **tables}
    for name, tensor in named.items():
        if tensor.dim() != 2 or tensor.dtype != torch.int32 or tensor.stride(1) != 1:
            reject(
                name,
                expected="int32 [rows, columns] with a contiguous last dimension",
                got=tensor,
                remedy="pass the request table's own tensors",
            )


def _check_pass(source: PassRows, view: StepView) -> None:
    reqs, rows = view.padded_reqs, view.max_extend_len
    tokens = reqs * rows
    wanted: list[tuple[str, Tensor | None, torch.dtype, tuple[int, ...]]] = [
        ("cu_seqlens_q", view.cu_seqlens_q, torch.int32, (reqs + 1,)),
        ("req_ids", view.req_ids, torch.int64, (tokens,)),
        ("positions", view.positions, torch.int64, (tokens,)),
    ]
    wanted += [
        (f"out_cache_locs[{index}]", group.out_cache_loc, torch.int64, (tokens,))
        for index, group in enumerate(view.groups)
    ]
    if source.parents is not None or view.tree_mask is not None:
        wanted += [
            ("parents", source.parents, torch.int32, (reqs, rows)),
            ("tree_mask", view.tree_mask, torch.bool, (tokens, rows)),
        ]
    for name, tensor, dtype, shape in wanted:
        fits = tensor is not None and tensor.dtype == dtype and tensor.shape == shape
        if tensor is None or not fits or not tensor.is_contiguous():
            reject(
                name,
                expected=f"contiguous {dtype} {list(shape)}",
                got=tensor,
                remedy="every request of a pass brings as many rows; a tree has parents and a mask",
            )
