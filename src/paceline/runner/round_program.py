"""RoundProgram: a round of speculation as one function: propose, verify, accept, commit, observe.

The contract and a worked example are in runner/proposer.py.  Eager rounds call it, graphs record
it.
"""

from dataclasses import replace

import torch
from torch import Tensor

from paceline.core.modes import MaskKind
from paceline.core.sampling_params import MAX_LOGPROBS, SamplerTier
from paceline.kernels.accept import Accepted, Drafts, accept_and_commit
from paceline.kernels.chain_rows import ChainRows, StepRows, chain_rows
from paceline.kernels.commit import CommittedRows, EndRules
from paceline.kernels.compact_kv import compact_kv
from paceline.kernels.derive_tree import derive_tree
from paceline.kernels.step_view import StepView
from paceline.layers.sampling import DrawnDrafts, Sampled, SampledLogprobs, sample
from paceline.models.decoder import Hidden
from paceline.runner.derive import derive
from paceline.runner.node_histories import node_drafts, node_histories
from paceline.runner.program import Parts, taps_of, target_forward
from paceline.runner.proposer import DraftTree, Observed, Proposer, RoundState


class RoundProgram:
    """Rounds of one padded size with one sampler tier; results stay on fixed addresses."""

    def __init__(
        self,
        parts: Parts,
        proposer: Proposer,
        view: StepView,
        *,
        sampler: SamplerTier,
        logprobs: bool,
    ) -> None:
        self._parts = parts
        self._proposer = proposer
        self._view = view
        # The same rows as a causal chain, for derive and for who observes.
        self._chain = replace(
            view,
            mask=MaskKind.CAUSAL,
            tree_mask=None,
            positions=view.positions
            if proposer.shape.is_chain
            else parts.buffers.chain_positions[: view.padded_tokens],
        )
        self._sampler = sampler
        self._top_logprobs = MAX_LOGPROBS if logprobs else 0
        self.prompt_logprobs: SampledLogprobs | None = None  # a round scores no prompt
        self.logits: Tensor | None = None  # [padded_tokens, vocab]  after verify; the head's dtype

    def run(self) -> None:
        """The round's segments in order; none needs the host before the next."""
        parts, chain = self._parts, self._chain
        derive(parts.buffers, parts.table, chain, parts.page_sizes)
        tree = self._proposer.propose(
            RoundState(
                view=chain,
                token_ids=parts.table.token_ids,
                sampling=parts.table.sampling,
                sampler=self._sampler,
                draws=parts.rejects,
            )
        )
        self._place(tree)
        output = self._verify()
        accepted = self._accept(tree, self._sample(self._drawn(tree)))
        self._compact(accepted.path)
        self._observe(output, accepted)

    def _place(self, tree: DraftTree) -> None:
        """Make the drafts the rows of the step."""
        view = self._view
        view.input_ids.view(tree.tokens.shape).copy_(tree.tokens)
        if view.tree_mask is None:
            return
        assert tree.parents is not None, f"{self._proposer.name} promised trees"
        parents = self._parts.buffers.parents[: view.padded_tokens]
        parents.view(tree.parents.shape).copy_(tree.parents)
        derive_tree(parents, view.prefix_lens, view.positions, tree_mask=view.tree_mask)

    def _verify(self) -> Hidden:
        output = target_forward(self._parts, self._view)
        self.logits = self._parts.model.logits(output.hidden)
        return output

    def _drawn(self, tree: DraftTree) -> DrawnDrafts | None:
        """What rejection compares; None: drafts count where they are sampled again."""
        if not self._parts.rejects or self._sampler is SamplerTier.GREEDY:
            return None
        assert tree.q is not None, f"{self._proposer.name} draws no drafts"
        return DrawnDrafts(tree.tokens[:, 1:], tree.q, tree.d2t)

    def _sample(self, drawn: DrawnDrafts | None) -> Sampled:
        """What plain decoding would sample behind each row, or the draft there that is kept."""
        parts, view = self._parts, self._view
        assert self.logits is not None, "verify runs before sample"
        rows = view.row_ids.index_select(0, view.req_ids)
        token_ids = parts.table.token_ids
        plug_ins = self._sampler is SamplerTier.PLUG_INS
        return sample(
            self.logits,
            rows=rows,
            positions=view.positions + 1,
            table=parts.table.sampling,
            token_ids=token_ids,
            tier=self._sampler,
            top_logprobs=self._top_logprobs,
            drafts=None if self._sampler is SamplerTier.GREEDY else node_drafts(view),
            histories=node_histories(token_ids, rows, view) if plug_ins else None,
            drawn=drawn,
        )

    def _accept(self, tree: DraftTree, sampled: Sampled) -> Accepted:
        """Walk down while the sampled token is a child; commit what that emits."""
        table, view, shape = self._parts.table, self._view, tree.tokens.shape
        reqs, max_path = view.padded_reqs, self._proposer.shape.max_path
        accepted = Accepted(
            path=view.row_ids.new_empty(reqs, max_path),
            last=view.row_ids.new_empty(reqs),
            results=self._parts.buffers.round_results[:reqs],
        )
        accept_and_commit(
            CommittedRows(table.kv_committed, table.finish, table.token_ids),
            EndRules(table.sampling.stop_ids, table.sampling.max_len),
            Drafts(
                row_ids=view.row_ids,
                prefix_lens=view.prefix_lens,
                tokens=tree.tokens,
                parents=tree.parents,
                sampled=sampled.token_ids.view(shape),
                finite=sampled.finite.view(shape),
                max_drafts=table.sampling.max_drafts,
            ),
            accepted,
            forced=self._parts.force_accept_len,
        )
        self._place_logprobs(sampled, accepted.path)
        return accepted

    def _place_logprobs(self, sampled: Sampled, path: Tensor) -> None:
        if sampled.chosen_logprob is None:
            return
        assert sampled.top_ids is not None
        assert sampled.top_values is not None
        rows = self._rows_of(path).flatten()
        buffers, num, width = self._parts.buffers, rows.shape[0], sampled.top_ids.shape[1]
        buffers.chosen_logprobs[:num].copy_(sampled.chosen_logprob.index_select(0, rows))
        buffers.top_ids[:num, :width].copy_(sampled.top_ids.index_select(0, rows))
        buffers.top_logprobs[:num, :width].copy_(sampled.top_values.index_select(0, rows))

    def _rows_of(self, path: Tensor) -> Tensor:
        """[padded_reqs, n] rows of each request's own -> rows of the step."""
        first = torch.arange(path.shape[0], device=path.device) * self._view.max_extend_len
        return path + first.unsqueeze(1)

    def _compact(self, path: Tensor) -> None:
        """Bring the KV of the accepted path together; a chain's lies together."""
        if self._view.tree_mask is None:
            return
        shape = (self._view.padded_reqs, self._view.max_extend_len)
        for pool, group in zip(self._parts.pools, self._view.groups, strict=False):
            compact_kv(pool.tensors, group.out_cache_loc.view(shape), path)

    def _observe(self, output: Hidden, accepted: Accepted) -> None:
        """The drafter follows, over the rows in the order of the accepted path."""
        chain, taps = self._chain, taps_of(self._parts, output)
        has_tree = self._view.tree_mask is not None
        next_ids = torch.empty_like(chain.positions)
        tap_rows = torch.empty_like(chain.positions) if has_tree else None
        chain_rows(
            self._parts.table.token_ids,
            self._parts.table.kv_committed,
            StepRows(chain.row_ids, chain.req_ids, chain.positions),
            ChainRows(next_ids, tap_rows),
            path=accepted.path if has_tree else None,
        )
        if tap_rows is not None:
            taps = tuple(tap.index_select(0, tap_rows) for tap in taps)
            chain = replace(chain, input_ids=chain.input_ids.index_select(0, tap_rows))
        self._proposer.observe(
            Observed(view=chain, next_ids=next_ids, last=accepted.last, taps=taps)
        )
