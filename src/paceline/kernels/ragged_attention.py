"""ragged_attention: requests that attend to keys of their own, which lie as the queries do.

Query i of a request with n queries and m keys stands at position m - n + i, so that the last query
and the last key meet (bottom-right, docs/layouts.md).  `causal` hides the keys behind it.  A window
w leaves the keys less than w away: back only where causal, on both sides where not.

Worked example: one request of 5, not causal, window 2.

    query       0     1       2       3       4
    keys        0 1   0 1 2   1 2 3   2 3 4   3 4
"""

import math

import torch
from torch import Tensor

from paceline.kernels._check import reject
from paceline.kernels.custom_op import define_op


def ragged_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    causal: bool,
    scale: float,
    window: int | None,
    out: Tensor,
    lse: Tensor,
) -> None:
    """The definition, and the CPU's path: in float32, or in float64 where q is; arguments and
    mutation as `ragged_attention`."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // k.shape[1]
    ends_q, ends_k = cu_q.tolist(), cu_k.tolist()
    out[ends_q[-1] :].zero_()
    lse[ends_q[-1] :].fill_(-math.inf)
    for request in range(len(ends_q) - 1):
        rows = slice(ends_q[request], ends_q[request + 1])
        keys = slice(ends_k[request], ends_k[request + 1])
        wide_k, wide_v = (
            x[keys].to(dtype).repeat_interleave(group, 1).transpose(0, 1) for x in (k, v)
        )
        scores = q[rows].to(dtype).transpose(0, 1) @ wide_k.mT * scale
        hidden = _hidden(scores.shape[1], scores.shape[2], causal=causal, window=window)
        if hidden is not None:
            scores.masked_fill_(hidden, -math.inf)
        normalizer = torch.logsumexp(scores, -1)  # [heads, rows]
        divisor = normalizer.masked_fill(normalizer == -math.inf, 0.0).unsqueeze(-1)
        out[rows].copy_((scores.sub_(divisor).exp_() @ wide_v).transpose(0, 1))
        lse[rows].copy_(normalizer.T)


def _hidden(num_q: int, num_k: int, *, causal: bool, window: int | None) -> Tensor | None:
    """[num_q, num_k] bool; None: every query sees every key."""
    if not causal and window is None:
        return None
    ahead = torch.arange(num_k) - torch.arange(num_k - num_q, num_k).unsqueeze(1)
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    if causal:
        hidden |= ahead > 0
    if window is not None:
        hidden |= ahead.abs() >= window
    return hidden


def _ragged_attention_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    causal: bool,
    scale: float,
    window: int | None,
    out: Tensor,
    lse: Tensor,
) -> None:
    from paceline.kernels._triton.ragged_attention import launch_ragged_attention

    launch_ragged_attention(q, k, v, cu_q, cu_k, causal, scale, window, out, lse)


_RAGGED_ATTENTION = define_op(
    "ragged_attention(Tensor q, Tensor k, Tensor v, Tensor cu_q, Tensor cu_k, bool causal, "
    "float scale, int? window, Tensor(a!) out, Tensor(b!) lse) -> ()",
    cpu=ragged_attention_reference,
    cuda=_ragged_attention_cuda,
)


def ragged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    *,
    causal: bool,
    scale: float,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """out [tokens, heads, v_head_dim] in q's dtype and lse [tokens, heads] float32, natural.

    q: [tokens, heads, head_dim]; k: [keys, kv_heads, head_dim]; v: [keys, kv_heads, v_head_dim],
    the last dimension contiguous; cu_q, cu_k: [reqs + 1] int32, the last at most tokens and keys.
    window: keys visible back, itself included, and as many ahead where not causal; None: all.
    A query without keys, or behind cu_q[-1], gives 0 and -inf.  Graph-safe: the grid depends on
    padded sizes only; no host read of a GPU's numbers.  Raises KernelArgumentError.
    """
    _check(q, k, v, cu_q, cu_k)
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    _RAGGED_ATTENTION(q, k, v, cu_q, cu_k, causal, scale, window, out, lse)
    return out, lse


def _check(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> None:
    heads, dim = q.shape[1:]
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 3 or x.stride(2) != 1 or x.dtype != q.dtype:
            expected = f"{q.dtype} [rows, heads, dim] with contiguous rows of each head"
            reject(name, expected=expected, got=x, remedy="pass projections of one dtype")
    if k.shape[2] != dim or k.shape[:2] != v.shape[:2] or heads % k.shape[1]:
        expected = f"[keys, a divisor of {heads}, {dim}], as many keys and heads as v"
        reject("k", expected=expected, got=k, remedy="pass the projections of one layer")
    for name, cu in (("cu_q", cu_q), ("cu_k", cu_k)):
        if cu.dtype != torch.int32 or cu.shape != cu_q.shape:
            expected = f"int32 {list(cu_q.shape)}"
            reject(name, expected=expected, got=cu, remedy="pass prefix sums of lengths")
