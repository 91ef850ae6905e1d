"""DraftPasses: the rows of each draft pass of a round: lengths, positions, slots, ancestors.

Worked example: 7 tokens committed, topk 2, a head that reads a feature (its first drafts come from
what was observed, so pass 1 runs them).

    chain   pass 1: prefix 7, row b          pass 2: prefix 8, row c             one row each
    tree    pass 1: prefix 7, rows b c       pass 2: prefix 7, rows b c d e      depth by depth
            positions 7 7                    positions 7 7 8 8, parents -1 -1 0 0
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paceline.core.modes import ForwardMode, MaskKind
from paceline.core.padding import PAD_ROW
from paceline.core.step import Step
from paceline.kernels.derive_draft import DraftBase, DraftRows, derive_draft
from paceline.kernels.step_view import GroupView, StepView
from paceline.layers.attention import AttentionContext
from paceline.speculate.draft_cache import DraftCache

OBSERVE_PASS = 0  # the pass over what the target computed; propose's passes count from 1


class DraftPasses:
    """Sole owner of the device tensors of draft passes, which follow one another within a round."""

    def __init__(
        self,
        cache: DraftCache,
        *,
        max_reqs: int,
        max_rows: int,
        is_chain: bool,
        kv_len_bound: int,
        device: torch.device,
    ) -> None:
        """max_rows: rows per request of the widest pass; kv_len_bound: no kv_len exceeds it."""

        def ints(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        def longs(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int64, device=device)

        tokens = max_reqs * max_rows
        self._cache = cache
        self._is_chain = is_chain
        self._kv_len_bound = kv_len_bound
        self.prefix_lens = ints(max_reqs)
        self.extend_lens = ints(max_reqs)
        self.kv_lens = ints(max_reqs)
        self.cu_seqlens_q = ints(max_reqs + 1)
        self.req_ids = longs(tokens)
        self.positions = longs(tokens)
        self.input_ids = longs(tokens)
        self.logits_loc = longs(max_reqs)
        self.out_cache_locs = tuple(longs(tokens) for _ in cache.pools)
        mask = 0 if is_chain else tokens * max_rows
        self.tree_mask = torch.zeros(mask, dtype=torch.bool, device=device)

    def begin(
        self, step: StepView, pass_id: int, tokens: Tensor, *, parents: Tensor | None
    ) -> tuple[StepView, AttentionContext]:
        """Derive and plan one pass.  The view's input_ids hold `tokens`.

        step: the round's view, all groups; tokens: [padded_reqs, rows] int64; parents: the same
        shape, int32, of a tree: an earlier row, -1: the committed prefix.
        """
        view = self._view(step, tokens.shape[1], has_tree=parents is not None)
        own = self._cache.own_view(step)
        derive_draft(
            DraftBase(
                row_ids=step.row_ids,
                prefix_lens=step.prefix_lens,
                page_tables=[group.page_table for group in own.groups],
                parents=parents,
            ),
            DraftRows(
                prefix_lens=view.prefix_lens,
                extend_lens=view.extend_lens,
                kv_lens=view.kv_lens,
                cu_seqlens_q=view.cu_seqlens_q,
                req_ids=view.req_ids,
                positions=view.positions,
                logits_loc=view.logits_loc,
                out_cache_locs=[group.out_cache_loc for group in view.groups],
                tree_mask=view.tree_mask,
            ),
            advance=self._advance(pass_id),
            page_sizes=[pool.spec.page_size for pool in self._cache.pools],
        )
        view.input_ids.view(tokens.shape).copy_(tokens)
        return view, self._cache.context(view, pass_id)

    def host_plan(self, step: Step, rows: Sequence[int]) -> None:
        """Plan `observe` and the propose passes on the host.

        step: with padded rows spelled out; rows: [num_passes] rows per request of pass 1, 2, ...
        """
        layout = replace(step.layout, parents=None, drafts=None)
        mode = ForwardMode.DRAFT_EXTEND_V2 if step.is_round else ForwardMode.DRAFT_EXTEND
        observed = replace(step, mode=mode, layout=layout)
        self._cache.host_plan(observed, OBSERVE_PASS)
        if not step.is_round:
            return
        num, is_live = layout.num_reqs, [row != PAD_ROW for row in layout.rows]
        for pass_id, count in enumerate(rows, start=1):
            advance = self._advance(pass_id)
            drafted = replace(
                step,
                mode=ForwardMode.DRAFT_DECODE,
                layout=replace(
                    layout,
                    extend_lens=(count,) * num,
                    drafts=MaskKind.CAUSAL if self._is_chain else MaskKind.TREE,
                ),
                prefix_lens_bound=tuple(
                    prefix + advance * live
                    for prefix, live in zip(step.prefix_lens_bound, is_live, strict=True)
                ),
            )
            self._cache.host_plan(drafted, pass_id)

    def named_tensors(self) -> dict[str, Tensor]:
        """Its tensors by name."""
        named = {n: t for n, t in vars(self).items() if isinstance(t, Tensor)}
        named |= {f"out_cache_loc.{i}": loc for i, loc in enumerate(self.out_cache_locs)}
        return {f"draft.{name}": tensor for name, tensor in named.items()}

    def _advance(self, pass_id: int) -> int:
        """Tokens of a chain that the passes before this one have written."""
        return pass_id - 1 if self._is_chain else 0

    def _view(self, step: StepView, rows: int, *, has_tree: bool) -> StepView:
        reqs, tokens = step.padded_reqs, step.padded_reqs * rows
        own = self._cache.own_view(step)
        tree_mask = self.tree_mask[: tokens * rows].view(tokens, rows) if has_tree else None
        return StepView(
            row_ids=step.row_ids,
            prefix_lens=self.prefix_lens[:reqs],
            extend_lens=self.extend_lens[:reqs],
            kv_lens=self.kv_lens[:reqs],
            cu_seqlens_q=self.cu_seqlens_q[: reqs + 1],
            req_ids=self.req_ids[:tokens],
            positions=self.positions[:tokens],
            input_ids=self.input_ids[:tokens],
            logits_loc=self.logits_loc[:reqs],
            groups=tuple(
                GroupView(page_table=group.page_table, out_cache_loc=loc[:tokens])
                for group, loc in zip(own.groups, self.out_cache_locs, strict=True)
            ),
            mask=MaskKind.TREE if has_tree else MaskKind.CAUSAL,
            tree_mask=tree_mask,
            max_extend_len=rows,
            kv_len_bound=self._kv_len_bound,
        )
