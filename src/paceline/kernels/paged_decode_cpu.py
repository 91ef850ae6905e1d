"""Decode attention on the CPU, in two operators: which slots a step reads, and one layer's read.

Every layer of a cache group reads the same slots, so they are listed once per step.  A layer then
gathers the keys and values of a part of the requests into one padded block and takes two batched
products.  Requests of unlike reach go into parts of their own where the keys saved pay for the
calls.  Worked example: page size 4, window None, kv_lens [3, 6], page_table [[2, 0], [5, 7]], one
part:

    parts   [2, 6]                                2 requests, 6 keys: the longest reach
    slots   [8, 9, 10, 8, 8, 8]                   request 0; behind its end: its first key again,
            [20, 21, 22, 23, 28, 29]              so that nothing foreign is ever read
    bias    [0, 0, 0, -inf, -inf, -inf]  [0, ...]  and that key is then masked

In two parts, where it paid: order [1, 0], parts [1, 6] [1, 3], and the blocks of slots and bias in
that order, one behind the other.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from paceline.kernels.custom_op import define_op

MAX_PARTS = 4
_PART_COST = 500  # keys that take as long as the calls of one more part


def decode_slots_cpu(
    page_table: Tensor,
    kv_lens: Tensor,
    *,
    page_size: int,
    window: int | None,
    order: Tensor,
    parts: Tensor,
    slots: Tensor,
    bias: Tensor,
) -> None:
    """List the slots that one query per request reads, as dense blocks [requests, extent].

    page_table: [reqs, max_pages] int32; kv_lens: [reqs] int32, each at least 1; window: keys
    visible, itself included.  Mutates order [at least reqs] int64, the requests part by part (the
    step's own order when there is one part); parts [MAX_PARTS, 2] int64, requests and extent of
    each, 0 behind the last; slots [capacity] int32 and bias [capacity], of which reqs * longest
    reach is enough.  Recordable.
    """
    _DECODE_SLOTS(page_table, kv_lens, page_size, window, order, parts, slots, bias)


def paged_decode_cpu(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    order: Tensor,
    parts: Tensor,
    slots: Tensor,
    bias: Tensor,
    *,
    scale: float,
) -> Tensor:
    """Attend one query per request to the slots that `decode_slots_cpu` listed.

    q: [reqs, heads, head_dim]; k_cache: [num_pages, page_size, kv_heads, head_dim], v_cache with
    v_head_dim; bias in q's dtype.  Returns [reqs, heads, v_head_dim].  Recordable.
    """
    out = torch.empty(*q.shape[:2], v_cache.shape[3], dtype=q.dtype, device=q.device)
    _PAGED_DECODE(q, k_cache, v_cache, order, parts, slots, bias, scale, out)
    return out


def _decode_slots(
    page_table: Tensor,
    kv_lens: Tensor,
    page_size: int,
    window: int | None,
    order: Tensor,
    parts: Tensor,
    slots: Tensor,
    bias: Tensor,
) -> None:
    first = torch.zeros_like(kv_lens) if window is None else (kv_lens - window).clamp_(min=0)
    reach, by_reach = (kv_lens - first).sort(descending=True)
    sizes = _cut(reach.tolist(), MAX_PARTS)
    if len(sizes) == 1:
        torch.arange(len(by_reach), out=by_reach)
    order[: len(by_reach)].copy_(by_reach)
    parts.zero_()
    parts[: len(sizes)].copy_(torch.tensor(sizes))
    for rows, block in _blocks(sizes):
        _list_block(
            page_table.index_select(0, by_reach[rows]),
            first.index_select(0, by_reach[rows]),
            kv_lens.index_select(0, by_reach[rows]),
            page_size=page_size,
            slots=slots[block].view(rows.stop - rows.start, -1),
            bias=bias[block].view(rows.stop - rows.start, -1),
        )


def _cut(reach: Sequence[int], max_parts: int) -> list[tuple[int, int]]:
    """(requests, extent) of each part of requests with falling `reach`."""
    saved, start = max(((reach[0] - n) * (len(reach) - i), i) for i, n in enumerate(reach))
    if saved <= _PART_COST or max_parts == 1:
        return [(len(reach), reach[0])]
    head = _cut(reach[:start], max_parts - 1)
    return head + _cut(reach[start:], max_parts - len(head))


def _blocks(sizes: Sequence[Sequence[int]]) -> Iterator[tuple[slice, slice]]:
    """(requests, entries of slots and bias) of each part."""
    row = entry = 0
    for num, extent in sizes:
        yield slice(row, row + num), slice(entry, entry + num * extent)
        row, entry = row + num, entry + num * extent


def _list_block(
    page_table: Tensor,  # [requests, max_pages]  int32
    first: Tensor,  # [requests]  int32
    kv_lens: Tensor,  # [requests]  int32
    *,
    page_size: int,
    slots: Tensor,  # [requests, extent]  int32
    bias: Tensor,  # [requests, extent]
) -> None:
    columns = torch.arange(slots.shape[1], dtype=torch.int32)
    is_live = columns < (kv_lens - first).unsqueeze(1)
    positions = first.unsqueeze(1) + columns * is_live  # a dead entry: the first key
    pages = page_table.gather(1, (positions // page_size).long())
    torch.add(positions % page_size, pages, alpha=page_size, out=slots)
    bias.fill_(0.0).masked_fill_(~is_live, -math.inf)


def _paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    order: Tensor,
    parts: Tensor,
    slots: Tensor,
    bias: Tensor,
    scale: float,
    out: Tensor,
) -> None:
    sizes = [size for size in parts.tolist() if size[0]]
    if len(sizes) == 1:
        size = sizes[0][0] * sizes[0][1]
        _attend(q, k_cache, v_cache, slots[:size], bias[:size], scale, out)
        return
    for rows, block in _blocks(sizes):
        part = order[rows]
        mixed = out.new_empty(len(part), *out.shape[1:])
        _attend(
            q.index_select(0, part), k_cache, v_cache, slots[block], bias[block], scale, mixed
        )
        out.index_copy_(0, part, mixed)


def _attend(
    q: Tensor,  # [requests, heads, head_dim]
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,  # [requests * extent]  int32
    bias: Tensor,  # [requests * extent]
    scale: float,
    out: Tensor,  # [requests, heads, v_head_dim]
) -> None:
    """Softmax attention of one block; the query heads of one KV head are its rows."""
    num, kv_heads = q.shape[0], k_cache.shape[2]
    blocks = (num * kv_heads, q.shape[1] // kv_heads, -1)
    k, v = _gather(k_cache, slots, num), _gather(v_cache, slots, num)
    bias = bias.view(num, 1, 1, -1).expand(-1, kv_heads, -1, -1).flatten(0, 1)
    scores = torch.baddbmm(bias, q.view(blocks), k.transpose(1, 2), alpha=scale)
    torch.bmm(scores.softmax(-1), v, out=out.view(blocks))


def _gather(cache: Tensor, slots: Tensor, num: int) -> Tensor:
    """[num * kv_heads, extent, dim] of one side of the cache."""
    rows = cache.flatten(0, 1).index_select(0, slots)
    return rows.view(num, -1, *rows.shape[1:]).transpose(1, 2).flatten(0, 1)


_DECODE_SLOTS = define_op(
    "decode_slots_cpu(Tensor page_table, Tensor kv_lens, int page_size, int? window, "
    "Tensor(a!) order, Tensor(b!) parts, Tensor(c!) slots, Tensor(d!) bias) -> ()",
    cpu=_decode_slots,
)
_PAGED_DECODE = define_op(
    "paged_decode_cpu(Tensor q, Tensor k_cache, Tensor v_cache, Tensor order, Tensor parts, "
    "Tensor slots, Tensor bias, float scale, Tensor(a!) out) -> ()",
    cpu=_paged_decode,
)
