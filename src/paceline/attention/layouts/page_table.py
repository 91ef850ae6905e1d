"""The page-table layout: one row of page ids per request, with ragged query offsets."""

from dataclasses import dataclass

from torch import Tensor

from paceline.core.modes import MaskKind
from paceline.kernels.step_view import StepView


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PageTablePlan:
    """Views one step may read.  Nothing assigns to it; StepBuffers owns the contents."""

    cu_seqlens_q: Tensor  # [padded_reqs + 1]  int32  leading 0; padded rows have the stride
    prefix_lens: Tensor  # [padded_reqs]  int32
    extend_lens: Tensor  # [padded_reqs]  int32
    kv_lens: Tensor  # [padded_reqs]  int32  prefix + extend, padded rows too
    page_tables: tuple[Tensor, ...]  # [num_groups] of [padded_reqs, max_pages]  int32
    tree_mask: Tensor | None  # [padded_tokens, max_extend_len]  bool
    mask: MaskKind
    max_extend_len: int  # as the view's: an upper bound in a padded ragged step
    kv_len_bound: int  # upper bound, the same for every step
    visible_end: Tensor | None = None  # [padded_tokens]  int32


def page_table_plan(view: StepView) -> PageTablePlan:
    """The plan of the layout that `derive` already filled: no further device work."""
    return PageTablePlan(
        cu_seqlens_q=view.cu_seqlens_q,
        prefix_lens=view.prefix_lens,
        extend_lens=view.extend_lens,
        kv_lens=view.kv_lens,
        page_tables=tuple(group.page_table for group in view.groups),
        tree_mask=view.tree_mask,
        mask=view.mask,
        max_extend_len=view.max_extend_len,
        kv_len_bound=view.kv_len_bound,
        visible_end=view.visible_end,
    )
