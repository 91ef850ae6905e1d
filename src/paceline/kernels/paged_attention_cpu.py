"""Paged attention on the CPU: one opaque operator that reads lengths and page tables itself.

To a recorder it is a kernel: it is replayed whole, with the lengths of that moment.  Requests are
walked one by one; each is one scaled_dot_product_attention over its keys, without a copy where its
pages happen to be neighbours.
"""

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core.model.lookback import Chunk, Lookback, first_visible
from paceline.core.modes import MaskKind
from paceline.kernels.custom_op import define_op
from paceline.kernels.paged_attention.call import SCHEMA, PagedCall, Weighing
from paceline.kernels.paged_attention.checks import check_lookback
from paceline.kernels.scaled_latents import latents_of

_EXPLICIT_ROWS = 256  # whose scores are in memory at a time


def paged_attention_cpu(call: PagedCall) -> None:
    """Attention of a step over its paged keys; mutates out and lse.

    Rows that see no key give 0 and -inf.  Recordable.  Raises KernelArgumentError.
    """
    check_lookback(call.weighing)
    _PAGED_ATTENTION(*call.flat())


def _implementation(*args: Any) -> None:
    (q, cache, step, weighing, out, lse), _ = PagedCall.taken(args)
    page_table, tree_mask, most = step.page_table, step.tree_mask, weighing.most_keys
    lookback = weighing.window if weighing.chunk is None else Chunk(weighing.chunk)
    offsets, prefixes = step.cu_seqlens_q.tolist(), step.prefix_lens.tolist()
    keys, values = _KeyValues(cache.k, page_table), _KeyValues(cache.v, page_table)
    beside = [_KeyValues(part, page_table) for part in cache.beside or ()]
    pages = _live_pages(page_table, prefixes, offsets, cache.k.shape[1])
    extends = [end - start for start, end in itertools.pairwise(offsets)]
    is_fused = weighing.soft_cap is None and lse is None and weighing.sinks is None
    scale = weighing.scale if cache.k_scale is None else weighing.scale * cache.k_scale.item()
    for request, (prefix, extend) in enumerate(zip(prefixes, extends, strict=True)):
        if not extend:  # a padded row of a ragged step may bring no token
            continue
        rows = slice(offsets[request], offsets[request + 1])
        # From the lowest key the step's first row can see; later rows see none before it.
        lowest = first_visible(lookback, prefix)
        reach = range(lowest, prefix if weighing.prefix_only else prefix + extend)
        visible = None
        # A prompt from its start is what torch's kernel calls causal: no mask to build or read.
        sees_all_before = step.mask is MaskKind.CAUSAL and (most is None or most >= extend)
        is_causal = is_fused and sees_all_before and reach == range(extend)
        if extend > 1 and not is_causal:
            tree = tree_mask[rows, :extend] if tree_mask is not None else None
            ends = step.visible_end[rows] if step.visible_end is not None else None
            visible = _visible(
                prefix, extend, reach, kind=step.mask, tree=tree, ends=ends, lookback=lookback
            )
        k = keys.select(request, pages[request], reach)
        if beside:
            turned, scales = (part.select(request, pages[request], reach) for part in beside)
            v = latents_of(k, scales).to(q.dtype)
            k = torch.cat((v, turned), 3)
        else:
            k = k.to(q.dtype)
            v = values.select(request, pages[request], reach).to(q.dtype)
        if is_fused:
            _fused(q[rows], k, v, visible, out[rows], scale=scale, is_causal=is_causal)
            continue
        for block in _blocks(rows, _EXPLICIT_ROWS):
            seen = None
            if visible is not None:
                seen = visible[block.start - rows.start : block.stop - rows.start]
            block_lse = lse[block] if lse is not None else None
            _explicit(q[block], k, v, seen, out[block], block_lse, weighing._replace(scale=scale))
    if cache.v_scale is not None:
        out.mul_(cache.v_scale)


def _blocks(rows: slice, size: int) -> list[slice]:
    """`rows` in parts of at most `size`."""
    firsts = range(rows.start, rows.stop, size)
    return [slice(first, min(first + size, rows.stop)) for first in firsts]


