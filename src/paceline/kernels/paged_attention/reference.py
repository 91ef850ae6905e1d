"""The definition of attention over a paged KV cache, one request at a time.

Request r has queries i = 0..extend−1 and keys j = 0..prefix+extend−1; key j lies in slot
j % page_size of page page_table[r, j // page_size].  Which keys query i sees:

    prefix keys j < prefix     all
    step keys   j = prefix+i'  causal: i' <= i     tree: tree_mask[token i, i']     full: all
                               block: j < visible_end[token i]

and with a window only those with key position > query position − window, with chunks only those
with key position >= query position − query position mod chunk.  A position is the absolute index,
except in a tree, where it is prefix + depth (ancestors without the token itself).
scores = q.k * scale, then cap * tanh(score / cap) if soft-capped.  A quantised cache holds
k / k_scale and v / v_scale, or latents scaled by rows (kernels/scaled_latents.py).  A sink is one
more score of its head, neither scaled nor capped, whose weight goes to no value; lse leaves it out,
and so does everything with prefix_only.
"""

import torch
from torch import Tensor

from paceline.core.errors import KernelArgumentError
from paceline.core.modes import MaskKind
from paceline.kernels.paged_attention.call import PagedCache, PagedRows, Weighing


def paged_attention_reference(
    q: Tensor,
    cache: PagedCache,
    rows: PagedRows,
    weighing: Weighing,
    *,
    compute_dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Attend in `compute_dtype`; returns (out, lse) and mutates nothing.

    q: [tokens, heads, head_dim].  out: [tokens, heads, v_head_dim] in compute_dtype, unrounded;
    lse: [tokens, heads] float32 natural log.  A row that sees no key gives out 0 and lse −inf.
    Raises KernelArgumentError.
    """
    tokens, heads, _ = q.shape
    out = q.new_zeros((tokens, heads, cache.v.shape[3]), dtype=compute_dtype)
    lse = q.new_full((tokens, heads), float("-inf"), dtype=torch.float32)
    starts = rows.cu_seqlens_q.tolist()
    lens = zip(rows.prefix_lens.tolist(), rows.kv_lens.tolist(), strict=True)
    for r, (prefix, kv_len) in enumerate(lens):
        extend = kv_len - prefix
        if extend == 0:
            continue
        mine = slice(starts[r], starts[r] + extend)
        num_keys = prefix if weighing.prefix_only else kv_len
        pages = rows.page_table[r]
        k, v = (each.to(compute_dtype) for each in _keys_and_values(cache, pages, num_keys))
        tree = None if rows.tree_mask is None else rows.tree_mask[mine, :extend]
        visible = visible_keys(
            prefix,
            extend,
            rows.mask,
            tree_mask=tree,
            window=weighing.window,
            chunk=weighing.chunk,
            visible_end=None if rows.visible_end is None else rows.visible_end[mine],
        )
        out[mine], lse[mine] = dense_attention(
            q[mine].to(compute_dtype),
            k,
            v,
            visible=visible[:, :num_keys].to(q.device),
            scale=weighing.scale,
            soft_cap=weighing.soft_cap,
            sinks=None if weighing.prefix_only else weighing.sinks,
        )
    return out, lse


def _keys_and_values(cache: PagedCache, pages: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """[num_keys, kv_heads, dim] both, as they are true."""
    if cache.beside is None:
        k = gather_pages(cache.k, pages, num_keys, cache.k_scale)
        return k, gather_pages(cache.v, pages, num_keys, cache.v_scale)
    turned, scales = (gather_pages(part, pages, num_keys) for part in cache.beside)
    latents = gather_pages(cache.k, pages, num_keys).double() * scales.double()
    return torch.cat((latents, turned.double()), 2), latents


def gather_pages(
    cache: Tensor, page_row: Tensor, num_keys: int, scale: Tensor | None = None
) -> Tensor:
    """[num_keys, kv_heads, dim]: one request's first keys, read through its page-table row.

    In the cache's dtype; with the scale of a quantised cache, the true values in float64.
    """
    page_size = cache.shape[1]
    positions = torch.arange(num_keys, device=cache.device)
    stored = cache[page_row[positions // page_size].long(), positions % page_size]
    return stored if scale is None else stored.double() * scale.double()


def visible_keys(
    prefix: int,
    extend: int,
    mask: MaskKind,
    *,
    tree_mask: Tensor | None,
    window: int | None,
    chunk: int | None = None,
    visible_end: Tensor | None = None,
) -> Tensor:
    """[extend, prefix + extend] bool: which keys each query of one request sees."""
    if mask is MaskKind.CAUSAL:
        among = torch.ones(extend, extend, dtype=torch.bool).tril()
    elif mask is MaskKind.FULL:
        among = torch.ones(extend, extend, dtype=torch.bool)
    elif mask is MaskKind.TREE and tree_mask is not None:
        among = tree_mask.cpu()
    elif mask is MaskKind.BLOCK and visible_end is not None:
        among = prefix + torch.arange(extend) < visible_end.cpu().unsqueeze(1)
    else:
        raise KernelArgumentError.about(
            "mask",
            expected="causal or full, tree with a tree_mask, or block with a visible_end",
            got=f"{mask.value} with tree_mask {'absent' if tree_mask is None else 'present'}",
            remedy="a step without rows needs no attention; a tree needs its ancestors",
        )
    visible = torch.cat((torch.ones(extend, prefix, dtype=torch.bool), among), dim=1)
    if window is None and chunk is None:
        return visible
    steps = among.sum(dim=1) - 1 if mask is MaskKind.TREE else torch.arange(extend)
    key_positions = torch.cat((torch.arange(prefix), prefix + steps))
    if window is not None:
        visible &= key_positions[None, :] > prefix + steps[:, None] - window
    if chunk is not None:
        positions = prefix + steps[:, None]
        visible &= key_positions[None, :] >= positions - positions % chunk
    return visible


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    visible: Tensor,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one request, everything materialised, in q's dtype.

    q: [queries, heads, head_dim]; k, v: [keys, kv_heads, *]; visible: [queries, keys] bool;
    sinks: [heads].
    Returns out [queries, heads, v_head_dim] and lse [queries, heads] float32.
    """
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, dim=1)) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~visible, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    seen = visible.any(dim=1)[None, :, None]
    total = lse if sinks is None else torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    weights = torch.where(seen, torch.exp(scores - total[..., None]), 0.0)
    out = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, dim=1))
    return out, lse.T.float()
