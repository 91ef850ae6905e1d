"""The rows of a call whose kernel wants as many queries of each: requests, or their tokens.

A kernel without query offsets takes q as [rows, queries, heads, head_dim]: row r has the queries
from r * n to (r + 1) * n.  Where every request of a step brings n tokens, padded ones too, they lie
just there: cu_seqlens_q[r] == r * n, in a capture as in each of its replays.  In any other step no
stride is right, and every token is a row by itself, with the pages of its request and the keys up
to its own.

Worked example: requests of 1 and 2 tokens behind prefixes of 4 and 6.

    page_table   [[7, 2], [5, 9]]
    tokens       kv_lens [5, 7, 8], page_tables [[7, 2], [5, 9], [5, 9]]
"""

from dataclasses import dataclass

from torch import Tensor

from paceline.kernels.step_view import StepView


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QueryRows:
    """What the rows of a call read."""

    queries: int  # of each row
    page_tables: tuple[Tensor, ...]  # [num_groups] of [rows, max_pages]  int32
    kv_lens: Tensor  # [rows]  int32  at least 1


def uniform_stride(view: StepView, most: int) -> int | None:
    """The tokens that every request brings, padded ones too; None where they do not bring as many,
    or more than `most`."""
    stride = view.max_extend_len
    is_uniform = view.padded_tokens == view.padded_reqs * stride
    return stride if is_uniform and stride <= most else None


def query_rows(view: StepView, stride: int | None, *, prefix: bool) -> QueryRows:
    """The rows of one call over all keys, causally from bottom right, or over the prefix alone.

    stride: what `uniform_stride` says; None makes every token a row.  A row without a key is shown
    one: what comes of it is to be replaced.  Tables and lengths are the view's or new ones, by
    device work of static shapes.
    """
    tables = tuple(group.page_table for group in view.groups)
    lens = view.prefix_lens.clamp(min=1) if prefix else view.kv_lens
    if stride is None:
        tables = tuple(table.index_select(0, view.req_ids) for table in tables)
        lens = lens.index_select(0, view.req_ids) if prefix else (view.positions + 1).int()
    return QueryRows(queries=stride or 1, page_tables=tables, kv_lens=lens)
