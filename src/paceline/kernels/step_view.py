"""StepView: one step's tensors on the device, as kernels, backends and layers are given them."""

from dataclasses import dataclass, replace

from torch import Tensor

from paceline.core.model.cache_groups import CHECKPOINT, READ, WRITE
from paceline.core.modes import MaskKind


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupView:
    """One cache group's part of a step.

    Of a STATE group the page table has three columns, slots.  There and in an ENCODER group tokens
    have no slots: out_cache_loc is empty.
    """

    page_table: Tensor  # [padded_reqs, max_pages]  int32  page ids; padding: PAD_PAGE
    out_cache_loc: Tensor  # [padded_tokens]  int64  slots written by this step; padding: PAD_SLOT
    prefix_lens: Tensor  # [padded_reqs]  int32  rows it holds before the step: the view's; of an
    # ENCODER group those of each request's encoder, 0 of who has none; padding: 1
    kv_lens: Tensor  # [padded_reqs]  int32  prefix + extend: the view's; in an ENCODER group nobody
    # reads beyond the prefix

    @property
    def read_slots(self) -> Tensor:
        """[padded_reqs] int32, of a STATE group: the state behind the prefix; 0: zeros."""
        return self.page_table[:, READ]

    @property
    def write_slots(self) -> Tensor:
        """[padded_reqs] int32, of a STATE group: each live row has its own; padding: 0."""
        return self.page_table[:, WRITE]

    @property
    def checkpoint_slots(self) -> Tensor:
        """[padded_reqs] int32, of a STATE group: where a state goes that others may find."""
        return self.page_table[:, CHECKPOINT]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepView:
    """The padded device view of one step.  Addresses are fixed; derive writes the contents.

    Sizes are host facts: shapes, mask, max_extend_len, kv_len_bound.  Lengths are on the device.
    """

    row_ids: Tensor  # [padded_reqs]  int64  request-table rows; padded and frozen rows: PAD_ROW
    prefix_lens: Tensor  # [padded_reqs]  int32  tokens in the cache before the step; padding: 1
    extend_lens: Tensor  # [padded_reqs]  int32  tokens computed in the step; padding: the stride
    kv_lens: Tensor  # [padded_reqs]  int32  prefix + extend, padded rows too
    cu_seqlens_q: Tensor  # [padded_reqs + 1]  int32  leading 0; last = padded_tokens
    req_ids: Tensor  # [padded_tokens]  int64  index of each token's request within the step
    positions: Tensor  # [padded_tokens]  int64  index of each token in its request; of a tree the
    # one it has if it is accepted: prefix + depth
    rope_positions: Tensor  # [padded_tokens]  int64  what rope turns by: `positions` itself; or
    # [axes, padded_tokens]  of a model whose rope has several axes
    input_ids: Tensor  # [padded_tokens]  int64  token ids
    logits_loc: Tensor  # [padded_reqs]  int64  each request's last token within the step
    groups: tuple[GroupView, ...]  # [num_groups]
    mask: MaskKind
    tree_mask: Tensor | None  # [padded_tokens, max_extend_len]  bool  column j: row j of the same
    # request in this step is the token itself or an ancestor.  Only with MaskKind.TREE.
    max_extend_len: int  # no row extends further; part of the graph key.  Exact but for a ragged
    # step that is padded: there it is padded_tokens, since its graph serves any split of them
    visible_end: Tensor | None = None  # [padded_tokens]  int32  a row sees its request's keys
    # before this one, index + 1 to kv_len.  Only with MaskKind.BLOCK
    token_types: Tensor | None = None  # [padded_tokens]  int64  1 of a pair's second text, 0 of all
    # others; None: the model is not told
    kv_len_bound: int  # no kv_len exceeds it; the same for every step of an engine
    shares_prefix: bool = False  # many rows may read the same pages of a prefix; part of the key
    overlay_slot: Tensor | None = None  # [padded_tokens]  int64  slot of the overlay whose row
    # stands in for the token's embedding; 0: none does.  Only in a step that reads the overlay.

    def of(self, groups: "tuple[GroupView, ...]") -> "StepView":
        """The view with `groups` alone, which have one length, in place of its lengths: what plans
        the layers of these groups."""
        if not groups:
            return replace(self, groups=())
        kv_lens = groups[0].kv_lens
        assert all(group.kv_lens is kv_lens for group in groups), "one plan has one length of a row"
        return replace(self, groups=groups, prefix_lens=groups[0].prefix_lens, kv_lens=kv_lens)

    def leading(self, reqs: int, tokens: int, *, max_extend_len: int) -> "StepView":
        """The first requests alone, which have so many tokens in all; none extends further."""

        def first(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[:tokens]

        return replace(
            self,
            row_ids=self.row_ids[:reqs],
            prefix_lens=self.prefix_lens[:reqs],
            extend_lens=self.extend_lens[:reqs],
            kv_lens=self.kv_lens[:reqs],
            cu_seqlens_q=self.cu_seqlens_q[: reqs + 1],
            req_ids=self.req_ids[:tokens],
            positions=self.positions[:tokens],
            rope_positions=self.rope_positions[..., :tokens],
            input_ids=self.input_ids[:tokens],
            logits_loc=self.logits_loc[:reqs],
            groups=tuple(
                GroupView(
                    page_table=group.page_table[:reqs],
                    out_cache_loc=group.out_cache_loc[:tokens],
                    prefix_lens=group.prefix_lens[:reqs],
                    kv_lens=group.kv_lens[:reqs],
                )
                for group in self.groups
            ),
            max_extend_len=max_extend_len,
            tree_mask=first(self.tree_mask),
            visible_end=first(self.visible_end),
            token_types=first(self.token_types),
            overlay_slot=first(self.overlay_slot),
        )

    def at_tokens(self, table: Tensor) -> Tensor:
        """[padded_tokens] what a table of the requests' tokens, [rows, max_tokens], has of each.

        Device-only, static shapes.
        """
        rows = self.row_ids.index_select(0, self.req_ids)
        places = rows * table.shape[1] + self.positions
        return table.view(-1).index_select(0, places)

    @property
    def padded_reqs(self) -> int:
        return self.row_ids.shape[0]

    @property
    def padded_tokens(self) -> int:
        return self.positions.shape[0]
