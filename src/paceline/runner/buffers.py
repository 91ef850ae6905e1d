"""StepBuffers: the persistent tensors of a step at their maximum size.  Owns the padding rule.

`fill` stages what the scheduler decided; `derive` computes everything else in place; `view` cuts
the frozen StepView of one padded size.  Equal sizes give equal addresses, always.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.attention.held import tensors_in
from paceline.core.modes import MaskKind
from paceline.core.padding import PAD_ROW
from paceline.core.request.sampling_params import MAX_LOGPROBS
from paceline.core.step import GivenDrafts, StepLayout, TokenMask, padded_parents
from paceline.kernels.mask_tokens import NO_MASK, Masks, num_words
from paceline.kernels.step_view import GroupView, StepView
from paceline.runner.draft_paths import PROPOSED, GivenRows
from paceline.runner.extents import EXTENTS, Extent, PaddedSize, StepUse
from paceline.runner.staging import Copy, StagingSlot

# What the view of a step, or of a pass, has under the same name: the first entries it uses.
_VIEWED = tuple(
    field.name
    for field in fields(StepView)
    if field.name in EXTENTS
    and field.name
    not in ("row_ids", "rope_positions", "tree_mask", "overlay_slot", "visible_end", "token_types")
)


class StepBuffers:
    """Sole owner of the step's device tensors; derive and commit write them in place.

    Passes of a drafter have an instance of their own, for `view_of_pass`: what the step stages,
    emits or holds for them already (row ids, page tables) is zero-sized there.

    facts:  [max_reqs, 3]  int32  staged by fill: row id, extend length, emits (0 or 1)
    parents:  [max_reqs * max_tree_rows]  int32  staged by fill, of a tree step alone: the row of
        the same request that each row hangs on, -1: the prefix
    Derived (see StepView for meanings): row_ids, prefix_lens, extend_lens, kv_lens, cu_seqlens_q,
    req_ids, positions, input_ids, logits_loc, page_tables, out_cache_locs, tree_mask.
    overlay_slot: [max_tokens]  int64  zero-sized where there is no overlay
    token_types: [max_tokens]  int64  zero-sized where the model is not told
    visible_end: [max_tokens]  int32  zero-sized where no prompt has blocks
    chain_positions: [max_tokens]  int64  of a round of trees: positions of its rows as a chain;
        zero-sized where there are no trees
    state_lens: [max_reqs]  int32  written behind commit: what a row's checkpoint slots stand for,
        or 0; zero-sized where there are no STATE groups
    encoder_lens, encoder_kv_lens: [max_reqs]  int32  prefix_lens and kv_lens of ENCODER groups;
        zero-sized where there are none
    rope_positions, chain_rope_positions: [max_tokens, axes]  int64  what rope turns by, of the same
        rows as positions and chain_positions; zero-sized where one axis is enough: it is those
    results: [max_reqs * (2 + max_path)]  int32  written by commit, a packed row per request: tokens
        emitted, FinishCode, and their ids, as many as a row of the step emits at most
    pooled: [max_reqs, pooled_width]  float32  written by a step that pools, a row per request
    chosen_logprobs, top_ids, top_logprobs: a row for each token that may be emitted; those of
        tokens that were not hold anything
    mask_ids:  [max_reqs * rows of a request that are sampled at most]  int32  staged by fill_masks:
        the row of mask_words with a sampled row's mask, NO_MASK: it may take every token
    mask_words:  [max_reqs + rows of a request - 1, ceil(vocab / 32)]  int32  staged likewise, as
        kernels/mask_tokens.py has them; in the order of the step
    given_ids, given_parents:  [max_reqs * rows of a request]  int32  staged by fill_given, of a
        round with masks, as GivenRows has them; zero-sized without drafts, parents without trees
    """

    def __init__(
        self,
        *,
        max_reqs: int,
        max_tokens: int,
        max_pages: tuple[int, ...],
        max_tree_rows: int = 0,
        max_path: int = 1,
        has_overlay: bool = False,
        has_blocks: bool = False,
        of_passes: bool = False,
        state_groups: frozenset[int] = frozenset(),
        encoder_groups: tuple[int, ...] = (),
        vocab_size: int = 0,
        pooled_width: int = 0,
        tells_types: bool = False,
        rope_axes: int = 1,
        kv_len_bound: int,
        device: torch.device,
    ) -> None:
        """state_groups, encoder_groups: those of the groups whose tokens have no slots.
        vocab_size: of masks; 0: no step has any.  pooled_width: numbers of a vector; 0: no step
        pools."""
        own_reqs, own_tree_rows = (0, 0) if of_passes else (max_reqs, max_tree_rows)
        self.kv_len_bound = kv_len_bound
        self._filled: tuple[StepLayout, PaddedSize] | None = None

        def ints(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        def longs(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int64, device=device)

        self.facts = ints(own_reqs, 3)
        self.parents = ints(max_reqs * own_tree_rows)
        self.results = ints(own_reqs * (2 + max_path))
        self.pooled = torch.zeros(own_reqs if pooled_width else 0, pooled_width, device=device)
        self.arange = ints(max_tokens)
        torch.arange(max_tokens, out=self.arange)
        self.row_ids = longs(own_reqs)
        self.prefix_lens = ints(max_reqs)
        self.extend_lens = ints(max_reqs)
        self.kv_lens = ints(max_reqs)
        self.cu_seqlens_q = ints(max_reqs + 1)
        self.req_ids = longs(max_tokens)
        self.positions = longs(max_tokens)
        self.chain_positions = longs(max_tokens if own_tree_rows else 0)
        turned = max_tokens if rope_axes > 1 else 0
        self.rope_positions = longs(turned, rope_axes)
        self.chain_rope_positions = longs(turned if own_tree_rows else 0, rope_axes)
        self.input_ids = longs(max_tokens)
        self.token_types = longs(max_tokens if tells_types else 0)
        self.overlay_slot = longs(max_tokens if has_overlay else 0)
        self.visible_end = ints(max_tokens if has_blocks else 0)
        self.logits_loc = longs(max_reqs)
        self.tree_mask = torch.zeros(
            max_reqs * max_tree_rows**2, dtype=torch.bool, device=device
        )  # rows as wide as the step's trees
        self.page_tables = tuple(ints(own_reqs, width) for width in max_pages)
        self.out_cache_locs = tuple(
            longs(0 if group in state_groups or group in encoder_groups else max_tokens)
            for group in range(len(max_pages))
        )
        self.encoder_groups = encoder_groups
        self.encoder_lens = ints(own_reqs if encoder_groups else 0)
        self.encoder_kv_lens = ints(own_reqs if encoder_groups else 0)
        self.state_lens = ints(own_reqs if state_groups else 0)
        emitted = own_reqs * max_path
        self.chosen_logprobs = torch.zeros(emitted, device=device)
        self.top_ids = longs(emitted, MAX_LOGPROBS)
        self.top_logprobs = torch.zeros(emitted, MAX_LOGPROBS, device=device)
        rows = max(max_tree_rows, max_path)  # of a request that are sampled
        self.mask_ids = ints(own_reqs * rows)
        self.mask_words = ints(own_reqs + rows - 1 if own_reqs else 0, num_words(vocab_size))
        self.given_ids = ints(own_reqs * rows if rows > 1 else 0)
        self.given_parents = ints(own_reqs * own_tree_rows)

    def holds(self, layout: StepLayout, size: PaddedSize) -> bool:
        """Whether `facts` already says exactly this, so that nothing need be staged."""
        return self._filled == (layout, size)

    def fill(self, layout: StepLayout, size: PaddedSize, slot: StagingSlot) -> list[Copy]:
        """Stage a layout padded to `size`; returns the copies the step's stream must execute."""
        facts = np.empty((size.reqs, 3), dtype=np.int32)
        facts[: layout.num_reqs, 0] = layout.rows
        facts[: layout.num_reqs, 1] = layout.extend_lens
        facts[: layout.num_reqs, 2] = layout.emits
        facts[layout.num_reqs :] = (PAD_ROW, 0, 0)
        facts[layout.num_reqs :, 1] = size.pad_lens(layout)
        self._filled = (layout, size)
        copies = [(self.facts[: size.reqs], slot.put(facts))]
        parents = padded_parents(layout, size.pad_lens(layout))
        if parents is not None:
            assert size.tokens <= self.parents.numel(), f"{size} is more than the trees' buffers"
            staged = np.array(parents, dtype=np.int32).reshape(-1)
            copies.append((self.parents[: size.tokens], slot.put(staged)))
        return copies

    def fill_masks(
        self, masks: Sequence[TokenMask], num_sampled: int, slot: StagingSlot
    ) -> list[Copy]:
        """Stage the masks of a step that samples so many rows; returns the copies, as `fill`."""
        assert masks, "a step without masks knows of none"
        ids = np.full(num_sampled, NO_MASK, dtype=np.int32)
        ids[[mask.row for mask in masks]] = np.arange(len(masks))
        words = np.frombuffer(b"".join([mask.words for mask in masks]), dtype=np.int32)
        words = words.reshape(len(masks), self.mask_words.shape[1])
        return [
            (self.mask_ids[:num_sampled], slot.put(ids)),
            (self.mask_words[: len(masks)], slot.put(words)),
        ]

    def fill_given(
        self, given: Sequence[GivenDrafts], size: PaddedSize, slot: StagingSlot, *, has_tree: bool
    ) -> list[Copy]:
        """Stage which drafts the rows of a round with masks have; returns the copies, as `fill`."""
        shape = (size.reqs, size.max_extend_len)
        ids, parents = np.full(shape, PROPOSED, np.int32), np.full(shape, -1, np.int32)
        for each in given:
            end = 1 + len(each.token_ids)
            ids[each.index, 0] = len(each.token_ids)
            ids[each.index, 1:end] = each.token_ids
            parents[each.index, 1:end] = [parent + 1 for parent in each.parents]
        copies = [(self.given_ids[: ids.size], slot.put(ids.reshape(-1)))]
        if has_tree:
            copies.append((self.given_parents[: ids.size], slot.put(parents.reshape(-1))))
        return copies

    def given(self, view: StepView) -> GivenRows:
        """Of a round with masks."""
        shape = (view.padded_reqs, view.max_extend_len)
        ids = self.given_ids[: view.padded_tokens].view(shape)
        if view.tree_mask is None:
            return GivenRows(ids, None)
        return GivenRows(ids, self.given_parents[: view.padded_tokens].view(shape))

    def masks(self, num_sampled: int) -> Masks:
        """Of a step that samples so many rows."""
        return Masks(self.mask_ids[:num_sampled], self.mask_words)

    def pad(self, size: PaddedSize) -> None:
        """Make `facts` say that every row of `size` is padding; runs on the device."""
        self._filled = None
        facts = self.facts[: size.reqs]
        facts[:, 0].fill_(PAD_ROW)
        if size.tokens == size.reqs * size.max_extend_len:
            facts[:, 1].fill_(size.max_extend_len)
        else:
            facts[:, 1].zero_()
            each = size.pad_len or size.tokens
            whole, rest = divmod(size.tokens, each)
            facts[:whole, 1].fill_(each)
            facts[whole : whole + 1, 1].fill_(rest)
        facts[:, 2].zero_()
        self.parents[: size.tokens].fill_(-1)
        self.mask_ids.fill_(NO_MASK)
        self.given_ids.fill_(PROPOSED)

    def view(
        self,
        size: PaddedSize,
        mask: MaskKind,
        *,
        shares_prefix: bool = False,
        has_overlay: bool = False,
    ) -> StepView:
        """The device view of a step padded to `size`."""
        return self._view(
            size,
            mask,
            self.row_ids[: size.reqs],
            self.page_tables,
            shares_prefix=shares_prefix,
            has_overlay=has_overlay,
        )

    def view_of_pass(self, step: StepView, rows: int, mask: MaskKind) -> StepView:
        """The device view of a drafter's pass: `rows` rows for each request of `step`.

        step: with the drafter's cache groups alone; its row ids and page tables are the pass's too.
        """
        size = PaddedSize.uniform(step.padded_reqs, rows)
        return self._view(size, mask, step.row_ids, [group.page_table for group in step.groups])

    def _view(
        self,
        size: PaddedSize,
        mask: MaskKind,
        row_ids: Tensor,
        page_tables: Sequence[Tensor],
        *,
        shares_prefix: bool = False,
        has_overlay: bool = False,
    ) -> StepView:
        has_tree, sees_ahead = mask is MaskKind.TREE, mask is MaskKind.BLOCK
        use = StepUse(
            size,
            has_tree=has_tree,
            max_emitted=0,
            has_overlay=has_overlay,
            sees_ahead=sees_ahead,
        )

        def used(field: str, tensor: Tensor | None = None) -> Tensor:
            whole: Tensor = getattr(self, field) if tensor is None else tensor
            return whole[: use.entries(EXTENTS[field])]

        tensors: dict[str, Any] = {field: used(field) for field in _VIEWED}
        of_tokens = tensors["prefix_lens"], tensors["kv_lens"]
        of_encoder = used("encoder_lens"), used("encoder_kv_lens")
        lens = [
            of_encoder if group in self.encoder_groups else of_tokens
            for group in range(len(page_tables))
        ]
        return StepView(
            **tensors,
            row_ids=row_ids,
            rope_positions=_turned_by(tensors["positions"], self.rope_positions),
            groups=tuple(
                GroupView(
                    page_table=used("page_tables", table),
                    out_cache_loc=used("out_cache_locs", loc),
                    prefix_lens=prefix_lens,
                    kv_lens=kv_lens,
                )
                for table, loc, (prefix_lens, kv_lens) in zip(
                    page_tables, self.out_cache_locs, lens, strict=True
                )
            ),
            mask=mask,
            tree_mask=used("tree_mask").view(size.tokens, -1) if has_tree else None,
            max_extend_len=size.max_extend_len,
            kv_len_bound=self.kv_len_bound,
            shares_prefix=shares_prefix,
            overlay_slot=used("overlay_slot") if has_overlay else None,
            visible_end=used("visible_end") if sees_ahead else None,
            token_types=used("token_types") if self.token_types.numel() else None,
        )

    def as_chain(self, view: StepView) -> StepView:
        """The rows of a round as a causal chain; of trees with positions of their own."""
        chain = replace(view, mask=MaskKind.CAUSAL, tree_mask=None)
        if view.tree_mask is None:
            return chain
        positions = self.chain_positions[: view.padded_tokens]
        turned_by = _turned_by(positions, self.chain_rope_positions)
        return replace(chain, positions=positions, rope_positions=turned_by)

    def results_of(self, reqs: int, max_emitted: int) -> Tensor:
        """[reqs, 2 + max_emitted] of a step whose rows emit so many tokens at most."""
        return packed_results(self.results, reqs, max_emitted)

    def named_tensors(self, owner: str = "step") -> dict[str, Tensor]:
        """The buffers by name, for guards."""
        return {name: tensor for name, (tensor, _) in self.extents(owner).items()}

    def extents(self, owner: str = "step") -> dict[str, tuple[Tensor, Extent]]:
        """The buffers by name, with what their entries are for; of a tuple each tensor."""
        return {
            name: (tensor, extent)
            for field, extent in EXTENTS.items()
            for name, tensor in tensors_in(f"{owner}.{field}", getattr(self, field)).items()
        }


def _turned_by(positions: Tensor, of_axes: Tensor) -> Tensor:
    """What rope turns rows by: `positions`, or the first of `of_axes` [max_tokens, axes]."""
    return of_axes[: positions.shape[0]].T if of_axes.numel() else positions


def packed_results(results: Tensor, reqs: int, max_emitted: int) -> Tensor:
    """[reqs, 2 + max_emitted] of a flat buffer: one piece, which a copy to the host needs to be."""
    width = 2 + max_emitted
    return results[: reqs * width].view(reqs, width)
