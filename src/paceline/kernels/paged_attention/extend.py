"""paged_extend: ragged queries over paged keys, prefix and step alike, causal.

Query i of a request is at absolute position prefix + i (the mask is aligned bottom-right).  Rows of
a matrix tile are (query, head of the group) pairs, so one tile of keys serves the whole group.  The
definition is paged_attention_reference with MaskKind.CAUSAL.
"""

from torch import Tensor

from paceline.kernels.custom_op import define_op
from paceline.kernels.paged_attention.checks import (
    check_caches,
    check_index,
    check_outputs,
    check_page_table,
    require_triton,
)


def paged_extend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    prefix_lens: Tensor,
    kv_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    max_extend_len: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    out: Tensor,
    lse: Tensor,
    prefix_only: bool = False,
) -> None:
    """Attend every query of the step to its prefix and to the step's earlier tokens.

    q: [tokens, heads, head_dim], rows may be strided; k_cache: [num_pages, page_size, kv_heads,
    head_dim] and v_cache with v_head_dim, both maybe strided views, already holding the step's K
    and V; page_table: [reqs, max_pages] int32; prefix_lens, kv_lens: [reqs] int32;
    cu_seqlens_q: [reqs + 1] int32; no request extends by more than max_extend_len.  With
    prefix_only the step's own keys are left out; the window still counts from the query's position.
    Mutates out [tokens, heads, v_head_dim] and lse [tokens, heads] float32 (natural log): every row
    below cu_seqlens_q[-1] is written, rows without a visible key with 0 and −inf.
    Graph-safe: the grid depends on padded sizes only; no host sync.  Raises KernelArgumentError.
    """
    num_reqs = page_table.shape[0]
    check_caches(q, k_cache, v_cache)
    check_page_table(page_table, num_reqs)
    check_index("prefix_lens", prefix_lens, (num_reqs,))
    check_index("kv_lens", kv_lens, (num_reqs,))
    check_index("cu_seqlens_q", cu_seqlens_q, (num_reqs + 1,))
    check_outputs(q, v_cache, out=out, lse=lse)
    if q.shape[0] == 0 or max_extend_len == 0:
        return
    _PAGED_EXTEND(
        q,
        k_cache,
        v_cache,
        page_table,
        prefix_lens,
        kv_lens,
        cu_seqlens_q,
        max_extend_len,
        scale,
        window,
        soft_cap,
        prefix_only,
        out,
        lse,
    )


def _launch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    prefix_lens: Tensor,
    kv_lens: Tensor,
    cu_seqlens_q: Tensor,
    max_extend_len: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    prefix_only: bool,
    out: Tensor,
    lse: Tensor,
) -> None:
    require_triton("paged_extend")
    from paceline.kernels._triton.paged_extend import launch_paged_extend

    launch_paged_extend(
        q,
        k_cache,
        v_cache,
        page_table,
        prefix_lens,
        kv_lens,
        cu_seqlens_q,
        max_extend_len=max_extend_len,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        prefix_only=prefix_only,
        out=out,
        lse=lse,
    )


_PAGED_EXTEND = define_op(
    "paged_extend(Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, "
    "Tensor prefix_lens, Tensor kv_lens, Tensor cu_seqlens_q, int max_extend_len, float scale, "
    "int? window, float? soft_cap, bool prefix_only, Tensor(a!) out, Tensor(b!) lse) -> ()",
    cpu=_launch,
    cuda=_launch,
)
