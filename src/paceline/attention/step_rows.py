"""Part.STEP by our own kernels: a step's own rows among themselves, from the k and v arguments.

No cache is looked at, so that its pages and what was written there cannot matter; whether keys and
values are those of the layer's cache, or expanded from latents, is the asker's.
"""

import torch
from torch import Tensor

from paceline.attention.contract import LayerCache
from paceline.attention.layouts.page_table import PageTablePlan
from paceline.core.model.lookback import Chunk, Lookback
from paceline.core.modes import MaskKind
from paceline.kernels.ragged_attention import ragged_attention
from paceline.kernels.tree_attention import tree_attention


def attend_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: LayerCache,
    table: PageTablePlan,
    *,
    by_triton: bool = False,
) -> tuple[Tensor, Tensor]:
    """(out [padded_tokens, num_heads, v_head_dim], lse [padded_tokens, num_heads] float32) of a
    layer over the rows of its own request in the step, under the step's mask; no sinks.

    q: [padded_tokens, num_heads, head_dim]; k, v: [padded_tokens, num_kv_heads, *head_dim], whose
    heads and dims need not be those of the cache.  Windows and chunks go by position, as always.
    Raises ConfigError for a layer with chunks where the step is no tree.
    by_triton: on a CPU too, by its interpreter.
    """
    spec = layer.spec
    if table.mask is MaskKind.TREE:
        assert table.tree_mask is not None, "a tree step carries a tree mask"
        extend = table.max_extend_len
        out = q.new_empty(*q.shape[:2], v.shape[2])
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        tree_attention(
            q,
            k,
            v,
            _within(table.tree_mask[:, :extend], table.prefix_lens, spec.window),
            extend_len=extend,
            scale=spec.scale,
            soft_cap=spec.soft_cap,
            out=out,
            lse=lse,
            by_triton=by_triton,
        )
        return out, lse
    blocks = None
    if table.visible_end is not None:
        blocks = table.prefix_lens, table.visible_end
    return ragged_attention(
        q,
        k,
        v,
        table.cu_seqlens_q,
        table.cu_seqlens_q,
        causal=table.mask is MaskKind.CAUSAL,
        scale=spec.scale,
        window=spec.sliding,
        window_ahead=False,
        soft_cap=spec.soft_cap,
        blocks=blocks,
        by_triton=by_triton,
    )


def _within(tree_mask: Tensor, prefix_lens: Tensor, lookback: Lookback | None) -> Tensor:
    """[padded_tokens, extend] bool: the mask, less the ancestors that a window or a chunk hides.

    Worked example, a chain of 3 behind a prefix of 5: the third row's [1, 1, 1] becomes [0, 1, 1]
    under a window of 2, and [0, 0, 1] in chunks of 7.
    """
    if lookback is None:
        return tree_mask
    extend = tree_mask.shape[1]
    depths = tree_mask.sum(1, dtype=torch.int32)
    if isinstance(lookback, Chunk):
        positions = prefix_lens.repeat_interleave(extend) + depths - 1
        own = positions // lookback.size  # a chunk's number
        return tree_mask & (own.unsqueeze(1) == _by_column(own, extend))
    return tree_mask & (depths.unsqueeze(1) - _by_column(depths, extend) < lookback)


def _by_column(rows: Tensor, extend: int) -> Tensor:
    """[padded_tokens] -> [padded_tokens, extend]: of each row of the same request."""
    return rows.view(-1, extend).repeat_interleave(extend, 0)
