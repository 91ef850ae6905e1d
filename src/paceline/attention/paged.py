"""A layer of a step as calls of our own paged kernels: on a CPU, and by Triton.

Both take the page-table layout, every mask, and one part of the keys.  With Part.PREFIX the sinks
wait for the merge that joins the parts.
"""

import torch
from torch import Tensor

from paceline.attention.contract import LayerCache, Part
from paceline.attention.layouts.page_table import PageTablePlan
from paceline.core.model.lookback import Chunk, most_visible
from paceline.kernels.paged_attention import PagedCache, PagedCall, PagedRows, Weighing
from paceline.kernels.paged_attention_cpu import paged_attention_cpu


def paged_call(
    q: Tensor, layer: LayerCache, table: PageTablePlan, part: Part, *, wants_lse: bool = True
) -> PagedCall:
    """q: [padded_tokens, num_heads, head_dim].  The outputs are new tensors."""
    out, lse = empty_outputs(q, layer) if wants_lse else (_empty_out(q, layer), None)
    return PagedCall(
        q,
        cache_of(layer),
        PagedRows(
            table.page_tables[layer.spec.group],
            table.prefix_lens,
            table.kv_lens,
            table.cu_seqlens_q,
            table.max_extend_len,
            table.tree_mask,
            table.mask,
            table.visible_end,
        ),
        weighing_of(layer, part),
        out,
        lse,
    )


def cache_of(layer: LayerCache) -> PagedCache:
    """Where a layer's keys and values lie."""
    return PagedCache(layer.k_cache, layer.v_cache, layer.k_scale, layer.v_scale, layer.beside)


def weighing_of(layer: LayerCache, part: Part) -> Weighing:
    """How a layer weighs the keys of a part."""
    spec, is_prefix = layer.spec, part is Part.PREFIX
    sinks = None if is_prefix else layer.sinks
    is_chunk = isinstance(spec.window, Chunk)
    return Weighing(
        spec.scale,
        None if is_chunk else spec.sliding,
        spec.soft_cap,
        prefix_only=is_prefix,
        sinks=sinks,
        chunk=most_visible(spec.window) if is_chunk else None,
    )


def attend_cpu(
    q: Tensor, layer: LayerCache, table: PageTablePlan, part: Part, *, wants_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """q: [padded_tokens, num_heads, head_dim].  Returns out and lse as AttentionBackend.forward."""
    call = paged_call(q, layer, table, part, wants_lse=wants_lse)
    paged_attention_cpu(call)
    return call.out, call.lse


def empty_outputs(q: Tensor, layer: LayerCache) -> tuple[Tensor, Tensor]:
    """out [padded_tokens, num_heads, v_head_dim] like q, lse [padded_tokens, num_heads] float32."""
    heads = layer.spec.num_heads
    lse = torch.empty(q.shape[0], heads, dtype=torch.float32, device=q.device)
    return _empty_out(q, layer), lse


def _empty_out(q: Tensor, layer: LayerCache) -> Tensor:
    return q.new_empty(q.shape[0], layer.spec.num_heads, layer.spec.v_head_dim)
