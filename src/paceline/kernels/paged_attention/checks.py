"""Argument checks that paged_decode and paged_extend share: shapes, dtypes, strides, devices.

Values are never looked at: that would synchronise.
"""

import torch
from torch import Tensor

from paceline.core.errors import KernelArgumentError
from paceline.kernels._check import reject
from paceline.kernels.paged_attention.call import PagedCache, PagedCall, Weighing
from paceline.kernels.scaled_latents import CODE, ScaledLatents

FP8 = CODE  # the one quantised cache format


def check_call(call: PagedCall, num_reqs: int) -> None:
    """All of a call but its lengths and its mask."""
    _check_cache(call.q, call.cache)
    _check_scales(call.cache)
    _check_sinks(call.q, call.weighing.sinks)
    check_lookback(call.weighing)
    _check_page_table(call.rows.page_table, num_reqs)
    _check_outputs(call)


def _check_cache(q: Tensor, cache: PagedCache) -> None:
    """q is [tokens, heads, head_dim] and the caches are NHD pages of its dtype or of fp8."""
    if q.dim() != 3 or q.stride(2) != 1:
        reject(
            "q",
            expected="[tokens, heads, head_dim] with a contiguous last dimension",
            got=q,
            remedy="view the projection as heads",
        )
    k_cache, v_cache = cache.k, cache.v
    columns = q.shape[2] - (cache.head_dim - k_cache.shape[-1])
    is_pages = k_cache.dim() == 4 and k_cache.shape[3] == columns
    if not is_pages or not (_matches(k_cache, q) or _matches(k_cache, q, FP8)):
        reject(
            "k_cache",
            expected=f"{q.dtype} or {FP8} [num_pages, page_size, kv_heads, {columns}] on "
            f"{q.device}",
            got=k_cache,
            remedy="pass one layer's K pages in NHD order",
        )
    if q.shape[1] % k_cache.shape[2]:
        reject(
            "q",
            expected=f"heads divisible by the cache's {k_cache.shape[2]}",
            got=q,
            remedy="use a model whose KV heads divide its heads",
        )
    same_pages = v_cache.dim() == 4 and v_cache.shape[:3] == k_cache.shape[:3]
    if not same_pages or not _matches(v_cache, q, k_cache.dtype):
        reject(
            "v_cache",
            expected=f"{k_cache.dtype} {list(k_cache.shape[:3])} + [v_head_dim] on {q.device}",
            got=v_cache,
            remedy="pass the same layer's V pages in NHD order",
        )


def _check_scales(cache: PagedCache) -> None:
    """An fp8 cache has both scales, [1] float32, and V beside K; any other has none."""
    if cache.beside is not None:
        _check_latents(cache, cache.beside)
        return
    if cache.k.dtype == FP8 and cache.v_in_k:
        reject(
            "v_cache",
            expected=f"pages of its own, for a cache of {FP8} with scales of a layer",
            got=cache.v,
            remedy="pass latents as codes with scales of rows; see kernels/scaled_latents.py",
        )
    for name, scale in (("k_scale", cache.k_scale), ("v_scale", cache.v_scale)):
        if cache.k.dtype == FP8:
            if scale is None or scale.dtype != torch.float32 or scale.shape != (1,):
                reject(
                    name,
                    expected=f"float32 [1], for a cache of {FP8}",
                    got=scale,
                    remedy="pass the scale that the cache was written with",
                )
        elif scale is not None:
            reject(
                name,
                expected=f"None, for a cache of {cache.k.dtype}",
                got=scale,
                remedy="only a quantised cache has scales",
            )


