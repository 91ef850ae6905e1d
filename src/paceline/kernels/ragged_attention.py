"""ragged_attention: requests that attend to keys of their own, which lie as the queries do.

Query i of a request with n queries and m keys stands at position m - n + i, so that the last query
and the last key meet (bottom-right, docs/layouts.md).  `causal` hides the keys behind it.  A window
w leaves the keys less than w away: back only where causal, on both sides where not.

Worked example: one request of 5, not causal, window 2.

    query       0     1       2       3       4
    keys        0 1   0 1 2   1 2 3   2 3 4   3 4

Keys may have columns that all their heads share (`SharedColumns`): then a score is the product with
a head's own columns plus that with the shared ones, as in latent attention, where one part of a key
turns for all heads alike (DeepSeek-V2, arXiv:2405.04434, equations 14 to 18).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels._check import reject, require_triton
from paceline.kernels.custom_op import define_op
from paceline.kernels.paged_attention.checks import check_index


class SharedColumns(NamedTuple):
    """More columns of queries and keys; of keys the same for all heads."""

    q: Tensor  # [tokens, heads, shared_dim]  q's dtype
    k: Tensor  # [keys, shared_dim]  q's dtype


def ragged_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shared_q: Tensor | None,
    shared_k: Tensor | None,
    cu_q: Tensor,
    cu_k: Tensor,
    prefix_lens: Tensor | None,
    visible_end: Tensor | None,
    scale: float,
    soft_cap: float | None,
    back: int | None,
    ahead: int | None,
    out: Tensor,
    lse: Tensor,
) -> None:
    """The definition, and the CPU's path: in float32, or in float64 where q is; arguments and
    mutation as `ragged_attention`.

    back, ahead: keys visible on each side of a query, itself included in both; None: all.
    """
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
        scores = q[rows].to(dtype).transpose(0, 1) @ wide_k.mT
        if shared_q is not None and shared_k is not None:
            scores += shared_q[rows].to(dtype).transpose(0, 1) @ shared_k[keys].to(dtype).T
        scores *= scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        if back is not None or ahead is not None:
            hidden = _hidden(scores.shape[1], scores.shape[2], back=back, ahead=ahead)
            scores.masked_fill_(hidden, -math.inf)
        if prefix_lens is not None and visible_end is not None:
            ends = visible_end[rows] - prefix_lens[request]
            scores.masked_fill_(torch.arange(scores.shape[2]) >= ends.unsqueeze(1), -math.inf)
        normalizer = torch.logsumexp(scores, -1)  # [heads, rows]
        divisor = normalizer.masked_fill(normalizer == -math.inf, 0.0).unsqueeze(-1)
        out[rows].copy_((scores.sub_(divisor).exp_() @ wide_v).transpose(0, 1))
        lse[rows].copy_(normalizer.T)


def _hidden(num_q: int, num_k: int, *, back: int | None, ahead: int | None) -> Tensor:
    """[num_q, num_k] bool: keys that a query does not see."""
    distance = torch.arange(num_k) - torch.arange(num_k - num_q, num_k).unsqueeze(1)
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if back is not None:
        hidden |= distance <= -back
    if ahead is not None:
        hidden |= distance >= ahead
    return hidden


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shared_q: Tensor | None,
    shared_k: Tensor | None,
    cu_q: Tensor,
    cu_k: Tensor,
    prefix_lens: Tensor | None,
    visible_end: Tensor | None,
    scale: float,
    soft_cap: float | None,
    back: int | None,
    ahead: int | None,
    out: Tensor,
    lse: Tensor,
) -> None:
    require_triton("ragged_attention", otherwise="choose the torch attention backend")
    from paceline.kernels._triton.ragged_attention import launch_ragged_attention

    keys, masks = (k, v, shared_q, shared_k, cu_q, cu_k), (prefix_lens, visible_end)
    launch_ragged_attention(q, *keys, *masks, scale, soft_cap, back, ahead, out, lse)


_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor? shared_q, Tensor? shared_k, Tensor cu_q, Tensor cu_k, "
    "Tensor? prefix_lens, Tensor? visible_end, float scale, float? soft_cap, int? back, "
    "int? ahead, Tensor(a!) out, Tensor(b!) lse) -> ()"
)
_RAGGED_ATTENTION = define_op(
    "ragged_attention" + _SCHEMA, cpu=ragged_attention_reference, cuda=_launch
)
_BY_TRITON = define_op("ragged_attention_by_triton" + _SCHEMA, cpu=_launch, cuda=_launch)


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
    window_ahead: bool = True,
    soft_cap: float | None = None,
    blocks: tuple[Tensor, Tensor] | None = None,
    shared: SharedColumns | None = None,
    out_dtype: torch.dtype | None = None,
    by_triton: bool = False,
) -> tuple[Tensor, Tensor]:
    """out [tokens, heads, v_head_dim] and lse [tokens, heads] float32, natural.

    q: [tokens, heads, head_dim]; k: [keys, kv_heads, head_dim]; v: [keys, kv_heads, v_head_dim],
    the last dimension contiguous; cu_q, cu_k: [reqs + 1] int32, the last at most tokens and keys.
    window: keys visible back, itself included, and as many ahead where not causal and
    window_ahead; None: all.  soft_cap: of the scaled scores.
    blocks: (prefix_lens [reqs], visible_end [tokens]) int32 of a step whose masks are blocks and
    whose keys are its own rows: each sees those whose position, prefix + place, is below its end.
    shared: columns of q and k that stand beside these.  out_dtype: of out; None: q's.  What is to
    be merged with other parts is not to be rounded before.
    by_triton: on a CPU too, by its interpreter.
    A query without keys, or behind cu_q[-1], gives 0 and -inf.  Graph-safe: the grid depends on
    padded sizes only; no host read of a GPU's numbers.  Raises KernelArgumentError.
    """
    _check(q, k, v, cu_q, cu_k)
    if shared is not None:
        _check_shared(q, k, shared)
    shared_q, shared_k = shared or (None, None)
    prefix_lens, visible_end = blocks or (None, None)
    if prefix_lens is not None and visible_end is not None:
        check_index("prefix_lens", prefix_lens, (cu_q.shape[0] - 1,))
        check_index("visible_end", visible_end, (q.shape[0],))
    ahead = 1 if causal else window if window_ahead else None
    out = torch.empty((*q.shape[:2], v.shape[2]), dtype=out_dtype or q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    run = _BY_TRITON if by_triton else _RAGGED_ATTENTION
    keys, masks = (k, v, shared_q, shared_k, cu_q, cu_k), (prefix_lens, visible_end)
    run(q, *keys, *masks, scale, soft_cap, window, ahead, out, lse)
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


def _check_shared(q: Tensor, k: Tensor, shared: SharedColumns) -> None:
    dim = shared.q.shape[-1]
    wanted = (("shared.q", shared.q, (*q.shape[:2], dim)), ("shared.k", shared.k, (len(k), dim)))
    for name, x, shape in wanted:
        if x.shape != shape or x.stride(-1) != 1 or x.dtype != q.dtype:
            reject(
                name,
                expected=f"{q.dtype} {list(shape)} with a contiguous last dimension",
                got=x,
                remedy="pass as many columns of each query's heads as of each key",
            )
