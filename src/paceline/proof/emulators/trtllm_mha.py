"""TensorRT-LLM's kernels as the backend calls them through FlashInfer, on a CPU: this module is the
library.

Pages are [num_pages, kv_heads, page_size, head_dim].  The decode function has one stride of query
rows, the context function offsets; both mask causally from bottom right, and both need counters
that are 0.  A row without a key is junk.

Source: FlashInfer's main of August 2026, `flashinfer/decode.py`, `prefill.py`, and
`include/flashinfer/trtllm/fmha/lse.cuh` for the base of its log-sum-exp; its issue 2232 for strides
of one KV head.
"""

import math
from functools import partial

import torch
from torch import Tensor

from paceline.kernels.custom_op import define_op
from paceline.proof.emulators.paged_rows import attend_rows, require_ints
from paceline.proof.emulators.paged_rows import require as require_of

HEAD_DIMS, PAGE_SIZES = (64, 128, 256), (16, 32, 64)
_DTYPES = (torch.float16, torch.bfloat16)
_LIBRARY = "trtllm_mha"
_require = partial(require_of, _LIBRARY)


def trtllm_batch_decode_with_kv_cache(
    query: Tensor,  # [rows * q_len_per_req, heads, head_dim]
    kv_cache: tuple[Tensor, Tensor],  # of [num_pages, kv_heads, page_size, head_dim]
    workspace_buffer: Tensor,  # [bytes]  uint8
    block_tables: Tensor,  # [rows, max_pages]  int32
    seq_lens: Tensor,  # [rows]  int32
    max_seq_len: int,
    *,
    bmm1_scale: float,
    bmm2_scale: float,
    window_left: int = -1,
    sinks: Tensor | None = None,  # [heads]  float32
    kv_layout: str = "HND",
    q_len_per_req: int = 1,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """out [rows * q_len_per_req, heads, head_dim], and lse [the same, heads] in base 2."""
    rows = len(seq_lens)
    wanted = rows * q_len_per_req
    _require(len(query) == wanted, "rows of query", f"{rows} of {q_len_per_req}", len(query))
    offsets = torch.arange(0, wanted + 1, q_len_per_req, dtype=torch.int32)
    out, lse = _attend(
        query,
        kv_cache,
        workspace_buffer,
        block_tables,
        seq_lens,
        max_seq_len,
        offsets,
        scales=(bmm1_scale, bmm2_scale),
        window_left=window_left,
        sinks=sinks,
        kv_layout=kv_layout,
    )
    return (out, lse * math.log2(math.e)) if return_lse else out


def trtllm_batch_context_with_kv_cache(
    query: Tensor,  # [tokens, heads, head_dim]
    kv_cache: tuple[Tensor, Tensor],  # of [num_pages, kv_heads, page_size, head_dim]
    workspace_buffer: Tensor,  # [bytes]  uint8
    block_tables: Tensor,  # [batch_size, max_pages]  int32
    seq_lens: Tensor,  # [batch_size]  int32
    max_q_len: int,
    max_kv_len: int,
    *,
    bmm1_scale: float,
    bmm2_scale: float,
    batch_size: int,
    cum_seq_lens_q: Tensor,  # [batch_size + 1]  int32
    cum_seq_lens_kv: Tensor,  # [batch_size + 1]  int32
    window_left: int = -1,
    sinks: Tensor | None = None,  # [heads]  float32
    kv_layout: str = "HND",
) -> Tensor:
    """out [tokens, heads, head_dim]."""
    _require(len(seq_lens) == batch_size, "rows of seq_lens", batch_size, len(seq_lens))
    offsets = {"cum_seq_lens_q": cum_seq_lens_q, "cum_seq_lens_kv": cum_seq_lens_kv}
    require_ints(_LIBRARY, batch_size + 1, **offsets)
    _REQUIRE_OFFSETS(cum_seq_lens_q, cum_seq_lens_kv, seq_lens, max_q_len)
    out, _ = _attend(
        query,
        kv_cache,
        workspace_buffer,
        block_tables,
        seq_lens,
        max_kv_len,
        cum_seq_lens_q,
        scales=(bmm1_scale, bmm2_scale),
        window_left=window_left,
        sinks=sinks,
        kv_layout=kv_layout,
    )
    return out


def _attend(
    query: Tensor,
    kv_cache: tuple[Tensor, Tensor],
    workspace: Tensor,
    tables: Tensor,
    seq_lens: Tensor,
    most_keys: int,
    offsets: Tensor,
    *,
    scales: tuple[float, float],
    window_left: int,
    sinks: Tensor | None,
    kv_layout: str,
) -> tuple[Tensor, Tensor]:
    heads, dim = query.shape[1:]
    _require(query.dtype in _DTYPES, "query dtype", "a 16-bit float", query.dtype)
    _require(query.is_contiguous(), "query", "contiguous", query.stride())
    _require(dim in HEAD_DIMS, "head dim", HEAD_DIMS, dim)
    _require(kv_layout == "HND", "kv_layout", "HND", kv_layout)
    for name, cache in zip(("K", "V"), kv_cache, strict=True):
        _require(cache.dtype == query.dtype, f"{name} dtype", query.dtype, cache.dtype)
        _, kv_heads, page_size, width = cache.shape
        _require(width == dim, f"head dim of {name}", dim, width)
        _require(page_size in PAGE_SIZES, "page size", PAGE_SIZES, page_size)
        _require(heads % kv_heads == 0, "heads", f"a multiple of {kv_heads}", heads)
        _require(cache.stride(-1) == 1, f"last stride of {name}", 1, cache.stride(-1))
        least = page_size * dim if kv_heads == 1 else dim
        stride = cache.stride(1)
        _require(stride >= least, f"stride of heads of {name}", f"at least {least}", stride)
    require_ints(_LIBRARY, len(seq_lens), block_tables=tables, seq_lens=seq_lens)
    if sinks is not None:
        found = (sinks.dtype, tuple(sinks.shape))
        _require(found == (torch.float32, (heads,)), "sinks", f"float32 [{heads}]", found)
    k, v = (cache.transpose(1, 2) for cache in kv_cache)
    out, lse = attend_rows(
        _LIBRARY,
        query,
        k,
        v,
        page_tables=tables,
        kv_lens=seq_lens,
        cu_seqlens_q=offsets,
        scale=scales[0],
        causal=True,
        most_keys=most_keys,
        window_left=window_left,
        sinks=sinks,
        workspace=workspace,
    )
    return out * scales[1], lse


def _require_offsets(queries: Tensor, keys: Tensor, seq_lens: Tensor, max_q_len: int) -> None:
    """The offsets of keys are the sums of their lengths, and no request has more queries."""
    longest = int(queries.diff().max())
    _require(longest <= max_q_len, "queries of a request", f"at most {max_q_len}", longest)
    sums = [0, *seq_lens.cumsum(0).tolist()]
    _require(keys.tolist() == sums, "cum_seq_lens_kv", sums, keys.tolist())


_REQUIRE_OFFSETS = define_op(
    "emulated_trtllm_offsets(Tensor(a!) queries, Tensor keys, Tensor seq_lens, int max_q_len)"
    " -> ()",
    cpu=_require_offsets,
)
