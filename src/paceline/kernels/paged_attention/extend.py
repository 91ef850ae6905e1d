"""paged_extend: ragged queries over paged keys, prefix and step alike, under any mask.

Rows of a matrix tile are (query, head of the group) pairs, so one tile of keys serves the whole
group.  The definition is paged_attention_reference.
"""

from typing import Any

import torch
from torch import Tensor

from paceline.core.modes import MaskKind
from paceline.kernels._check import reject, require_triton
from paceline.kernels.custom_op import define_op
from paceline.kernels.paged_attention.call import SCHEMA, PagedCall
from paceline.kernels.paged_attention.checks import check_call, check_index
from paceline.kernels.paged_attention.splits import (
    SHORT_ROWS,
    SplitWorkspace,
    check_workspace,
    extend_splits,
    most_keys,
    short_places,
    short_splits,
)


def paged_extend(call: PagedCall, workspace: SplitWorkspace | None = None) -> None:
    """Attend every query of the step to its prefix and to what the mask shows of the step.

    The cache already holds the step's K and V.  With a workspace few queries split their keys among
    programs, as a decode does.  Mutates out, lse and the workspace: every row below
    cu_seqlens_q[-1] is written, rows without a visible key with 0 and −inf.
    Graph-safe: the grid depends on padded sizes only; no host sync.  Raises KernelArgumentError.
    """
    q, rows = call.q, call.rows
    num_reqs = rows.page_table.shape[0]
    check_call(call, num_reqs)
    _check_mask(rows.mask, rows.tree_mask, tokens=q.shape[0], max_extend_len=rows.max_extend_len)
    _check_visible_end(rows.mask, rows.visible_end, tokens=q.shape[0])
    check_index("prefix_lens", rows.prefix_lens, (num_reqs,))
    check_index("kv_lens", rows.kv_lens, (num_reqs,))
    check_index("cu_seqlens_q", rows.cu_seqlens_q, (num_reqs + 1,))
    if q.shape[0] == 0 or rows.max_extend_len == 0:
        return
    _PAGED_EXTEND(*call.flat(), *_shared(call, workspace))


def _shared(
    call: PagedCall, workspace: SplitWorkspace | None
) -> tuple[int, int, Tensor | None, Tensor | None, Tensor | None]:
    """How many programs share a query's keys, how many those of a short request where longer ones
    are not split, and the buffers they meet in: none where one reads all."""
    if workspace is None:
        return 1, 1, None, None, None
    (tokens, heads, _), rows, cache = call.q.shape, call.rows, call.cache
    num_reqs, (kv_heads, v_head_dim) = rows.page_table.shape[0], cache.v.shape[2:]
    group = heads // kv_heads
    max_keys = most_keys(rows.page_table, cache.k, call.weighing.most_keys)
    splits = extend_splits(
        tokens,
        num_reqs,
        kv_heads,
        group=group,
        max_rows=rows.max_extend_len * group,
        max_keys=max_keys + rows.max_extend_len,
        dtype=call.q.dtype,
        workspace=workspace,
        is_wide=cache.v_in_k,
        is_scaled=cache.beside is not None,
    )
    partials, of_short = tokens * splits, 1
    # Of latents the merge is one launch for all tokens.
    if splits == 1 and group <= SHORT_ROWS and not cache.v_in_k:
        of_short = short_splits(num_reqs, group, kv_heads, max_keys=max_keys, workspace=workspace)
        partials = short_places(num_reqs, group) * of_short
    if splits == of_short == 1:
        return 1, 1, None, None, None
    check_workspace(workspace, partials, 0, heads, v_head_dim)
    return splits, of_short, workspace.partial_out, workspace.partial_lse, workspace.finished


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


def _check_visible_end(mask: MaskKind, visible_end: Tensor | None, *, tokens: int) -> None:
    if mask is MaskKind.BLOCK and visible_end is not None:
        check_index("visible_end", visible_end, (tokens,))
    elif mask is MaskKind.BLOCK or visible_end is not None:
        is_block = mask is MaskKind.BLOCK
        reject(
            "visible_end",
            expected=f"{f'int32 [{tokens}]' if is_block else 'None'}, for a {mask.value} mask",
            got=visible_end,
            remedy="pass the step view's visible_end with MaskKind.BLOCK",
        )


def _is_tree_mask(tensor: Tensor, tokens: int, max_extend_len: int) -> bool:
    fits = tensor.dim() == 2 and tensor.shape[0] == tokens and tensor.shape[1] >= max_extend_len
    return fits and tensor.dtype == torch.bool and tensor.stride(1) == 1


def _launch(*args: Any) -> None:
    require_triton("paged_extend", otherwise="choose the torch attention backend")
    from paceline.kernels._triton.paged_extend import launch_paged_extend

    call, (splits, of_short, partial_out, partial_lse, finished) = PagedCall.taken(args)
    workspace = None
    if partial_out is not None:
        workspace = SplitWorkspace(
            partial_out=partial_out, partial_lse=partial_lse, finished=finished
        )
    launch_paged_extend(call, workspace, splits=splits, short_splits=of_short)


_PAGED_EXTEND = define_op(
    f"paged_extend({SCHEMA}, int splits, int short_splits, Tensor(c!)? partial_out, "
    "Tensor(d!)? partial_lse, Tensor(e!)? finished) -> ()",
    cpu=_launch,
    cuda=_launch,
)
