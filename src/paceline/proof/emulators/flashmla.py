"""FlashMLA as the backend calls it, on a CPU: this module is the library.

The schedule holds for the lengths and rows it was made of, read when its operator runs; a call with
others is refused, where the real kernel would answer from other keys.  Whole pages are loaded, a
dead slot is multiplied by 0, and a request of no key gives 0 with an lse of +inf.

Source: sglang-kernel 0.4.4, `sgl_kernel/flash_mla.py`; FlashMLA's README.
"""

import math

import torch
from torch import Tensor

from paceline.core.errors import KernelArgumentError
from paceline.kernels.custom_op import define_op

DIMS, RANK, PAGE_SIZE = (576, 512), 512, 64
_DTYPES = (torch.bfloat16, torch.float16)
_NUM_SMS, _TILE = 1, 64  # of the emulated device; rows of a tile


def get_mla_metadata(
    cache_seqlens: Tensor,  # [reqs]  int32
    num_q_tokens_per_head_k: int,
    num_heads_k: int,
) -> tuple[Tensor, Tensor]:
    """(tile scheduler metadata [parts, 8] int32, splits [reqs + 1] int32)."""
    _require_ints("cache_seqlens", cache_seqlens, 1)
    _require(num_heads_k == 1, "num_heads_k", 1, num_heads_k)
    parts = max(_NUM_SMS // -(-num_q_tokens_per_head_k // _TILE), 1)
    # The first row holds the rows a schedule is for, the splits the lengths: contents are opaque.
    metadata = cache_seqlens.new_empty(parts, 8)
    splits = cache_seqlens.new_empty(len(cache_seqlens) + 1)
    _SCHEDULE(cache_seqlens, num_q_tokens_per_head_k, metadata, splits)
    return metadata, splits


def flash_mla_with_kvcache(
    q: Tensor,  # [reqs, queries, heads, 576]
    k_cache: Tensor,  # [num_pages, 64, 1, 576]
    block_table: Tensor,  # [reqs, max_pages]  int32
    cache_seqlens: Tensor,  # [reqs]  int32
    head_dim_v: int,
    tile_scheduler_metadata: Tensor,
    num_splits: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """out [reqs, queries, heads, 512], lse [reqs, heads, queries] natural."""
    reqs, queries, heads, dim = q.shape
    _require(q.dtype in _DTYPES, "q dtype", "a 16-bit float", q.dtype)
    _require(k_cache.dtype == q.dtype, "k_cache dtype", q.dtype, k_cache.dtype)
    _require(dim in DIMS, "head dim", DIMS, dim)
    _require(head_dim_v == RANK, "head_dim_v", RANK, head_dim_v)
    page = (PAGE_SIZE, 1, dim)
    _require(k_cache.shape[1:] == page, "page of k_cache", page, tuple(k_cache.shape[1:]))
    for name, tensor in (("q", q), ("k_cache", k_cache), ("block_table", block_table)):
        _require(tensor.stride(-1) == 1, f"last stride of {name}", 1, tensor.stride(-1))
    _require_ints("block_table", block_table, 2)
    _require_ints("cache_seqlens", cache_seqlens, 1)
    _require(cache_seqlens.is_contiguous(), "cache_seqlens", "contiguous", cache_seqlens.stride())
    for name, tensor in (("block_table", block_table), ("cache_seqlens", cache_seqlens)):
        _require(len(tensor) == reqs, f"requests of {name}", reqs, len(tensor))
    parts = max(_NUM_SMS // -(-queries * heads // _TILE), 1)
    found = (tuple(tile_scheduler_metadata.shape), tuple(num_splits.shape))
    wanted = ((parts, 8), (reqs + 1,))
    _require(found == wanted, "shapes of the schedule", wanted, found)
    out = q.new_empty(reqs, queries, heads, head_dim_v)
    lse = torch.empty(reqs, heads, queries, dtype=torch.float32, device=q.device)
    _DECODE(
        q,
        k_cache,
        block_table,
        cache_seqlens,
        tile_scheduler_metadata,
        num_splits,
        dim**-0.5 if softmax_scale is None else softmax_scale,
        causal and queries > 1,
        out,
        lse,
    )
    return out, lse


# --- rules a call can break -----------------------------------------------------------------------


def _require(holds: bool, name: str, expected: object, got: object) -> None:
    if not holds:
        remedy = "see the library's interface: the real kernel would read elsewhere, or refuse"
        raise KernelArgumentError.about(
            f"flashmla {name}", expected=expected, got=got, remedy=remedy
        )


def _require_ints(name: str, tensor: Tensor, dims: int) -> None:
    found, wanted = (tensor.dtype, tensor.dim()), (torch.int32, dims)
    _require(found == wanted, f"{name} dtype and dims", wanted, found)


# --- the kernels ----------------------------------------------------------------------------------


def _schedule(lens: Tensor, rows: int, metadata: Tensor, splits: Tensor) -> None:
    metadata.fill_(rows)
    splits[0] = 0
    splits[1:] = lens


def _decode(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    lens: Tensor,
    metadata: Tensor,
    splits: Tensor,
    scale: float,
    causal: bool,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Request by request; weights are rounded to q's dtype before they meet values."""
    _, queries, heads, _ = q.shape
    planned = (metadata[0, 0].item(), splits[1:].tolist())
    executed = (queries * heads, lens.tolist())
    _require(planned == executed, "rows and lengths of the schedule", executed, planned)
    for request, keys in enumerate(executed[1]):
        needed = -(-keys // PAGE_SIZE)
        width = block_table.shape[1]
        _require(needed <= width, "block_table width", f"at least {needed} pages", width)
        pages = block_table[request, :needed].long()
        is_inside = bool(((pages >= 0) & (pages < len(k_cache))).all())
        _require(is_inside, "block_table", f"page ids below {len(k_cache)}", pages.tolist())
        rows = k_cache[pages].flatten(0, 2).float()
        scores = torch.einsum("qhd,kd->hqk", q[request].float(), rows) * scale
        at = torch.arange(len(rows))
        seen = (at < keys).expand(queries, -1)
        if causal:
            seen = seen & (at <= torch.arange(queries).unsqueeze(1) + (keys - queries))
        scores = scores.masked_fill(~seen, -math.inf)
        highest = scores.amax(-1, keepdim=True) if keys else scores.new_zeros(heads, queries, 1)
        weights = torch.exp(scores - highest.masked_fill(highest == -math.inf, 0.0))
        total = weights.sum(-1, keepdim=True)
        mixed = torch.einsum("hqk,kd->qhd", weights.to(q.dtype).float(), rows[:, :RANK])
        out[request] = (mixed / total.squeeze(-1).t().unsqueeze(-1).clamp(min=1e-30)).to(out.dtype)
        found = (highest + total.log()).squeeze(-1)
        lse[request] = found.masked_fill(total.squeeze(-1) == 0.0, math.inf)


_SCHEDULE = define_op(
    "emulated_flashmla_schedule(Tensor lens, int rows, Tensor(a!) metadata, Tensor(b!) splits)"
    " -> ()",
    cpu=_schedule,
)
_DECODE = define_op(
    "emulated_flashmla(Tensor q, Tensor k_cache, Tensor block_table, Tensor lens, Tensor metadata,"
    " Tensor splits, float scale, bool causal, Tensor(a!) out, Tensor(b!) lse) -> ()",
    cpu=_decode,
)
