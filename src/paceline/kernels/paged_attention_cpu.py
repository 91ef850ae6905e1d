"""Paged attention on the CPU: one opaque operator that reads lengths and page tables itself.

To a recorder it is a kernel: it is replayed whole, with the lengths of that moment.  Requests are
walked one by one; each is one scaled_dot_product_attention over its keys, without a copy where its
pages happen to be neighbours.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core.modes import MaskKind

_LIBRARY = torch.library.Library("paceline", "FRAGMENT")
_LIBRARY.define(
    "paged_attention_cpu(Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, "
    "Tensor prefix_lens, Tensor cu_seqlens_q, Tensor? tree_mask, str mask, float scale, "
    "int? window, float? soft_cap, bool prefix_only, Tensor(a!) out, Tensor(b!)? lse) -> ()"
)


def paged_attention_cpu(
    q: Tensor,  # [tokens, heads, head_dim]
    k_cache: Tensor,  # [num_pages, page_size, kv_heads, head_dim]
    v_cache: Tensor,  # [num_pages, page_size, kv_heads, v_head_dim]
    page_table: Tensor,  # [reqs, max_pages]  int32
    prefix_lens: Tensor,  # [reqs]  int32
    cu_seqlens_q: Tensor,  # [reqs + 1]  int32
    *,
    mask: MaskKind,
    tree_mask: Tensor | None,  # [tokens, max_extend_len]  bool
    scale: float,
    window: int | None,
    soft_cap: float | None,
    prefix_only: bool,
    wants_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Attention of a step over its paged keys.

    Returns out [tokens, heads, v_head_dim] and, when asked, lse [tokens, heads] float32 natural
    log.  Rows that see no key give 0 and -inf.  Recordable.
    """
    tokens, heads, _ = q.shape
    out = torch.empty(tokens, heads, v_cache.shape[-1], dtype=q.dtype, device=q.device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device) if wants_lse else None
    torch.ops.paceline.paged_attention_cpu(
        q,
        k_cache,
        v_cache,
        page_table,
        prefix_lens,
        cu_seqlens_q,
        tree_mask,
        mask.value,
        scale,
        window,
        soft_cap,
        prefix_only,
        out,
        lse,
    )
    return out, lse


def _implementation(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    prefix_lens: Tensor,
    cu_seqlens_q: Tensor,
    tree_mask: Tensor | None,
    mask: str,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    prefix_only: bool,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    kind = MaskKind(mask)
    page_size = k_cache.shape[1]
    k_slots, v_slots = k_cache.flatten(0, 1), v_cache.flatten(0, 1)  # [slots, kv_heads, dim]
    offsets = cu_seqlens_q.tolist()
    for request, prefix in enumerate(prefix_lens.tolist()):
        start, end = offsets[request], offsets[request + 1]
        extend = end - start
        kv_len = prefix if prefix_only else prefix + extend
        # The lowest key the step's first row can see; later rows see none before it.
        first = 0 if window is None else max(0, prefix + 1 - window)
        pages = page_table[request, first // page_size : -(-kv_len // page_size)].tolist()
        span = slice(first % page_size, first % page_size + kv_len - first)
        keys = _gather(k_slots, pages, page_size)[span]
        values = _gather(v_slots, pages, page_size)[span]
        visible = None
        if extend > 1:
            tree = tree_mask[start:end, :extend] if tree_mask is not None else None
            reach = range(first, kv_len)
            visible = _visible(prefix, extend, reach, kind=kind, tree=tree, window=window)
        rows_out = out[start:end]
        rows_lse = lse[start:end] if lse is not None else None
        if soft_cap is None and rows_lse is None:
            rows_out.copy_(_fused(q[start:end], keys, values, visible, scale))
        else:
            _explicit(
                q[start:end], keys, values, visible, rows_out, rows_lse, scale=scale, cap=soft_cap
            )


def _gather(slots: Tensor, pages: list[int], page_size: int) -> Tensor:
    """[pages * page_size, kv_heads, dim] of consecutive positions; a view of neighbouring pages."""
    first = pages[0] if pages else 0
    if pages == list(range(first, first + len(pages))):
        return slots[first * page_size : (first + len(pages)) * page_size]
    paged = slots.unflatten(0, (-1, page_size))
    return paged.index_select(0, torch.tensor(pages)).flatten(0, 1)


def _visible(
    prefix: int,
    extend: int,
    reach: range,  # the key positions at hand
    *,
    kind: MaskKind,
    tree: Tensor | None,  # [extend, extend]  bool
    window: int | None,
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
    else:
        visible = keys <= positions.unsqueeze(1)
    if window is not None:
        visible = visible & (keys > positions.unsqueeze(1) - window)
    return visible


def _fused(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float) -> Tensor:
    """[rows, heads, v_head_dim] through torch's own kernel; a KV head's queries form one block."""
    rows, heads, dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    blocks = q.view(rows, kv_heads, group, dim).permute(1, 2, 0, 3)
    mixed = F.scaled_dot_product_attention(
        blocks.reshape(1, kv_heads, group * rows, dim),
        k.transpose(0, 1).unsqueeze(0),
        v.transpose(0, 1).unsqueeze(0),
        attn_mask=visible.repeat(group, 1) if visible is not None else None,
        scale=scale,
    )
    return mixed.view(kv_heads, group, rows, -1).permute(2, 0, 1, 3).reshape(rows, heads, -1)


def _explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    *,
    scale: float,
    cap: float | None,
) -> None:
    """The same in plain steps, in float32: for soft caps, for lse, and for rows without keys."""
    rows, heads, dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.float().view(rows, kv_heads, heads // kv_heads, dim)
    scores = torch.einsum("rkgd,skd->kgrs", grouped, k.float()) * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    normalizer = torch.logsumexp(scores, -1)  # [kv_heads, group, rows]
    weights = torch.exp(scores - normalizer.unsqueeze(-1)).nan_to_num(0.0)
    mixed = torch.einsum("kgrs,skd->rkgd", weights, v.float())
    out.copy_(mixed.reshape(rows, heads, -1))
    if lse is not None:
        lse.copy_(normalizer.permute(2, 0, 1).reshape(rows, heads))


_LIBRARY.impl("paged_attention_cpu", _implementation, "CPU")
