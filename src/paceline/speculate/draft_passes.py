"""DraftPasses: the rows of each draft pass of a round: lengths, positions, slots, ancestors.

Worked example: 7 tokens committed, topk 2, a head that reads a feature (its first drafts come from
what was observed, so pass 1 runs them).

    chain   pass 1: prefix 7, row b          pass 2: prefix 8, row c             one row each
    tree    pass 1: prefix 7, rows b c       pass 2: prefix 7, rows b c d e      depth by depth
            positions 7 7                    positions 7 7 8 8, parents -1 -1 0 0
"""

from dataclasses import replace

import torch
from torch import Tensor

from paceline.core.modes import MaskKind
from paceline.core.padding import PAD_ROW
from paceline.core.step import Step
from paceline.kernels.derive import PassRows, derive_rows
from paceline.kernels.derive_rope import RopeRows, derive_rope
from paceline.kernels.step_view import StepView
from paceline.layers.attention import StepContext
from paceline.runner.buffers import StepBuffers
from paceline.speculate.draft_cache import DraftCache

OBSERVE_PASS = 0  # the pass over what the target computed; propose's passes count from 1


class DraftPasses:
    """Sole owner of the device tensors of draft passes, which follow one another within a round."""

    def __init__(
        self,
        cache: DraftCache,
        *,
        max_reqs: int,
        rows: tuple[int, ...],
        is_chain: bool,
        kv_len_bound: int,
        device: torch.device,
    ) -> None:
        """rows: [num_passes] per request of each; kv_len_bound: no kv_len exceeds it."""
        self._cache = cache
        self._rows = rows
        self._is_chain = is_chain
        max_rows = max(rows, default=1)
        self._page_sizes = [pool.spec.page_size for pool in cache.pools]
        self._buffers = StepBuffers(
            max_reqs=max_reqs,
            max_tokens=max_reqs * max_rows,
            max_pages=(0,) * len(cache.pools),
            max_tree_rows=0 if is_chain else max_rows,
            of_passes=True,
            rope_axes=cache.rope_axes,
            kv_len_bound=kv_len_bound,
            device=device,
        )

    def begin(
        self,
        step: StepView,
        pass_id: int,
        tokens: Tensor,
        *,
        parents: Tensor | None,
        rope: RopeRows | None,
    ) -> tuple[StepView, StepContext]:
        """Derive and plan one pass.  The view's input_ids hold `tokens`.

        step: the round's view, all groups; tokens: [padded_reqs, rows] int64; parents: the same
        shape, int32, of a tree: an earlier row, -1: the committed prefix; rope: the round's.
        """
        mask = MaskKind.CAUSAL if parents is None else MaskKind.TREE
        own = self._cache.own_view(step)
        view = self._buffers.view_of_pass(own, tokens.shape[1], mask)
        derive_rows(
            PassRows(step.prefix_lens, self._advance(pass_id), parents),
            view,
            page_sizes=self._page_sizes,
            offsets=self._buffers.arange,
        )
        derive_rope(rope, view)
        view.input_ids.view(tokens.shape).copy_(tokens)
        return view, self._cache.context(view, pass_id)

    def host_plan(self, step: Step) -> None:
        """Plan `observe` and the propose passes on the host.

        step: with padded rows spelled out.
        """
        layout = step.layout
        self._cache.host_plan(replace(step, mask=MaskKind.CAUSAL), OBSERVE_PASS)
        if not step.is_round:
            return
        num, is_live = layout.num_reqs, [row != PAD_ROW for row in layout.rows]
        mask = MaskKind.CAUSAL if self._is_chain else MaskKind.TREE
        for pass_id, count in enumerate(self._rows, start=1):
            advance = self._advance(pass_id)
            drafted = replace(
                step,
                mask=mask,
                layout=replace(layout, extend_lens=(count,) * num),
                prefix_lens_bound=tuple(
                    prefix + advance * live
                    for prefix, live in zip(step.prefix_lens_bound, is_live, strict=True)
                ),
            )
            self._cache.host_plan(drafted, pass_id)

    def named_tensors(self) -> dict[str, Tensor]:
        return self._buffers.named_tensors("draft")

    def _advance(self, pass_id: int) -> int:
        """Tokens of a chain that the passes before this one have written."""
        return pass_id - 1 if self._is_chain else 0
