"""FlashAttention over keys that lie behind one another, on a CPU; the function of FlashAttention 3.

That of FlashAttention 4 has another signature, and stands with its paged keys in flash_attn.py.
Adversarial habits: a request without a key gets numbers, and rows behind the last request none; a
request's last tile of keys holds the rows behind it, of which those of V are multiplied by 0.

Sources: flash-attention's `hopper/flash_attn_interface.py`; flash-attn-4 4.0.0b15,
`flash_attn.cute.interface`, `flash_fwd_sm90`.
"""

import itertools
import math

import torch
from torch import Tensor

from paceline.kernels.custom_op import define_op
from paceline.proof.emulators.flash_attn_rules import (
    attend,
    require,
    require_head_dims,
    require_list,
    require_offsets,
    require_operands,
    seen,
)

_JUNK = 7.0  # of a request without a key
_TILE = 128  # keys that are loaded at once


def flash_attn_varlen_func(
    q: Tensor,  # [tokens, heads, head_dim]
    k: Tensor,  # [keys, kv_heads, head_dim]
    v: Tensor,  # [keys, kv_heads, v_head_dim]
    cu_seqlens_q: Tensor,  # [reqs + 1]  int32
    cu_seqlens_k: Tensor,  # [reqs + 1]  int32
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """FlashAttention 3: out [tokens, heads, v_head_dim], or (out, lse [heads, tokens])."""
    out, lse = attend_ragged(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=softmax_scale,
        causal=causal,
    )
    return (out, lse) if return_softmax_lse else out


def attend_ragged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Both libraries' kernels: (out, lse [heads, tokens] float32 natural log)."""
    require_operands(q, k, v, places=1)
    require_head_dims(q, v)
    for name, given in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        require_list(name, given, q)
    reqs = len(cu_seqlens_q)
    require(len(cu_seqlens_k) == reqs, "cu_seqlens_k length", reqs, len(cu_seqlens_k))
    out = torch.full((*q.shape[:2], v.shape[-1]), math.nan, dtype=q.dtype, device=q.device)
    lse = torch.full((q.shape[1], q.shape[0]), math.nan, device=q.device)
    scale = softmax_scale if softmax_scale is not None else q.shape[-1] ** -0.5
    lens = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    _EMULATED(q, k, v, *lens, scale, causal, out, lse)
    return out, lse


def _emulate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    causal: bool,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Request by request."""
    queries, keys = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    require_offsets("q", queries, max_seqlen_q)
    require_offsets("k", keys, max_seqlen_k)
    require(queries[-1] <= q.shape[0], "cu_seqlens_q[-1]", f"at most {q.shape[0]}", queries[-1])
    require(keys[-1] <= k.shape[0], "cu_seqlens_k[-1]", f"at most {k.shape[0]}", keys[-1])
    for (start, end), (first, last) in zip(
        itertools.pairwise(queries), itertools.pairwise(keys), strict=True
    ):
        if first == last:
            out[start:end], lse[:, start:end] = _JUNK, _JUNK
        elif start < end:
            num = last - first
            loaded = slice(first, min(first + -(-num // _TILE) * _TILE, len(k)))
            at_once = loaded.stop - first
            visible = seen(end - start, num, at_once, left=None, right=0 if causal else None)
            out[start:end], lse[:, start:end] = attend(
                q[start:end],
                k[loaded],
                v[loaded],
                visible,
                scale=scale,
                soft_cap=0.0,
                sink=None,
            )


_EMULATED = define_op(
    "emulated_ragged_flash_attention(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q,"
    " Tensor cu_seqlens_k, int max_seqlen_q, int max_seqlen_k, float scale, bool causal,"
    " Tensor(a!) out, Tensor(b!) lse) -> ()",
    cpu=_emulate,
)
