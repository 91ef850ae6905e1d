"""Virtual requests: a step cut where chunks begin, for kernels that read page tables and know no
chunks.

The tokens of a request that lie in one chunk see no key before it.  To a kernel they are a request
of their own, causal as any: its page table begins at the column of the chunk's first page, and its
keys are counted from there.  So a chunk must be whole pages.  Nothing but the view is read: in
eager runs, in a capture and in each replay the cuts are where the step's positions put them.

Worked example: page size 2, chunks of 4; requests of 3 and 1 tokens behind prefixes of 3 and 8.

    positions     [3, 4, 5, 8]                 4 and 8 begin a chunk
    page_table    [[7, 2, 5, 0, 0], [4, 1, 8, 6, 3]]
    cu_seqlens_q  [0, 1, 3, 4, 4]              room for 4; behind the last one none has a token
    keys_used     [4, 2, 1, 1]
    page_table    [[7, 2], [5, 0], [3, 3], [3, 3]]     from columns 0, 2, 4 and 4 on

Of the prefix alone a request has one chunk at most, that of its next token: whoever stands behind
that chunk's end, as late nodes of a tree may, has no prefix.  There requests stay whole.

    page_table    [[7, 2], [3, 3]]             from the column of the chunk that 3 and 8 lie in
    keys_used     [3, 1]                       8 begins a chunk: one key is shown, and lacked
    lacks_prefix  [0, 1, 1, 1]
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.attention.contract import Limits, Part
from paceline.core.model.lookback import Chunk
from paceline.kernels.step_view import StepView


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VirtualRequests:
    """What a kernel reads of one part of a step, for the layers of one group with chunks."""

    group: int
    is_prefix: bool  # of the prefix alone: Part.PREFIX
    chunk: Chunk
    cu_seqlens_q: Tensor  # [virtual + 1]  int32  of the prefix alone the step's own
    keys_used: Tensor  # [virtual]  int32  at least 1
    page_table: Tensor  # [virtual, pages of a chunk]  int32
    max_extend_len: int  # no virtual request has more tokens
    lacks_prefix: Tensor  # [padded_tokens]  bool  the token sees no key of the prefix


def most_virtual(reqs: int, tokens: int, chunk: Chunk) -> int:
    """The virtual requests of a step, at most: a request has its first and its last, and others
    that are whole chunks; none is empty."""
    return min(tokens, 2 * reqs + tokens // chunk.size)


def chunk_limits(limits: Limits, chunk: Chunk) -> Limits:
    """`limits` in virtual requests; groups of any other lookback have no pages."""
    reqs, tokens = limits.max_reqs, limits.max_tokens
    return replace(
        limits,
        max_reqs=max(reqs, most_virtual(reqs, tokens, chunk)),
        max_pages=tuple(
            min(pages, chunk.size // limits.page_size) if lookback == chunk else 0
            for lookback, pages in zip(limits.windows, limits.max_pages, strict=True)
        ),
    )


def without_chunks(limits: Limits) -> Limits:
    """`limits`, where groups with chunks have no pages."""
    return replace(
        limits,
        max_pages=tuple(
            0 if isinstance(lookback, Chunk) else pages
            for lookback, pages in zip(limits.windows, limits.max_pages, strict=True)
        ),
    )


def cut_lens(
    prefix_lens: Sequence[int], extend_lens: Sequence[int], chunk: Chunk
) -> list[tuple[int, int]]:
    """(tokens, keys) of each virtual request, by what the host knows; (0, 0) behind the last."""
    found = []
    for prefix, extend in zip(prefix_lens, extend_lens, strict=True):
        end = prefix + extend
        for begin in range(prefix - prefix % chunk.size, end, chunk.size):
            stop = min(end, begin + chunk.size)
            if stop > prefix:  # a request without tokens has no virtual one
                found.append((stop - max(begin, prefix), stop - begin))
    most = most_virtual(len(extend_lens), sum(extend_lens), chunk)
    return found + [(0, 0)] * (most - len(found))


def virtual_requests(view: StepView, limits: Limits, part: Part) -> tuple[VirtualRequests, ...]:
    """Of each group with chunks.  The mask is causal, but for Part.PREFIX.

    Device-only, static shapes; the tensors are new ones.
    """
    assert part is not Part.STEP, "the step alone has no pages"
    found, is_prefix = [], part is Part.PREFIX
    for chunk in limits.chunks:
        lacks = lacks_prefix(view, chunk)
        if is_prefix:
            cuts, used = view.cu_seqlens_q, (view.prefix_lens % chunk.size).clamp(min=1)
        else:
            cuts = _cuts(view, chunk)
            used = view.positions.index_select(0, cuts[1:] - 1) % chunk.size + 1
        for group, table in chunk_tables(view, limits, chunk, None if is_prefix else cuts).items():
            requests = VirtualRequests(
                group=group,
                is_prefix=is_prefix,
                chunk=chunk,
                cu_seqlens_q=cuts,
                keys_used=used.int(),
                page_table=table,
                max_extend_len=view.max_extend_len
                if is_prefix
                else min(view.max_extend_len, chunk.size),
                lacks_prefix=lacks,
            )
            found.append(requests)
    return tuple(found)


def chunk_tables(
    view: StepView, limits: Limits, chunk: Chunk, cuts: Tensor | None
) -> dict[int, Tensor]:
    """[virtual, pages of a chunk] int32, by group, of those with `chunk`.

    cuts: [virtual + 1] int32, the tokens before each virtual request; None: the prefix alone, of
    which requests stay whole.  Device-only, static shapes.
    """
    if cuts is None:
        rows = torch.arange(view.padded_reqs, device=view.positions.device)
        at = view.prefix_lens
    else:  # one without tokens is that of the last token
        firsts = cuts[:-1].clamp(max=view.padded_tokens - 1)
        rows = view.req_ids.index_select(0, firsts)
        at = view.positions.index_select(0, firsts)
    pages = chunk.size // limits.page_size
    columns = torch.arange(pages, device=at.device) + (at // chunk.size * pages).unsqueeze(1)
    tables = {}
    for number, (group, lookback) in enumerate(zip(view.groups, limits.windows, strict=True)):
        if lookback == chunk:
            width = group.page_table.shape[1]
            entries = columns[:, :width].clamp(max=width - 1)
            tables[number] = group.page_table[rows.unsqueeze(1), entries]
    return tables


def lacks_prefix(view: StepView, chunk: Chunk) -> Tensor:
    """[padded_tokens] bool: the token's chunk begins with the step, or within it."""
    begins = view.positions // chunk.size * chunk.size
    return begins >= view.prefix_lens.index_select(0, view.req_ids)


def _cuts(view: StepView, chunk: Chunk) -> Tensor:
    """[virtual + 1] int32: the tokens before each virtual request, all of them behind the last."""
    first = view.prefix_lens.index_select(0, view.req_ids)
    begins = (view.positions % chunk.size == 0) | (view.positions == first)
    most = most_virtual(view.padded_reqs, view.padded_tokens, chunk)
    numbers = torch.arange(1, most + 2, dtype=torch.int32, device=begins.device)
    counts = torch.cumsum(begins, 0, dtype=torch.int32)
    return torch.searchsorted(counts, numbers, out_int32=True)