def _check_latents(cache: PagedCache, beside: ScaledLatents) -> None:
    """Codes of one KV head, which are V too, with a scale and what turned for each."""
    pages = cache.k.shape[:3]
    if cache.k.dtype != FP8 or pages[2] != 1 or cache.v.data_ptr() != cache.k.data_ptr():
        reject(
            "k_cache",
            expected=f"{FP8} [num_pages, page_size, 1, rank], which is v_cache too, of latents",
            got=cache.k,
            remedy="pass the codes of a layer's latents as both",
        )
    if cache.k_scale is not None or cache.v_scale is not None:
        reject(
            "k_scale",
            expected="None, for latents, whose rows have their own",
            got=cache.k_scale,
            remedy="leave scales of a layer out",
        )
    turned, scales = beside
    if turned.shape[:3] != pages or turned.dtype == FP8 or turned.stride(3) != 1:
        reject(
            "turned",
            expected=f"{list(pages)} + [rope_dim] in the model's dtype",
            got=turned,
            remedy="pass the same layer's rows of what turned",
        )
    if scales.shape != (*pages, 1) or scales.dtype != torch.float32:
        reject(
            "scales",
            expected=f"float32 {[*pages, 1]}",
            got=scales,
            remedy="pass the same layer's scales of rows",
        )


def _check_sinks(q: Tensor, sinks: Tensor | None) -> None:
    """None, or contiguous [heads] float32."""
    if sinks is None:
        return
    if sinks.shape != (q.shape[1],) or sinks.dtype != torch.float32 or not sinks.is_contiguous():
        reject(
            "sinks",
            expected=f"None or contiguous float32 [{q.shape[1]}]",
            got=sinks,
            remedy="pass the layer's sinks, one score per query head",
        )


def check_lookback(weighing: Weighing) -> None:
    """A window, or chunks of a token and more, or neither."""
    window, chunk = weighing.window, weighing.chunk
    if chunk is not None and (window is not None or chunk < 1):
        raise KernelArgumentError.about(
            "chunk",
            expected="None, or at least 1 without a window",
            got=f"{chunk}, with a window of {window}",
            remedy="a layer's queries look back in one way; see attention/paged.py",
        )


def _check_outputs(call: PagedCall) -> None:
    """out is [tokens, heads, v_head_dim] in q's dtype, lse contiguous [tokens, heads] float32."""
    q, out, lse, v_head_dim = call.q, call.out, call.lse, call.cache.v.shape[3]
    tokens, heads, _ = q.shape
    if out.shape != (tokens, heads, v_head_dim) or not _matches(out, q):
        reject(
            "out",
            expected=f"{q.dtype} [{tokens}, {heads}, {v_head_dim}] on {q.device}",
            got=out,
            remedy="allocate it per step or in the backend's buffers",
        )
    is_lse = lse is not None and lse.shape == (tokens, heads) and lse.dtype == torch.float32
    if lse is None or not is_lse or not lse.is_contiguous():
        reject(
            "lse",
            expected=f"contiguous float32 [{tokens}, {heads}]",
            got=lse,
            remedy="allocate it per step or in the backend's buffers",
        )


def check_index(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """A contiguous int32 tensor of exactly this shape."""
    if tensor.shape != shape or tensor.dtype != torch.int32 or not tensor.is_contiguous():
        reject(
            name,
            expected=f"contiguous int32 {list(shape)}",
            got=tensor,
            remedy="pass the step view's tensor",
        )


def _check_page_table(page_table: Tensor, num_reqs: int) -> None:
    """An int32 [reqs, max_pages] table with contiguous rows."""
    fits = page_table.dim() == 2 and page_table.shape[0] == num_reqs and page_table.stride(1) == 1
    if not fits or page_table.dtype != torch.int32:
        reject(
            "page_table",
            expected=f"int32 [{num_reqs}, max_pages] with contiguous rows",
            got=page_table,
            remedy="pass the group's page_table of this step",
        )


def _matches(tensor: Tensor, q: Tensor, dtype: torch.dtype | None = None) -> bool:
    same_place = tensor.dtype == (dtype or q.dtype) and tensor.device == q.device
    return same_place and tensor.stride(-1) == 1
