"""Scatter the step's K and V into the paged pool: its definition and its CPU path.

cache[slot of token t] = x[t].  A float8 e4m3 cache stores x / scale, clamped to the largest finite
e4m3 number (448; OCP 8-bit floating point specification, 2023) and rounded to nearest even; NaN
stays NaN.  `rope_write_kv` is the operation that runs it.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from paceline.kernels.custom_op import Run

E4M3_MAX = 448.0


def write_kv_reference(
    x: Tensor, cache: Tensor, out_cache_loc: Tensor, scale: Tensor | None
) -> None:
    """The definition, token by token, for one of K and V.

    x: [tokens, kv_heads, dim]; cache: [num_pages, page_size, kv_heads, dim] in x's dtype, or
    float8_e4m3fn with scale [1] float32; out_cache_loc: [tokens] int64 slots.  Mutates `cache`.
    """
    page_size = cache.shape[1]
    for token, slot in enumerate(out_cache_loc.tolist()):
        row = x[token] if scale is None else quantise_e4m3(x[token], scale)
        cache[slot // page_size, slot % page_size] = row


def quantise_e4m3(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale as float8_e4m3fn, in x's shape; x is about the result times scale [1]."""
    return (x.float() / scale).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def bind_write_kv(x: Tensor, cache: Tensor, out_cache_loc: Tensor, scale: Tensor | None) -> Run:
    """As `write_kv_reference`, all tokens at once."""
    page_size = cache.shape[1]
    if cache.stride(0) != page_size * cache.stride(1):
        return partial(_scatter, x, cache, out_cache_loc, scale)
    if scale is None:
        put: Any = cache.view(-1, *cache.shape[2:]).index_copy_
        return partial(put, 0, out_cache_loc, x)
    slots = cache.view(torch.uint8).view(-1, *cache.shape[2:])

    def run() -> None:  # torch copies float8 by index only as bytes
        slots.index_copy_(0, out_cache_loc, quantise_e4m3(x, scale).view(torch.uint8))

    return run


def _scatter(x: Tensor, cache: Tensor, out_cache_loc: Tensor, scale: Tensor | None) -> None:
    """Into a cache whose pages do not follow one another."""
    if scale is not None:
        x, cache = quantise_e4m3(x, scale).view(torch.uint8), cache.view(torch.uint8)
    page_size = cache.shape[1]
    cache.index_put_((out_cache_loc // page_size, out_cache_loc % page_size), x)
