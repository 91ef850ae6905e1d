"""paged_extend: ragged queries over paged keys, prefix and step alike, under any mask.

Rows of a matrix tile are (query, head of the group) pairs, so one tile of keys serves the whole
group.  The definition is paged_attention_reference.
"""

import torch
from torch import Tensor

from paceline.core.modes import MaskKind
from paceline.kernels._check import reject, require_triton
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
    extend_splits,
    most_keys,
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
    mask: MaskKind = MaskKind.CAUSAL,
    tree_mask: Tensor | None = None,
    prefix_only: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    sinks: Tensor | None = None,
    workspace: SplitWorkspace | None = None,
) -> None:
    """Attend every query of the step to its prefix and to what `mask` shows of the step.

    q: [tokens, heads, head_dim], rows may be strided; k_cache: [num_pages, page_size, kv_heads,
    head_dim] and v_cache with v_head_dim, both maybe strided views, in q's dtype or float8_e4m3fn
    with k_scale and v_scale [1] float32, already holding the step's K and V; page_table: [reqs,
    max_pages] int32; prefix_lens, kv_lens: [reqs] int32; cu_seqlens_q: [reqs + 1] int32; no request
    extends by more than max_extend_len; tree_mask: [tokens, >= max_extend_len] bool, with
    MaskKind.TREE only; sinks: [heads] float32.  With prefix_only the step's own keys are left out;
    the window still counts from the query's position.  lse never counts a sink.  With a workspace
    few queries split their keys among programs, as a decode does.
    Mutates out [tokens, heads, v_head_dim] and lse [tokens, heads] float32 (natural log): every row
    below cu_seqlens_q[-1] is written, rows without a visible key with 0 and −inf.  Mutates the
    workspace.  Graph-safe: the grid depends on padded sizes only; no host sync.
    Raises KernelArgumentError.
    """
    num_reqs = page_table.shape[0]
    check_caches(q, k_cache, v_cache)
    check_scales(k_cache, k_scale=k_scale, v_scale=v_scale)
    check_sinks(q, sinks)
    _check_mask(mask, tree_mask, tokens=q.shape[0], max_extend_len=max_extend_len)
    check_page_table(page_table, num_reqs)
    check_index("prefix_lens", prefix_lens, (num_reqs,))
    check_index("kv_lens", kv_lens, (num_reqs,))
    check_index("cu_seqlens_q", cu_seqlens_q, (num_reqs + 1,))
    check_outputs(q, v_cache, out=out, lse=lse)
    if q.shape[0] == 0 or max_extend_len == 0:
        return
    max_keys = most_keys(page_table, k_cache, window) + max_extend_len
    splits, shared = _shared(
        q, v_cache, workspace, num_reqs, max_extend_len=max_extend_len, max_keys=max_keys
    )
    _PAGED_EXTEND(
        q,
        k_cache,
        v_cache,
        page_table,
        prefix_lens,
        kv_lens,
        cu_seqlens_q,
        tree_mask,
        k_scale,
        v_scale,
        sinks,
        mask.value,
        max_extend_len,
        scale,
        window,
        soft_cap,
        prefix_only,
        splits,
        out,
        lse,
        *shared,
    )


def _shared(
    q: Tensor,
    v_cache: Tensor,
    workspace: SplitWorkspace | None,
    num_reqs: int,
    *,
    max_extend_len: int,
    max_keys: int,
) -> tuple[int, tuple[Tensor | None, ...]]:
    """How many programs share a query's keys, and the buffers they meet in: none where one reads
    all."""
    if workspace is None:
        return 1, (None, None, None)
    tokens, heads, _ = q.shape
    kv_heads, v_head_dim = v_cache.shape[2:]
    splits = extend_splits(
        tokens,
        num_reqs,
        kv_heads,
        max_rows=max_extend_len * heads // kv_heads,
        max_keys=max_keys,
        dtype=q.dtype,
        workspace=workspace,
    )
    if splits == 1:
        return 1, (None, None, None)
    check_workspace(workspace, tokens * splits, 0, heads, v_head_dim)
    return splits, (workspace.partial_out, workspace.partial_lse, workspace.finished)


def _check_mask(
    mask: MaskKind, tree_mask: Tensor | None, *, tokens: int, max_extend_len: int
) -> None:
    if mask is not MaskKind.TREE and tree_mask is None:
        return
    if mask is not MaskKind.TREE:
        reject(
            "tree_mask",
            expected=f"None, for a {mask.value} mask",
            got=tree_mask,
            remedy="pass it with MaskKind.TREE",
        )
    if tree_mask is None or not _is_tree_mask(tree_mask, tokens, max_extend_len):
        reject(
            "tree_mask",
            expected=f"bool [{tokens}, >= {max_extend_len}] with contiguous rows",
            got=tree_mask,
            remedy="pass the step view's tree_mask",
        )


def _is_tree_mask(tensor: Tensor, tokens: int, max_extend_len: int) -> bool:
    fits = tensor.dim() == 2 and tensor.shape[0] == tokens and tensor.shape[1] >= max_extend_len
    return fits and tensor.dtype == torch.bool and tensor.stride(1) == 1


def _launch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    prefix_lens: Tensor,
    kv_lens: Tensor,
    cu_seqlens_q: Tensor,
    tree_mask: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    sinks: Tensor | None,
    mask: str,
    max_extend_len: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    prefix_only: bool,
    splits: int,
    out: Tensor,
    lse: Tensor,
    partial_out: Tensor | None,
    partial_lse: Tensor | None,
    finished: Tensor | None,
) -> None:
    require_triton("paged_extend", otherwise="choose the torch attention backend")
    from paceline.kernels._triton.paged_extend import launch_paged_extend

    launch_paged_extend(
        q,
        k_cache,
        v_cache,
        page_table,
        prefix_lens,
        kv_lens,
        cu_seqlens_q,
        tree_mask=tree_mask,
        k_scale=k_scale,
        v_scale=v_scale,
        sinks=sinks,
        mask=mask,
        max_extend_len=max_extend_len,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        prefix_only=prefix_only,
        splits=splits,
        out=out,
        lse=lse,
        partial_out=partial_out,
        partial_lse=partial_lse,
        finished=finished,
    )


_PAGED_EXTEND = define_op(
    "paged_extend(Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, "
    "Tensor prefix_lens, Tensor kv_lens, Tensor cu_seqlens_q, Tensor? tree_mask, "
    "Tensor? k_scale, Tensor? v_scale, Tensor? sinks, str mask, int max_extend_len, float scale, "
    "int? window, float? soft_cap, bool prefix_only, int splits, Tensor(a!) out, Tensor(b!) lse, "
    "Tensor(c!)? partial_out, Tensor(d!)? partial_lse, Tensor(e!)? finished) -> ()",
    cpu=_launch,
    cuda=_launch,
)
