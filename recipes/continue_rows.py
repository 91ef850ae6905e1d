"""Rows in the target's own words: beginnings of training documents, continued by the target.

What a draft head meets at inference is text the target wrote, so this is what it learns from.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb


def extend(
    model: LlamaForCausalLM, tokens: Tensor, first: int, caches: list[tuple[Tensor, Tensor]]
) -> Tensor:
    """Logits [num_rows, vocab] behind the last of tokens [num_rows, n], at positions first...

    Writes the caches, (k, v) per layer, each [num_rows, 1, row_tokens, head_dim].  n is 1, or first
    is 0.  One KV head, so that query heads can stand as rows of one head.
    """
    inner = model.model
    last = first + tokens.shape[1]
    hidden = inner.embed_tokens(tokens)
    rotary = inner.rotary_emb(hidden, torch.arange(first, last, device=tokens.device)[None])
    for layer, (k_cache, v_cache) in zip(inner.layers, caches, strict=True):
        x, attn = layer.input_layernorm(hidden), layer.self_attn
        q, k, v = (
            project(x).unflatten(-1, (-1, attn.head_dim)).transpose(1, 2)
            for project in (attn.q_proj, attn.k_proj, attn.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *rotary)
        k_cache[:, :, first:last], v_cache[:, :, first:last] = k, v
        if last - first == 1:
            seen = (k_cache[:, :, :last], v_cache[:, :, :last])
            out = F.scaled_dot_product_attention(q.transpose(1, 2), *seen).transpose(1, 2)
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        hidden = hidden + attn.o_proj(out.transpose(1, 2).flatten(2))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return model.lm_head(inner.norm(hidden[:, -1]))


@torch.inference_mode()
def continue_rows(
    model: LlamaForCausalLM, rows: Tensor, num_kept: int, temperature: float
) -> Tensor:
    """rows [num_rows, row_tokens] int64 with all but the first num_kept tokens rewritten.

    Greedy at temperature 0; an end-of-text token is followed by another document.
    """
    if model.config.num_key_value_heads != 1:
        raise SystemExit(f"expected one KV head, got {model.config.num_key_value_heads}")
    rows = rows.clone()
    num_rows, row_tokens = rows.shape
    shape = (2, num_rows, 1, row_tokens, model.config.head_dim)
    caches = [
        tuple(torch.empty(shape, dtype=model.dtype, device=rows.device)) for _ in model.model.layers
    ]
    logits = extend(model, rows[:, :num_kept], 0, caches)
    for position in range(num_kept, row_tokens):
        rows[:, position] = draw(logits, temperature)
        if position + 1 < row_tokens:
            logits = extend(model, rows[:, position : position + 1], position, caches)
    return rows


def draw(logits: Tensor, temperature: float) -> Tensor:
    """[num_rows] int64"""
    if temperature == 0:
        return logits.argmax(-1)
    return torch.multinomial((logits.float() / temperature).softmax(-1), 1)[:, 0]
