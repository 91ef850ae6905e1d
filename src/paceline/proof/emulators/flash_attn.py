"""FlashAttention 3 and 4 as the backends call them, on a CPU: this module is the library.

The signatures are the parts of the libraries' that read a paged cache; a keyword they do not have
is a TypeError.  Everything a shape or dtype can tell is checked at the call.  Lengths and tables
are read when the operator runs, so a recorded graph replays them; there the rules are checked
whose breach the real kernels do not report.

Sources: flash-attn-4 4.0.0b15, `flash_attn.cute.interface`, `softmax.Softmax.finalize`, `paged_kv`;
flash-attention's `hopper/flash_attn_interface.py`.
"""

import itertools

import torch
from torch import Tensor

from paceline.kernels.custom_op import define_op
from paceline.proof.emulators.flash_attn_ragged import attend_ragged
from paceline.proof.emulators.flash_attn_rules import (
    attend,
    require,
    require_head_dims,
    require_list,
    require_offsets,
    require_operands,
    seen,
)


def flash_attn_varlen_func(
    q: Tensor,  # [tokens, heads, head_dim]
    k: Tensor,  # [num_pages, page_size, kv_heads, head_dim]
    v: Tensor,  # [num_pages, page_size, kv_heads, v_head_dim]
    *,
    cu_seqlens_q: Tensor,  # [reqs + 1]  int32
    cu_seqlens_k: Tensor | None = None,  # [reqs + 1]  int32
    max_seqlen_q: int,
    max_seqlen_k: int | None = None,
    seqused_k: Tensor | None = None,  # [reqs]  int32
    page_table: Tensor | None = None,  # [reqs, max_pages]  int32
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None,  # [heads]  bfloat16
    softcap: float = 0.0,
    num_splits: int = 1,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """FlashAttention 4: out [tokens, heads, v_head_dim], and lse [heads, tokens] when asked.

    Both sides of the window are inclusive; None is open.  lse is natural and counts the sink.
    Keys lie in pages, or with cu_seqlens_k behind one another: k [keys, kv_heads, head_dim].
    """
    if cu_seqlens_k is not None:
        require(page_table is None, "page_table with cu_seqlens_k", None, "given")
        plain = window_size == (None, None) and learnable_sink is None and not softcap
        require(plain, "windows, sinks and soft cap with cu_seqlens_k", "none emulated", "given")
        most = len(k) if max_seqlen_k is None else max_seqlen_k
        out, lse = attend_ragged(
            q,
            k,
            v,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=most,
            softmax_scale=softmax_scale,
            causal=causal,
        )
        return out, lse if return_lse else None
    require(page_table is not None, "page_table", "given without cu_seqlens_k", None)
    require(seqused_k is not None, "seqused_k", "given without cu_seqlens_k", None)
    assert page_table is not None, "required above"
    assert seqused_k is not None, "required above"
    require_operands(q, k, v, places=2)
    require_head_dims(q, v)
    return _attend_paged(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        seqused_k=seqused_k,
        page_table=page_table,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        learnable_sink=learnable_sink,
        softcap=softcap,
        num_splits=num_splits,
        return_lse=return_lse,
    )


def _attend_paged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    seqused_k: Tensor,
    page_table: Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int | None, int | None],
    learnable_sink: Tensor | None = None,
    softcap: float,
    num_splits: int = 1,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Heads of any width, which match, as both libraries check and run them."""
    _require_lists(q, cu_seqlens_q, seqused_k, page_table)
    require(num_splits == 1, "num_splits", "1 on CUDA arch 9", num_splits)
    for side in window_size:
        require(side is None or side >= 0, "window_size", "None or at least 0", window_size)
    if learnable_sink is not None:
        found = (learnable_sink.dtype, tuple(learnable_sink.shape))
        wanted = (torch.bfloat16, (q.shape[1],))
        require(found == wanted, "learnable_sink", wanted, found)
    out = torch.empty(*q.shape[:2], v.shape[-1], dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
    _EMULATED(
        q,
        k,
        v,
        page_table,
        seqused_k,
        cu_seqlens_q,
        learnable_sink,
        max_seqlen_q,
        softmax_scale if softmax_scale is not None else q.shape[-1] ** -0.5,
        window_size[0],
        0 if causal else window_size[1],
        softcap,
        out,
        lse,
    )
    return out, lse if return_lse else None


def flash_attn_with_kvcache(
    q: Tensor,  # [tokens, heads, head_dim]
    k_cache: Tensor,  # [num_pages, page_size, kv_heads, head_dim]
    v_cache: Tensor,  # [num_pages, page_size, kv_heads, v_head_dim]
    *,
    qv: Tensor | None = None,  # [tokens, heads, v_head_dim]
    cache_seqlens: Tensor,  # [reqs]  int32
    page_table: Tensor,  # [reqs, max_pages]  int32
    cu_seqlens_q: Tensor,  # [reqs + 1]  int32
    max_seqlen_q: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """FlashAttention 3: out, or (out, lse [heads, tokens]).  A window of −1 is open.

    qv: adds qv.v to each score.  num_splits changes the order of sums alone: nothing to emulate.
    """
    require(num_splits >= 0, "num_splits", "at least 0", num_splits)
    for side in window_size:
        require(side >= -1, "window_size", "-1 or at least 0", window_size)
    left, right = (None if side == -1 else side for side in window_size)
    if qv is None:
        require_operands(q, k_cache, v_cache, places=2)
        require_head_dims(q, v_cache)
    else:
        _require_latents(q, qv, k_cache, v_cache)
        softmax_scale = softmax_scale or (q.shape[-1] + qv.shape[-1]) ** -0.5
        q, k_cache = torch.cat((qv, q), -1), torch.cat((v_cache, k_cache), -1)
        require_operands(q, k_cache, v_cache, places=2)
    out, lse = _attend_paged(
        q,
        k_cache,
        v_cache,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        seqused_k=cache_seqlens,
        page_table=page_table,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=(left, right),
        softcap=softcap,
        return_lse=True,
    )
    assert lse is not None
    return (out, lse) if return_softmax_lse else out


# --- rules a call can break -----------------------------------------------------------------------


def _require_latents(q: Tensor, qv: Tensor, k: Tensor, v: Tensor) -> None:
    """The shapes there are kernels with qv for: 64 columns of Q and K, 512 of qv and V."""
    dims, wanted = (q.shape[-1], k.shape[-1], qv.shape[-1], v.shape[-1]), (64, 64, 512, 512)
    require(dims == wanted, "last dims of q, k, qv and v", wanted, dims)
    require(qv.shape[:2] == q.shape[:2], "rows and heads of qv", q.shape[:2], qv.shape[:2])
    require(qv.dtype == q.dtype, "qv dtype", q.dtype, qv.dtype)
    for name, tensor in (("qv", qv), ("k", k), ("v", v)):
        require(tensor.stride(-1) == 1, f"last stride of {name}", 1, tensor.stride(-1))


def _require_lists(q: Tensor, cu_seqlens_q: Tensor, seqused_k: Tensor, page_table: Tensor) -> None:
    """Shapes, dtypes and strides of what the kernel reads lengths and pages from."""
    reqs = len(cu_seqlens_q) - 1
    lists = {"cu_seqlens_q": cu_seqlens_q, "seqused_k": seqused_k, "page_table": page_table}
    for name, tensor in lists.items():
        require_list(name, tensor, q)
    require(seqused_k.shape == (reqs,), "seqused_k shape", (reqs,), tuple(seqused_k.shape))
    rows = tuple(page_table.shape)
    require(page_table.dim() == 2 and rows[0] == reqs, "page_table shape", f"({reqs}, pages)", rows)


def _live_pages(table: Tensor, keys: int, page_size: int, num_pages: int) -> Tensor:
    """The page ids of one request with queries: table [max_pages] -> [ceil(keys / page_size)]."""
    require(keys >= 1, "seqused_k", "at least 1 for a request with queries", keys)
    needed, width = -(-keys // page_size), table.shape[0]
    require(needed <= width, "page_table width", f"at least {needed} pages", width)
    pages = table[:needed].long()
    inside = f"page ids below {num_pages}"
    is_inside = bool((pages >= 0).all()) and bool((pages < num_pages).all())
    require(is_inside, "page_table", inside, pages.tolist())
    return pages


# --- the kernel -----------------------------------------------------------------------------------


def _emulate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    page_table: Tensor,
    seqused_k: Tensor,
    cu_seqlens_q: Tensor,
    sink: Tensor | None,
    max_seqlen_q: int,
    scale: float,
    left: int | None,
    right: int | None,
    soft_cap: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Request by request.  Whole pages are loaded: a dead slot of V is multiplied by 0."""
    offsets, used = cu_seqlens_q.tolist(), seqused_k.tolist()
    require_offsets("q", offsets, max_seqlen_q)
    require(offsets[-1] == len(q), "cu_seqlens_q[-1]", f"the {len(q)} rows of q", offsets[-1])
    for request, (start, end) in enumerate(itertools.pairwise(offsets)):
        if start == end:
            continue  # no tile of queries: nothing of the request is read
        keys = used[request]
        pages = _live_pages(page_table[request], keys, k.shape[1], k.shape[0])
        visible = seen(end - start, keys, len(pages) * k.shape[1], left=left, right=right)
        out[start:end], lse[:, start:end] = attend(
            q[start:end],
            k[pages].flatten(0, 1),
            v[pages].flatten(0, 1),
            visible,
            scale=scale,
            soft_cap=soft_cap,
            sink=sink,
        )


_EMULATED = define_op(
    "emulated_flash_attention(Tensor q, Tensor k, Tensor v, Tensor page_table, Tensor seqused_k,"
    " Tensor cu_seqlens_q, Tensor? sink, int max_seqlen_q, float scale, int? left, int? right,"
    " float soft_cap, Tensor(a!) out, Tensor(b!) lse) -> ()",
    cpu=_emulate,
)
