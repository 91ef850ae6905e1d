"""paged_decode: one query per request over its paged keys, split along the keys.

Each program takes one KV head of one request and one split of its keys, with the whole group of
query heads as the rows of one matrix tile; a second kernel merges the splits by their
log-sum-exp (Dao et al. 2023, "Flash-Decoding").  The definition is paged_attention_reference with
extend 1.
"""

import torch
from torch import Tensor

from paceline.kernels._check import reject
from paceline.kernels.custom_op import define_op
from paceline.kernels.paged_attention.checks import (
    check_caches,
    check_index,
    check_outputs,
    check_page_table,
    require_triton,
)

_PROGRAMS_PER_SM = 4
_MAX_SPLITS = 64
_INTERPRETER_SMS = 4


def decode_splits(num_reqs: int, num_kv_heads: int, *, device: torch.device) -> int:
    """How many splits a decode of `num_reqs` padded requests uses on `device`, 1..64.

    Enough that every multiprocessor holds a few programs, whatever the lengths turn out to be.
    """
    wanted = _PROGRAMS_PER_SM * _num_sms(device)
    return max(1, min(_MAX_SPLITS, -(-wanted // max(1, num_reqs * num_kv_heads))))


def decode_workspace(
    max_reqs: int, num_heads: int, num_kv_heads: int, *, v_head_dim: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(partial_out, partial_lse) for any decode of up to `max_reqs` requests.

    partial_out: [rows, heads, v_head_dim] float32, partial_lse: [rows, heads] float32, where
    rows is the largest reqs * splits: few requests have many splits and many have few.
    """
    rows = max(
        num_reqs * decode_splits(num_reqs, num_kv_heads, device=device)
        for num_reqs in range(1, max_reqs + 1)
    )
    partial_out = torch.empty((rows, num_heads, v_head_dim), dtype=torch.float32, device=device)
    partial_lse = torch.empty((rows, num_heads), dtype=torch.float32, device=device)
    return partial_out, partial_lse


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    out: Tensor,
    lse: Tensor,
    partial_out: Tensor,
    partial_lse: Tensor,
) -> None:
    """Attend one query per request, at position kv_len − 1.

    q: [reqs, heads, head_dim], rows may be strided; k_cache: [num_pages, page_size, kv_heads,
    head_dim] and v_cache with v_head_dim, both maybe strided views; page_table: [reqs, max_pages]
    int32; kv_lens: [reqs] int32.  Mutates out [reqs, heads, v_head_dim], lse [reqs, heads] float32
    (natural log) and the workspace: partial_out and partial_lse, float32, contiguous, of any shape
    with at least reqs * splits * heads (* v_head_dim) elements.  kv_len 0 gives out 0, lse −inf.
    Graph-safe: grids depend on padded sizes only; no host sync.  Raises KernelArgumentError.
    """
    check_caches(q, k_cache, v_cache)
    num_reqs, num_heads, _ = q.shape
    check_page_table(page_table, num_reqs)
    check_index("kv_lens", kv_lens, (num_reqs,))
    check_outputs(q, v_cache, out=out, lse=lse)
    splits = decode_splits(num_reqs, k_cache.shape[2], device=q.device)
    rows = num_reqs * num_heads * splits
    _check_workspace("partial_out", partial_out, rows * v_cache.shape[3])
    _check_workspace("partial_lse", partial_lse, rows)
    if num_reqs == 0:
        return
    _PAGED_DECODE(
        q,
        k_cache,
        v_cache,
        page_table,
        kv_lens,
        scale,
        window,
        soft_cap,
        splits,
        out,
        lse,
        partial_out,
        partial_lse,
    )


def _check_workspace(name: str, tensor: Tensor, elements: int) -> None:
    fits = tensor.numel() >= elements and tensor.is_contiguous()
    if not fits or tensor.dtype != torch.float32:
        reject(
            name,
            expected=f"contiguous float32 with at least {elements} elements",
            got=tensor,
            remedy="allocate it with decode_workspace for the largest number of requests",
        )


def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETER_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _launch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    splits: int,
    out: Tensor,
    lse: Tensor,
    partial_out: Tensor,
    partial_lse: Tensor,
) -> None:
    require_triton("paged_decode")
    from paceline.kernels._triton.paged_decode import launch_paged_decode

    launch_paged_decode(
        q,
        k_cache,
        v_cache,
        page_table,
        kv_lens,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        splits=splits,
        out=out,
        lse=lse,
        partial_out=partial_out,
        partial_lse=partial_lse,
    )


_PAGED_DECODE = define_op(
    "paged_decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor kv_lens, "
    "float scale, int? window, float? soft_cap, int splits, Tensor(a!) out, Tensor(b!) lse, "
    "Tensor(c!) partial_out, Tensor(d!) partial_lse) -> ()",
    cpu=_launch,
    cuda=_launch,
)
