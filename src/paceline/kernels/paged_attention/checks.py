"""Argument checks that paged_decode and paged_extend share: shapes, dtypes, strides, devices.

Values are never looked at: that would synchronise.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from paceline.core.errors import KernelArgumentError, message
from paceline.kernels._check import reject


def check_caches(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """q is [tokens, heads, head_dim] and the caches are NHD pages of its dtype."""
    if q.dim() != 3 or q.stride(2) != 1:
        reject(
            "q",
            expected="[tokens, heads, head_dim] with a contiguous last dimension",
            got=q,
            remedy="view the projection as heads",
        )
    if k_cache.dim() != 4 or k_cache.shape[3] != q.shape[2] or not _matches(k_cache, q):
        reject(
            "k_cache",
            expected=f"{q.dtype} [num_pages, page_size, kv_heads, {q.shape[2]}] on {q.device}",
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
    if not same_pages or not _matches(v_cache, q):
        reject(
            "v_cache",
            expected=f"{q.dtype} {list(k_cache.shape[:3])} + [v_head_dim] on {q.device}",
            got=v_cache,
            remedy="pass the same layer's V pages in NHD order",
        )


def check_outputs(q: Tensor, v_cache: Tensor, *, out: Tensor, lse: Tensor) -> None:
    """out is [tokens, heads, v_head_dim] in q's dtype, lse contiguous [tokens, heads] float32."""
    tokens, heads, _ = q.shape
    if out.shape != (tokens, heads, v_cache.shape[3]) or not _matches(out, q):
        reject(
            "out",
            expected=f"{q.dtype} [{tokens}, {heads}, {v_cache.shape[3]}] on {q.device}",
            got=out,
            remedy="allocate it per step or in the backend's buffers",
        )
    if lse.shape != (tokens, heads) or lse.dtype != torch.float32 or not lse.is_contiguous():
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


def check_page_table(page_table: Tensor, num_reqs: int) -> None:
    """An int32 [reqs, max_pages] table with contiguous rows."""
    fits = page_table.dim() == 2 and page_table.shape[0] == num_reqs and page_table.stride(1) == 1
    if not fits or page_table.dtype != torch.int32:
        reject(
            "page_table",
            expected=f"int32 [{num_reqs}, max_pages] with contiguous rows",
            got=page_table,
            remedy="pass the group's page_table of this step",
        )


def require_triton(op: str) -> None:
    """Refuse to launch where triton, which CPU builds of torch do not bring, is not installed."""
    if find_spec("triton") is None:
        raise KernelArgumentError(
            message(
                op,
                expected="run where triton is installed",
                got="no module named triton",
                remedy="install triton, or choose the torch attention backend",
            )
        )


def _matches(tensor: Tensor, q: Tensor) -> bool:
    same_place = tensor.dtype == q.dtype and tensor.device == q.device
    return same_place and tensor.stride(-1) == 1
