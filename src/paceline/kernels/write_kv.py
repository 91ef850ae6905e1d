"""Scatter the step's K and V into the paged pool: cache[slot of token t] = k[t], v[t]."""

import torch
from torch import Tensor

from paceline.kernels._check import reject
from paceline.kernels.custom_op import define_op


def write_kv_reference(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, out_cache_loc: Tensor
) -> None:
    """The definition, token by token; shapes and mutation as `write_kv`."""
    page_size = k_cache.shape[1]
    for token, slot in enumerate(out_cache_loc.tolist()):
        k_cache[slot // page_size, slot % page_size] = k[token]
        v_cache[slot // page_size, slot % page_size] = v[token]


def _write_kv_cpu(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, out_cache_loc: Tensor
) -> None:
    for x, cache in ((k, k_cache), (v, v_cache)):
        page_size = cache.shape[1]
        if cache.stride(0) == page_size * cache.stride(1):
            cache.view(-1, cache.shape[2], cache.shape[3]).index_copy_(0, out_cache_loc, x)
        else:
            cache.index_put_((out_cache_loc // page_size, out_cache_loc % page_size), x)


def _write_kv_cuda(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, out_cache_loc: Tensor
) -> None:
    from paceline.kernels._triton.write_kv import launch_write_kv

    launch_write_kv(k, v, k_cache, v_cache, out_cache_loc)


_WRITE_KV = define_op(
    "write_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor out_cache_loc) -> ()",
    cpu=_write_kv_cpu,
    cuda=_write_kv_cuda,
)


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, out_cache_loc: Tensor) -> None:
    """Write each token's K and V to its slot (page = slot // page_size).

    k: [tokens, kv_heads, head_dim], v: [tokens, kv_heads, v_head_dim], rows may be strided;
    k_cache: [num_pages, page_size, kv_heads, head_dim] and v_cache with v_head_dim, in k's dtype;
    out_cache_loc: [tokens] int64 slots (trusted: they live on the device).  Mutates the caches.
    Tokens that share a slot (padding) leave any one of their values.  Graph-safe: the grid depends
    on shapes only.  Raises KernelArgumentError.
    """
    _check_pair("k", k, "k_cache", k_cache)
    _check_pair("v", v, "v_cache", v_cache)
    if out_cache_loc.shape != k.shape[:1] or out_cache_loc.dtype != torch.int64:
        reject(
            "out_cache_loc",
            expected=f"int64 [{k.shape[0]}]",
            got=out_cache_loc,
            remedy="pass the group's out_cache_loc of this step",
        )
    _WRITE_KV(k, v, k_cache, v_cache, out_cache_loc)


def _check_pair(name: str, x: Tensor, cache_name: str, cache: Tensor) -> None:
    if x.dim() != 3 or x.stride(2) != 1:
        reject(
            name,
            expected="[tokens, kv_heads, dim] with a contiguous last dimension",
            got=x,
            remedy="view the projection as heads before writing",
        )
    fits = cache.dim() == 4 and cache.shape[2:] == x.shape[1:] and cache.stride(3) == 1
    if not fits or cache.dtype != x.dtype or cache.device != x.device:
        reject(
            cache_name,
            expected=f"{x.dtype} [num_pages, page_size, {x.shape[1]}, {x.shape[2]}] on {x.device}",
            got=cache,
            remedy="allocate the pool in the model's dtype",
        )
