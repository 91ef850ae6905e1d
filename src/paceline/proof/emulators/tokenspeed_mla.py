"""TokenSpeed's decode function for latents as the backend calls it, on a CPU: this module is the
library.

Of 16 bits: several queries of a row would all see the last one's keys.  Its log-sum-exp is in base
2; a row without a key is junk.  Rows are split over the device's multiprocessors as long as there
are some without work, and meet in the workspace.

Source: tokenspeed-mla's `mla_decode.py` of mid 2026.
"""

import math
from functools import partial

import torch
from torch import Tensor

from paceline.core.gpus import INTERPRETER_SMS
from paceline.proof.emulators.paged_rows import attend_rows, require_ints
from paceline.proof.emulators.paged_rows import require as require_of

DIMS, PAGE_SIZES = (512, 64), (32, 64)
_DTYPES = (torch.float16, torch.bfloat16)
_LIBRARY = "tokenspeed_mla"
_require = partial(require_of, _LIBRARY)


def tokenspeed_mla_decode(
    query: Tensor,  # [rows, queries, heads, 576]
    kv_cache: Tensor,  # [num_pages, page_size, 576]
    workspace_buffer: Tensor,  # [bytes]  int8
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Tensor,  # [rows, max_pages]  int32
    seq_lens: Tensor,  # [rows]  int32
    max_seq_len: int,
    softmax_scale: float,
    *,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """out [rows, queries, heads, 512], and lse [rows, queries, heads] when asked."""
    rows, queries, heads, dim = query.shape
    _require(query.dtype in _DTYPES, "query dtype", "a 16-bit float", query.dtype)
    _require(kv_cache.dtype == query.dtype, "kv_cache dtype", query.dtype, kv_cache.dtype)
    _require((kv_lora_rank, qk_rope_head_dim) == DIMS, "rank and rope dims", DIMS, kv_lora_rank)
    widths = (dim, kv_cache.shape[-1])
    _require(widths == (sum(DIMS),) * 2, "width of query and kv_cache", sum(DIMS), widths)
    _require(queries == 1, "queries of a row in 16 bits", 1, queries)
    page_size = kv_cache.shape[1]
    _require(page_size in PAGE_SIZES, "page size", PAGE_SIZES, page_size)
    _require(max_seq_len > 0, "max_seq_len", "at least 1", max_seq_len)
    dtype, got = workspace_buffer.dtype, workspace_buffer.numel()
    _require(dtype == torch.int8, "workspace_buffer dtype", torch.int8, dtype)
    splits = INTERPRETER_SMS // rows
    needed = rows * splits * heads * (kv_lora_rank + 1) * 4 if splits > 1 else 0
    _require(got >= needed, "bytes of workspace_buffer", f"at least {needed}", got)
    _require(query.is_contiguous(), "query", "contiguous", query.stride())
    require_ints(_LIBRARY, rows, block_tables=block_tables, seq_lens=seq_lens)
    cache = kv_cache.unsqueeze(2)
    out, lse = attend_rows(
        _LIBRARY,
        query.flatten(0, 1),
        cache,
        cache[..., :kv_lora_rank],
        page_tables=block_tables,
        kv_lens=seq_lens,
        cu_seqlens_q=torch.arange(rows + 1, dtype=torch.int32),
        scale=softmax_scale,
        causal=False,
        most_keys=max_seq_len,
    )
    out, lse = (found.view(rows, queries, heads, *found.shape[2:]) for found in (out, lse))
    return (out, lse * math.log2(math.e)) if return_lse else out
