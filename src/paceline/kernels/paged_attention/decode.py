"""paged_decode: one query per request over its paged keys, split along the keys.

Each program takes one KV head of one request and one split of its keys (many requests have splits
by their lengths, decision 045), with the whole group of query heads as the rows of one matrix tile;
the last split to finish merges all by their log-sum-exp (Dao et al. 2023, "Flash-Decoding").  The
definition is paged_attention_reference with extend 1.
"""

from torch import Tensor

from paceline.kernels._check import require_triton
from paceline.kernels.custom_op import define_op
from paceline.kernels.paged_attention.checks import (
    check_caches,
    check_index,
    check_outputs,
    check_page_table,
    check_scales,
    check_sinks,
)
from paceline.kernels.paged_attention.splits import (
    SplitWorkspace,
    check_workspace,
    decode_shares,
    decode_slots,
    decode_splits,
    most_keys,
)


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
    workspace: SplitWorkspace,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Attend one query per request, at position kv_len − 1.

    q: [reqs, heads, head_dim], rows may be strided; k_cache: [num_pages, page_size, kv_heads,
    head_dim] and v_cache with v_head_dim, both maybe strided views, in q's dtype or float8_e4m3fn
    with k_scale and v_scale [1] float32; page_table: [reqs, max_pages] int32; kv_lens: [reqs]
    int32; sinks: [heads] float32.  Mutates out [reqs, heads, v_head_dim], lse [reqs, heads] float32
    (natural log, without sinks) and the workspace.  kv_len 0 gives out 0, lse −inf.
    Graph-safe: grids depend on padded sizes only; no host sync.  Raises KernelArgumentError.
    """
    check_caches(q, k_cache, v_cache)
    check_scales(k_cache, k_scale=k_scale, v_scale=v_scale)
    check_sinks(q, sinks)
    num_reqs, num_heads, _ = q.shape
    check_page_table(page_table, num_reqs)
    check_index("kv_lens", kv_lens, (num_reqs,))
    check_outputs(q, v_cache, out=out, lse=lse)
    max_keys = most_keys(page_table, k_cache, window)
    kv_heads = k_cache.shape[2]
    splits = decode_splits(num_reqs, kv_heads, max_keys=max_keys, device=q.device)
    shares = decode_shares(num_reqs, kv_heads, max_keys=max_keys, device=q.device)
    rows = num_reqs * splits
    if shares is not None:
        rows = splits = decode_slots(num_reqs, shares)
    check_workspace(workspace, rows, num_reqs, num_heads, v_cache.shape[3])
    if num_reqs == 0:
        return
    _PAGED_DECODE(
        q,
        k_cache,
        v_cache,
        page_table,
        kv_lens,
        k_scale,
        v_scale,
        sinks,
        scale,
        window,
        soft_cap,
        splits,
        shares,
        out,
        lse,
        workspace.partial_out,
        workspace.partial_lse,
        workspace.finished,
    )


def _launch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    splits: int,
    shares: int | None,
    out: Tensor,
    lse: Tensor,
    partial_out: Tensor,
    partial_lse: Tensor,
    finished: Tensor,
) -> None:
    require_triton("paged_decode", otherwise="choose the torch attention backend")
    from paceline.kernels._triton.paged_decode import launch_paged_decode

    launch_paged_decode(
        q,
        k_cache,
        v_cache,
        page_table,
        kv_lens,
        k_scale=k_scale,
        v_scale=v_scale,
        sinks=sinks,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        splits=splits,
        shares=shares,
        out=out,
        lse=lse,
        partial_out=partial_out,
        partial_lse=partial_lse,
        finished=finished,
    )


_PAGED_DECODE = define_op(
    "paged_decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor kv_lens, "
    "Tensor? k_scale, Tensor? v_scale, Tensor? sinks, "
    "float scale, int? window, float? soft_cap, int splits, int? shares, "
    "Tensor(a!) out, Tensor(b!) lse, Tensor(c!) partial_out, Tensor(d!) partial_lse, "
    "Tensor(e!) finished) -> ()",
    cpu=_launch,
    cuda=_launch,
)
