"""FlashInfer's decode function for latents as two backends call it, on a CPU: this module is the
library.

Both kernels mask several queries of a row causally from bottom right, and take no offsets of
queries: a row's are where the stride says.  TensorRT-LLM's returns an lse in base 2 and needs
counters that are 0, which it leaves so; that in the CuTe DSL returns a natural one and leaves
numbers there.  A row without a key is junk to both.

Source: FlashInfer's main of August 2026, `flashinfer/mla`; its issue 4485 for the two bases.
"""

import math
from functools import partial

import torch
from torch import Tensor

from paceline.proof.emulators.paged_rows import attend_rows, require_ints
from paceline.proof.emulators.paged_rows import require as require_of

KERNELS = ("trtllm-gen", "cute-dsl")
DIMS = {"trtllm-gen": ((512, 64), (256, 64), (512, 0)), "cute-dsl": ((512, 64),)}
MOST_QUERIES = {"trtllm-gen": None, "cute-dsl": 1}
PAGE_SIZES, NOPE_DIM, TABLE_TOKENS = (32, 64), 128, 128


def trtllm_batch_decode_with_kv_cache_mla(
    query: Tensor,  # [rows, queries, heads, kv_lora_rank + qk_rope_head_dim]
    kv_cache: Tensor,  # [num_pages, page_size, kv_lora_rank + qk_rope_head_dim]
    workspace_buffer: Tensor,  # [bytes]
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Tensor,  # [rows, max_pages]  int32
    seq_lens: Tensor,  # [rows]  int32
    max_seq_len: int,
    *,
    bmm1_scale: float = 1.0,
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """out [rows, queries, heads, kv_lora_rank], and lse [rows * queries, heads] when asked."""
    require = partial(require_of, f"flashinfer {backend}")
    require(backend in KERNELS, "kernel", KERNELS, backend)
    require(query.dim() == 4, "dims of query", "[rows, queries, heads, head_dim]", query.dim())
    rows, queries, heads, dim = query.shape
    require(query.dtype == torch.bfloat16, "query dtype", torch.bfloat16, query.dtype)
    require(kv_cache.dtype == query.dtype, "kv_cache dtype", query.dtype, kv_cache.dtype)
    require(qk_nope_head_dim == NOPE_DIM, "qk_nope_head_dim", NOPE_DIM, qk_nope_head_dim)
    dims = kv_lora_rank, qk_rope_head_dim
    require(dims in DIMS[backend], "rank and rope dims", DIMS[backend], dims)
    widths = dim, kv_cache.shape[-1]
    require(widths == (sum(dims),) * 2, "width of query and kv_cache", sum(dims), widths)
    most = MOST_QUERIES[backend]
    require(most is None or queries <= most, "queries of a row", most, queries)
    page_size = kv_cache.shape[-2]
    require(page_size in PAGE_SIZES, "page size", PAGE_SIZES, page_size)
    require(query.is_contiguous(), "query", "contiguous", query.stride())
    require(kv_cache.stride(-1) == 1, "last stride of kv_cache", 1, kv_cache.stride(-1))
    require_ints(f"flashinfer {backend}", rows, block_tables=block_tables, seq_lens=seq_lens)
    multiple, width = TABLE_TOKENS // page_size, block_tables.shape[1]
    require(width % multiple == 0, "width of block_tables", f"a multiple of {multiple}", width)
    require(isinstance(bmm1_scale, float), "bmm1_scale", "a float", type(bmm1_scale).__name__)
    cache = kv_cache.unsqueeze(2)
    out, lse = attend_rows(
        f"flashinfer {backend}",
        query.flatten(0, 1),
        cache,
        cache[..., :kv_lora_rank],
        page_tables=block_tables,
        kv_lens=seq_lens,
        cu_seqlens_q=torch.arange(0, rows * queries + 1, queries, dtype=torch.int32),
        scale=bmm1_scale,
        causal=queries > 1,
        most_keys=max_seq_len,
        workspace=workspace_buffer,
        trashes=backend == "cute-dsl",
    )
    out = out.view(rows, queries, heads, kv_lora_rank)
    unit = 1.0 if backend == "cute-dsl" else math.log2(math.e)
    return (out, lse * unit) if return_lse else out