def _live_pages(
    page_table: Tensor, prefixes: list[int], offsets: list[int], page_size: int
) -> list[list[int]]:
    """[reqs] of page ids: each request's row up to its last live page."""
    ends = zip(prefixes, offsets, offsets[1:], strict=False)
    widths = [-((start - end - prefix) // page_size) for prefix, start, end in ends]
    rows = page_table[:, : max(widths, default=0)].tolist()
    return [row[:width] for row, width in zip(rows, widths, strict=True)]


class _KeyValues:
    """One side of a paged cache, read by ranges of positions."""

    def __init__(self, cache: Tensor, page_table: Tensor) -> None:
        self._page_size = cache.shape[1]
        self._pages = cache  # [num_pages, page_size, kv_heads, dim]
        self._page_table = page_table  # [reqs, max_pages]  int32
        slots = cache.view(1, -1, *cache.shape[2:])
        self._slots = slots.transpose(1, 2)  # [1, kv_heads, slots, dim]

    def select(self, request: int, pages: list[int], reach: range) -> Tensor:
        """[1, kv_heads, len(reach), dim]; a view where the pages are neighbours."""
        size = self._page_size
        low, high = reach.start // size, -(-reach.stop // size)
        begin = reach.start - low * size
        first = pages[low] if low < high else 0
        if pages[low:high] == list(range(first, first + high - low)):
            return self._slots.narrow(2, first * size + begin, len(reach))
        gathered = self._pages.index_select(0, self._page_table[request, low:high]).flatten(0, 1)
        return gathered.narrow(0, begin, len(reach)).transpose(0, 1).unsqueeze(0)


def _visible(
    prefix: int,
    extend: int,
    reach: range,  # the key positions at hand
    *,
    kind: MaskKind,
    tree: Tensor | None,  # [extend, extend]  bool
    ends: Tensor | None,  # [extend]  int32  of blocks: keys before it are seen
    lookback: Lookback | None,
) -> Tensor:
    """[extend, len(reach)] bool: which keys each row of the step may see.

    Under a tree a row's position is prefix + depth; its depth is its number of ancestors.
    """
    keys = torch.arange(reach.start, reach.stop)
    positions = torch.arange(prefix, prefix + extend)
    if kind is MaskKind.TREE:
        assert tree is not None, "a tree step carries a tree mask"
        positions = prefix + tree.sum(1) - 1
        num_prefix = max(0, min(prefix, reach.stop) - reach.start)
        visible = torch.ones(extend, len(reach), dtype=torch.bool)
        visible[:, num_prefix:] = tree[:, : len(reach) - num_prefix]
        keys[num_prefix:] = positions[: len(reach) - num_prefix]
    elif kind is MaskKind.FULL:
        visible = torch.ones(extend, len(reach), dtype=torch.bool)
    elif kind is MaskKind.BLOCK:
        assert ends is not None, "a step of blocks says where they end"
        visible = keys < ends.unsqueeze(1)
    else:
        visible = keys <= positions.unsqueeze(1)
    if isinstance(lookback, Chunk):
        first = positions // lookback.size * lookback.size
        visible = visible & (keys >= first.unsqueeze(1))
    elif lookback is not None:
        visible = visible & (keys > positions.unsqueeze(1) - lookback)
    return visible


def _fused(
    q: Tensor,  # [rows, heads, head_dim]
    k: Tensor,  # [1, kv_heads, keys, head_dim]
    v: Tensor,  # [1, kv_heads, keys, v_head_dim]
    visible: Tensor | None,  # [rows, keys]  bool
    out: Tensor,  # [rows, heads, v_head_dim]
    *,
    scale: float,
    is_causal: bool,  # row i sees keys 0..i; `visible` is None then
) -> None:
    """Through torch's own kernel; KV heads are its batch, and their query heads share the keys."""
    rows, heads, dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    blocks = q.view(rows, kv_heads, group, dim).permute(1, 2, 0, 3)
    mixed = F.scaled_dot_product_attention(
        blocks,
        k[0].unsqueeze(1).expand(-1, group, -1, -1),
        v[0].unsqueeze(1).expand(-1, group, -1, -1),
        attn_mask=visible,
        scale=scale,
        is_causal=is_causal,
    )
    out.view(rows, kv_heads, group, -1).copy_(mixed.permute(2, 0, 1, 3))


def _explicit(
    q: Tensor,  # [rows, heads, head_dim]
    k: Tensor,  # [1, kv_heads, keys, head_dim]
    v: Tensor,  # [1, kv_heads, keys, v_head_dim]
    visible: Tensor | None,  # [rows, keys]  bool
    out: Tensor,  # [rows, heads, v_head_dim]
    lse: Tensor | None,  # [rows, heads]  float32
    weighing: Weighing,
) -> None:
    """The same in plain steps, in float32: soft caps, lse, sinks and rows without keys."""
    rows, heads, dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.float().view(rows, kv_heads, heads // kv_heads, dim)
    scores = torch.einsum("rkgd,ksd->kgrs", grouped, k[0].float()) * weighing.scale
    if weighing.soft_cap is not None:
        scores = weighing.soft_cap * torch.tanh(scores / weighing.soft_cap)
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    normalizer = torch.logsumexp(scores, -1)  # [kv_heads, group, rows]
    total = normalizer
    if weighing.sinks is not None:
        total = torch.logaddexp(normalizer, weighing.sinks.view(kv_heads, -1, 1))
    # A row without keys divides by 1: its weights are exp(-inf) = 0, and NaN elsewhere stays NaN.
    divisor = total.masked_fill(total == -math.inf, 0.0)
    weights = torch.exp(scores - divisor.unsqueeze(-1))
    mixed = torch.einsum("kgrs,ksd->rkgd", weights, v[0].float())
    out.copy_(mixed.reshape(rows, heads, -1))
    if lse is not None:
        lse.copy_(normalizer.permute(2, 0, 1).reshape(rows, heads))


_PAGED_ATTENTION = define_op(
    f"paged_attention_cpu({SCHEMA}) -> ()",
    cpu=_implementation,
)
