"""Decode attention on the CPU, in two operators: which slots a step reads, and one layer's read.

Every layer of a cache group reads the same slots, so they are listed once per step.  A layer then
gathers its keys and values into one padded block, all requests together, for a single
scaled_dot_product_attention.  Worked example: page size 4, window None, kv_lens [3, 6],
page_table [[2, 0], [5, 7]]:

    extents [3, 8]  [6, 0]                        each reach; its first slot, 0: not one run
    slots   [8, 9, 10, 8, 8, 8]                   request 0; behind its end: its first key again,
            [20, 21, 22, 23, 28, 29]              so that nothing foreign is ever read
    bias    [0, 0, 0, -inf, -inf, -inf]  [0, ...]  and that key is then masked

A single request whose slots are neighbours is read in place, and nothing else is listed of it.

Where one thread computes in float32, requests of more than a few keys are multiplied one by one, by
OpenBLAS, each in place where its slots are neighbours; the softmax is of all together.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.errors import KernelArgumentError
from paceline.core.model.lookback import Chunk, Lookback
from paceline.core.padding import PAD_PAGE
from paceline.kernels.custom_op import Run, define_op, host_array
from paceline.kernels.openblas import computes_alone
from paceline.kernels.paged_attention.call import PagedCache, Weighing

_FEW_KEYS = 64  # of a request, on the mean, up to which a block for all of them is faster


def decode_slots_cpu(
    page_table: Tensor,
    kv_lens: Tensor,
    *,
    page_size: int,
    window: Lookback | None,
    extents: Tensor,
    slots: Tensor,
    bias: Tensor,
) -> None:
    """List the slots that one query per request reads, densely as [reqs, longest reach].

    page_table: [reqs, max_pages] int32; kv_lens: [reqs] int32, each at least 1; window: of
    the layers that read them.  Mutates extents [max_reqs, 2] int64 (the reach of each; its first
    slot where all are neighbours, else 0), and but for a single request of neighbours slots
    [capacity] int32 and bias [capacity], of which the first reqs * longest entries are written.
    Recordable.
    """
    chunk = window.size if isinstance(window, Chunk) else None
    sliding = None if isinstance(window, Chunk) else window
    _DECODE_SLOTS(page_table, kv_lens, page_size, sliding, chunk, extents, slots, bias)


def paged_decode_cpu(
    q: Tensor,
    cache: PagedCache,
    weighing: Weighing,
    *,
    extents: Tensor,
    slots: Tensor,
    bias: Tensor,
) -> Tensor:
    """Attend one query per request to the slots that `decode_slots_cpu` listed.

    q: [reqs, heads, head_dim]; bias in q's dtype.  Returns [reqs, heads, v_head_dim].  Recordable.
    A window, or a chunk, is in the slots.  Raises KernelArgumentError for a soft cap and for the
    prefix alone.
    """
    if weighing.soft_cap is not None or weighing.prefix_only:
        raise KernelArgumentError.about(
            "weighing of paged_decode_cpu",
            expected="without a soft cap, over all keys",
            got=f"soft_cap {weighing.soft_cap}, prefix_only {weighing.prefix_only}",
            remedy="call paged_attention_cpu",
        )
    *sides, beside = cache
    assert beside is None, "paged_attention_cpu reads latents in float8"
    out = torch.empty(*q.shape[:2], cache.v.shape[3], dtype=q.dtype, device=q.device)
    _PAGED_DECODE(q, *sides, extents, slots, bias, weighing.sinks, weighing.scale, out)
    return out


def _decode_slots(
    page_table: Tensor,
    kv_lens: Tensor,
    page_size: int,
    window: int | None,
    chunk: int | None,
    extents: Tensor,
    slots: Tensor,
    bias: Tensor,
) -> None:
    first, reqs = _first_keys(kv_lens, window, chunk), kv_lens.shape[0]
    reach = kv_lens - first
    starts = _run_starts(page_table, kv_lens, page_size, first)
    extents[:reqs, 0], extents[:reqs, 1] = reach, torch.from_numpy(starts)
    if reqs == 1 and starts[0]:
        return
    longest = int(reach.max())
    columns = torch.arange(longest, dtype=torch.int32)
    is_live = columns < reach.unsqueeze(1)
    positions = first.unsqueeze(1) + columns * is_live  # a dead entry: the first key
    pages = page_table.gather(1, (positions // page_size).long())
    size = reqs * longest
    torch.add(positions % page_size, pages, alpha=page_size, out=slots[:size].view(reqs, longest))
    bias[:size].view(reqs, longest).fill_(0.0).masked_fill_(~is_live, -math.inf)


def _first_keys(kv_lens: Tensor, window: int | None, chunk: int | None) -> Tensor:
    """[reqs] int32: the first key that the last token of each request sees."""
    if chunk is not None:
        own = kv_lens - 1
        return own - own % chunk
    return torch.zeros_like(kv_lens) if window is None else (kv_lens - window).clamp_(min=0)


def _run_starts(
    page_table: Tensor, kv_lens: Tensor, page_size: int, first_keys: Tensor
) -> NDArray[np.int64]:
    """[reqs] the first slot of each request whose live pages are neighbours, not page 0; else 0."""
    lens, first = host_array(kv_lens), first_keys.numpy()
    begin, stop = first // page_size, -(-lens // page_size)
    columns = np.arange(stop.max())
    apart = host_array(page_table)[:, : len(columns)] - columns  # neighbours are alike in this
    base = apart[np.arange(len(lens)), begin]
    is_dead = (columns < begin[:, None]) | (columns >= stop[:, None])
    is_run = ((apart == base[:, None]) | is_dead).all(1) & (base + begin != PAD_PAGE)
    return np.where(is_run, (base + begin) * page_size + first % page_size, 0)


def _bind_paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    extents: Tensor,
    slots: Tensor,
    bias: Tensor,
    sinks: Tensor | None,
    scale: float,
    out: Tensor,
) -> Run:
    reqs, heads, _ = q.shape
    kv_heads = k_cache.shape[2]
    blocks = (reqs, kv_heads, heads // kv_heads, -1)
    queries, mixes = q.view(blocks), out.view(blocks)
    view_of_k, view_of_v = _view_slots(k_cache), _view_slots(v_cache)
    all_sinks = None if sinks is None else sinks.view(1, kv_heads, -1, 1)
    is_plain = sinks is None and k_scale is None and v_scale is None
    is_plain = is_plain and {q.dtype, k_cache.dtype, v_cache.dtype} == {torch.float32}
    one_by_one = None
    if is_plain and view_of_k is not None and view_of_v is not None and computes_alone():
        one_by_one = _OneByOne(queries, view_of_k, view_of_v, slots, bias, scale, mixes)

    def run() -> None:
        reaches, starts = extents[:reqs].t().tolist()
        if one_by_one is not None and sum(reaches) >= _FEW_KEYS * reqs:
            one_by_one.run(reaches, starts)
            return
        longest = max(reaches)
        all_k = k_cache.flatten(0, 1) if view_of_k is None else view_of_k
        all_v = v_cache.flatten(0, 1) if view_of_v is None else view_of_v
        mask = None
        if reqs == 1 and starts[0]:
            in_place = slice(starts[0], starts[0] + longest)
            k, v = all_k[in_place], all_v[in_place]
        else:
            index = slots[: reqs * longest]
            k, v = all_k.index_select(0, index), all_v.index_select(0, index)
            mask = bias[: reqs * longest].view(reqs, 1, 1, longest)
        k = k.view(reqs, longest, kv_heads, -1).transpose(1, 2)
        v = v.view(reqs, longest, kv_heads, -1).transpose(1, 2)
        if k.dtype != q.dtype:
            k, v = k.to(q.dtype), v.to(q.dtype)
        factor = scale if k_scale is None else scale * k_scale.item()
        if all_sinks is None:
            mixed = F.scaled_dot_product_attention(queries, k, v, attn_mask=mask, scale=factor)
        else:
            mixed = _with_sinks(queries, k, v, mask, all_sinks, scale=factor)
        mixes.copy_(mixed if v_scale is None else mixed * v_scale)

    return run


class _OneByOne:
    """Products of each request with its own keys and values alone, in float32."""

    def __init__(
        self,
        queries: Tensor,  # [reqs, kv_heads, group, head_dim]
        all_k: Tensor,  # [slots, kv_heads, head_dim]
        all_v: Tensor,  # [slots, kv_heads, v_head_dim]
        slots: Tensor,  # [capacity]
        bias: Tensor,  # [capacity]
        scale: float,
        mixes: Tensor,  # [reqs, kv_heads, group, v_head_dim]  written
    ) -> None:
        self._queries, self._mixes = host_array(queries), host_array(mixes)
        self._k, self._v = host_array(all_k), host_array(all_v)
        self._slots, self._bias = host_array(slots), host_array(bias)
        self._scale = np.float32(scale)

    def run(self, reaches: list[int], starts: list[int]) -> None:
        """reaches, starts: [reqs] as of `decode_slots_cpu`."""
        reqs, longest = len(reaches), max(reaches)
        read: list[slice | NDArray[np.int32]] = [
            slice(start, start + reach) if start else self._slots[n * longest :][:reach]
            for n, (reach, start) in enumerate(zip(reaches, starts, strict=True))
        ]
        with np.errstate(all="ignore"):  # NaN and infinity are the request's, and are told of it
            queries = self._queries * self._scale
            scores = np.zeros((*queries.shape[:3], longest), np.float32)
            for n, reach in enumerate(reaches):
                keys = self._k[read[n]].transpose(1, 2, 0)
                np.matmul(queries[n], keys, out=scores[n, :, :, :reach])
            if reqs > 1:
                scores += self._bias[: reqs * longest].reshape(reqs, 1, 1, longest)
            weights = torch.from_numpy(scores).softmax(3).numpy()
            for n, reach in enumerate(reaches):
                values = self._v[read[n]].transpose(1, 0, 2)
                np.matmul(weights[n, :, :, :reach], values, out=self._mixes[n])


def _view_slots(cache: Tensor) -> Tensor | None:
    """[slots, kv_heads, dim] of one side of the cache; None where its pages do not follow one
    another, and each read copies them."""
    follow = cache.stride(0) == cache.shape[1] * cache.stride(1)
    return cache.flatten(0, 1) if follow else None


def _with_sinks(
    q: Tensor,  # [reqs, kv_heads, group, head_dim]
    k: Tensor,  # [reqs, kv_heads, keys, head_dim]
    v: Tensor,  # [reqs, kv_heads, keys, v_head_dim]
    mask: Tensor | None,  # [reqs, 1, 1, keys]
    sinks: Tensor,  # [1, kv_heads, group, 1]  float32
    *,
    scale: float,
) -> Tensor:
    """[reqs, kv_heads, group, v_head_dim] float32: the sink takes its share and gives no value."""
    scores = q.float() @ k.float().transpose(2, 3) * scale
    if mask is not None:
        scores = scores + mask
    column = sinks.expand(*scores.shape[:3], 1)
    weights = torch.cat((scores, column), dim=3).softmax(3)
    return weights[..., :-1] @ v.float()


_DECODE_SLOTS = define_op(
    "decode_slots_cpu(Tensor page_table, Tensor kv_lens, int page_size, int? window, int? chunk, "
    "Tensor(a!) extents, Tensor(b!) slots, Tensor(c!) bias) -> ()",
    cpu=_decode_slots,
)
_PAGED_DECODE = define_op(
    "paged_decode_cpu(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? k_scale, "
    "Tensor? v_scale, Tensor extents, Tensor slots, Tensor bias, Tensor? sinks, float scale, "
    "Tensor(a!) out) -> ()",
    bind=_bind_paged_decode,
)
