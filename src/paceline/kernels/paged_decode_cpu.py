"""Decode attention on the CPU, in two operators: which slots a step reads, and one layer's read.

Every layer of a cache group reads the same slots, so they are listed once per step.  A layer then
gathers its keys and values into one padded block, all requests together, for a single
scaled_dot_product_attention.  Worked example: page size 4, window None, kv_lens [3, 6],
page_table [[2, 0], [5, 7]]:

    extent  [6, 0]                                the longest reach; not one run
    slots   [8, 9, 10, 8, 8, 8]                   request 0; behind its end: its first key again,
            [20, 21, 22, 23, 28, 29]              so that nothing foreign is ever read
    bias    [0, 0, 0, -inf, -inf, -inf]  [0, ...]  and that key is then masked

A single request whose slots are neighbours is read in place: extent holds its first slot.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core.errors import KernelArgumentError
from paceline.core.model.lookback import Chunk, Lookback
from paceline.core.padding import PAD_PAGE
from paceline.kernels.custom_op import Run, define_op
from paceline.kernels.paged_attention.call import PagedCache, Weighing


def decode_slots_cpu(
    page_table: Tensor,
    kv_lens: Tensor,
    *,
    page_size: int,
    window: Lookback | None,
    extent: Tensor,
    slots: Tensor,
    bias: Tensor,
) -> None:
    """List the slots that one query per request reads, densely as [reqs, extent].

    page_table: [reqs, max_pages] int32; kv_lens: [reqs] int32, each at least 1; window: of
    the layers that read them.  Mutates extent [2] int64 (the longest reach; the first slot of a
    single request in one run, else 0), and unless there is such a run slots [capacity] int32 and
    bias [capacity], of which the first reqs * reach entries are written.  Recordable.
    """
    chunk = window.size if isinstance(window, Chunk) else None
    sliding = None if isinstance(window, Chunk) else window
    _DECODE_SLOTS(page_table, kv_lens, page_size, sliding, chunk, extent, slots, bias)


def paged_decode_cpu(
    q: Tensor, cache: PagedCache, weighing: Weighing, *, extent: Tensor, slots: Tensor, bias: Tensor
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
    _PAGED_DECODE(q, *sides, extent, slots, bias, weighing.sinks, weighing.scale, out)
    return out


def _decode_slots(
    page_table: Tensor,
    kv_lens: Tensor,
    page_size: int,
    window: int | None,
    chunk: int | None,
    extent: Tensor,
    slots: Tensor,
    bias: Tensor,
) -> None:
    first = _first_keys(kv_lens, window, chunk)
    run = _single_run(page_table, kv_lens, page_size, first)
    if run is not None:
        extent.copy_(torch.tensor(run))
        return
    reqs = kv_lens.shape[0]
    reach = kv_lens - first
    longest = int(reach.max())
    columns = torch.arange(longest, dtype=torch.int32)
    is_live = columns < reach.unsqueeze(1)
    positions = first.unsqueeze(1) + columns * is_live  # a dead entry: the first key
    pages = page_table.gather(1, (positions // page_size).long())
    size = reqs * longest
    torch.add(positions % page_size, pages, alpha=page_size, out=slots[:size].view(reqs, longest))
    bias[:size].view(reqs, longest).fill_(0.0).masked_fill_(~is_live, -math.inf)
    extent.copy_(torch.tensor((longest, 0)))


def _first_keys(kv_lens: Tensor, window: int | None, chunk: int | None) -> Tensor:
    """[reqs] int32: the first key that the last token of each request sees."""
    if chunk is not None:
        own = kv_lens - 1
        return own - own % chunk
    return torch.zeros_like(kv_lens) if window is None else (kv_lens - window).clamp_(min=0)


def _single_run(
    page_table: Tensor, kv_lens: Tensor, page_size: int, first_keys: Tensor
) -> tuple[int, int] | None:
    """(reach, first slot) of a single request whose live pages are neighbours, not page 0."""
    if kv_lens.shape[0] != 1:
        return None
    kv_len, first = int(kv_lens), int(first_keys)
    pages = page_table[0, first // page_size : -(-kv_len // page_size)].tolist()
    if pages[0] == PAD_PAGE or pages != list(range(pages[0], pages[0] + len(pages))):
        return None
    return kv_len - first, pages[0] * page_size + first % page_size


def _bind_paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    extent: Tensor,
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

    def run() -> None:
        longest, first = extent.tolist()
        all_k = k_cache.flatten(0, 1) if view_of_k is None else view_of_k
        all_v = v_cache.flatten(0, 1) if view_of_v is None else view_of_v
        mask = None
        if first:
            k, v = all_k[first : first + longest], all_v[first : first + longest]
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
    "Tensor(a!) extent, Tensor(b!) slots, Tensor(c!) bias) -> ()",
    cpu=_decode_slots,
)
_PAGED_DECODE = define_op(
    "paged_decode_cpu(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? k_scale, "
    "Tensor? v_scale, Tensor extent, Tensor slots, Tensor bias, Tensor? sinks, float scale, "
    "Tensor(a!) out) -> ()",
    bind=_bind_paged_decode,
)
