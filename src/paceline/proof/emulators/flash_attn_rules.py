"""What emulators of FlashAttention share: rules that a call can break, and the definition."""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.errors import KernelArgumentError


def require(holds: bool, name: str, expected: object, got: object) -> None:
    if not holds:
        remedy = "see the library's interface: the real kernel would read elsewhere, or refuse"
        raise KernelArgumentError.about(name, expected=expected, got=got, remedy=remedy)


def require_operands(q: Tensor, k: Tensor, v: Tensor, *, places: int) -> None:
    """Dtypes, head dims and heads of q [tokens, heads, dim], k and v [places..., heads, dim]."""
    require(q.dtype in (torch.bfloat16, torch.float16), "q", "bfloat16 or float16", q.dtype)
    require(k.dtype == v.dtype == q.dtype, "k and v dtype", q.dtype, (k.dtype, v.dtype))
    shapes, dims = (tuple(q.shape), tuple(k.shape), tuple(v.shape)), places + 2
    fits = q.dim() == 3 and k.dim() == v.dim() == dims
    require(fits, "q, k and v", f"3, {dims} and {dims} dims", shapes)
    require(k.shape[:-1] == v.shape[:-1], "places and heads of v", k.shape[:-1], v.shape[:-1])
    require(q.shape[-1] == k.shape[-1], "head dim of k", q.shape[-1], k.shape[-1])
    heads, kv_heads = q.shape[1], k.shape[-2]
    require(heads % kv_heads == 0, "heads", f"a multiple of {kv_heads} KV heads", heads)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        require(tensor.stride(-1) == 1, f"last stride of {name}", 1, tensor.stride(-1))


def require_head_dims(q: Tensor, v: Tensor) -> None:
    for name, dim in (("head dim", q.shape[-1]), ("V head dim", v.shape[-1])):
        require(8 <= dim <= 256 and dim % 8 == 0, name, "a multiple of 8 from 8 to 256", dim)


def require_list(name: str, given: Tensor, like: Tensor) -> None:
    """What a kernel reads lengths or pages from."""
    require(given.dtype == torch.int32, f"{name} dtype", torch.int32, given.dtype)
    require(given.stride(-1) == 1, f"last stride of {name}", 1, given.stride(-1))
    require(given.device == like.device, f"{name} device", like.device, given.device)


def require_offsets(side: str, offsets: Sequence[int], longest: int) -> None:
    """The offsets of one run.  side: q or k."""
    require(offsets[0] == 0, f"cu_seqlens_{side}[0]", 0, offsets[0])
    lens = [end - start for start, end in itertools.pairwise(offsets)]
    require(min(lens) >= 0, f"cu_seqlens_{side}", "monotone", list(offsets))
    most = max(lens)
    require(longest >= most, f"max_seqlen_{side}", f"at least {most}", longest)


def seen(queries: int, keys: int, loaded: int, *, left: int | None, right: int | None) -> Tensor:
    """[queries, loaded] bool: aligned so that the last query is at the last key."""
    at = torch.arange(loaded)
    own = torch.arange(queries).unsqueeze(1) + (keys - queries)
    seen = (at < keys).expand(queries, -1)
    if left is not None:
        seen = seen & (at >= own - left)
    if right is not None:
        seen = seen & (at <= own + right)
    return seen


def attend(
    q: Tensor,  # [queries, heads, head_dim]
    k: Tensor,  # [loaded, kv_heads, head_dim]
    v: Tensor,  # [loaded, kv_heads, v_head_dim]
    seen: Tensor,  # [queries, loaded]  bool
    *,
    scale: float,
    soft_cap: float,
    sink: Tensor | None,  # [heads]
) -> tuple[Tensor, Tensor]:
    """out [queries, heads, v_head_dim], lse [heads, queries] float32.

    Scores and sums are float32; weights are rounded to the dtype of v before they meet it.
    """
    group = q.shape[1] // k.shape[1]
    keys, values = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~seen, -math.inf)
    highest = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - highest.masked_fill(highest == -math.inf, 0.0))
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink.float().view(-1, 1, 1) - highest)
    mixed = torch.einsum("hqk,khd->hqd", weights.to(v.dtype).float(), values)
    out = mixed / total.masked_fill(total == 0.0, 1.0)
    return out.transpose(0, 1).to(q.dtype), (highest + total.log()).squeeze(-1)
