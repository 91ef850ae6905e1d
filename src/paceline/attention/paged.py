"""Our own paged kernels, asked for one layer of a step: on a CPU, and by Triton.

Both take the page-table layout, every mask, and one part of the keys.  With Part.PREFIX the sinks
wait for the merge that joins the parts.
"""

import torch
from torch import Tensor

from paceline.attention.contract import LayerCache, Part
from paceline.attention.layouts.page_table import PageTablePlan
from paceline.kernels.paged_attention import SplitWorkspace, paged_extend
from paceline.kernels.paged_attention_cpu import paged_attention_cpu


def attend_cpu(
    q: Tensor, layer: LayerCache, table: PageTablePlan, part: Part, *, wants_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """q: [padded_tokens, num_heads, head_dim].  Returns out and lse as AttentionBackend.forward."""
    spec, is_prefix = layer.spec, part is Part.PREFIX
    return paged_attention_cpu(
        q,
        layer.k_cache,
        layer.v_cache,
        table.page_tables[spec.group],
        table.prefix_lens,
        table.cu_seqlens_q,
        mask=table.mask,
        tree_mask=table.tree_mask,
        scale=spec.scale,
        window=spec.window,
        soft_cap=spec.soft_cap,
        prefix_only=is_prefix,
        wants_lse=wants_lse,
        k_scale=layer.k_scale,
        v_scale=layer.v_scale,
        sinks=None if is_prefix else layer.sinks,
    )


def attend_triton(
    q: Tensor,
    layer: LayerCache,
    table: PageTablePlan,
    part: Part,
    *,
    out: Tensor,
    lse: Tensor,
    workspace: SplitWorkspace | None = None,
) -> None:
    """The same on CUDA, and in Triton's interpreter; `out` and `lse` as `empty_outputs` makes them.

    workspace: splits keys among programs where rows are few; see `paged_extend`.
    """
    spec, is_prefix = layer.spec, part is Part.PREFIX
    paged_extend(
        q,
        layer.k_cache,
        layer.v_cache,
        table.page_tables[spec.group],
        table.prefix_lens,
        table.kv_lens,
        table.cu_seqlens_q,
        max_extend_len=table.max_extend_len,
        scale=spec.scale,
        window=spec.window,
        soft_cap=spec.soft_cap,
        out=out,
        lse=lse,
        mask=table.mask,
        tree_mask=table.tree_mask,
        prefix_only=is_prefix,
        k_scale=layer.k_scale,
        v_scale=layer.v_scale,
        sinks=None if is_prefix else layer.sinks,
        workspace=workspace,
    )


def empty_outputs(q: Tensor, layer: LayerCache) -> tuple[Tensor, Tensor]:
    """out [padded_tokens, num_heads, v_head_dim] like q, lse [padded_tokens, num_heads] float32."""
    spec = layer.spec
    out = q.new_empty(q.shape[0], spec.num_heads, spec.v_head_dim)
    return out, torch.empty(q.shape[0], spec.num_heads, dtype=torch.float32, device=q.device)
