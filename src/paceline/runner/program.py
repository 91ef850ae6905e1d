"""StepProgram: the functions of a step of one padded size, a round of speculation or any other.

derive, in a round propose, forward, sample, commit, observe.  Eager steps call them, graphs record
them.  There is no second copy.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline.attention.contract import AttentionBackend, LayerCache
from paceline.attention.expanded import expanded_plan
from paceline.attention.held import tensors_in
from paceline.attention.ragged.contract import RaggedBackend
from paceline.attention.ragged.own import OWN
from paceline.cache.pool import KVPool, StatePool
from paceline.core.expansion import Expansion, expansion_of
from paceline.core.modes import GENERATES, POOLS, End, Pooling
from paceline.core.request.sampling_params import MAX_LOGPROBS, SamplerTier
from paceline.core.step import PromptSpan, Step
from paceline.kernels.chain_rows import ChainRows, StepRows, chain_rows
from paceline.kernels.commit import Accepted, Drafts
from paceline.kernels.derive_rope import derive_rope
from paceline.kernels.derive_tree import derive_tree
from paceline.kernels.pool_rows import pool_rows
from paceline.kernels.step_view import StepView
from paceline.layers.attention import StepContext
from paceline.layers.embedding import OverlaidRows
from paceline.layers.sampling import DrawnDrafts, Sampled, SampledLogprobs, sample, unsampled
from paceline.models.causal_lm import CausalLM
from paceline.models.decoder import Hidden
from paceline.runner.buffers import StepBuffers
from paceline.runner.commit import commit
from paceline.runner.committers import Committer, StateMixer
from paceline.runner.derive import derive
from paceline.runner.draft_paths import (
    force_drafts,
    given_most,
    given_tree,
    node_drafts,
    node_histories,
)
from paceline.runner.encoder import EncoderRunner
from paceline.runner.prompt_logprobs import prompt_logprobs
from paceline.runner.proposer import (
    NOBODY,
    DraftTree,
    Observed,
    Proposer,
    RoundState,
    require_tree,
)
from paceline.runner.table.request_table import RequestTable


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """The device-side parts every step of an engine works on."""

    model: CausalLM
    backend: AttentionBackend
    backend_buffers: Any
    layers: tuple[LayerCache | None, ...]  # [num_layers] of the target
    pools: tuple[KVPool, ...]  # [target's groups of tokens]; behind them stand its STATE and
    # ENCODER groups, and the drafter's groups
    committers: tuple[Committer, ...]  # of the target's groups of tokens, and of states
    page_sizes: tuple[int, ...]  # [num_groups] tokens; 0: its rows are not the step's tokens
    table: RequestTable
    buffers: StepBuffers
    taps: tuple[str, ...]
    proposer: Proposer = NOBODY
    mixers: tuple[StateMixer, ...] = ()  # [num_state_groups]
    encoder: EncoderRunner | None = None  # its ENCODER groups, which stand behind those of states
    force_accept_len: float | None = None  # tokens per round, whatever was sampled
    rejects: bool = False  # accept drafts by rejection sampling
    generates: bool = True  # False: the model has no head
    pooling: Pooling | None = None  # of requests that end in a vector; None: none may
    shares_prefixes: bool = False  # where a step says so, what many rows share is read once
    latent_expand_from: int = 0  # prompt tokens of a request from which latents are expanded, where
    # a step is no graph; 0: never
    ragged: RaggedBackend = OWN  # who attends to what is expanded
    ragged_buffers: Any = None

    @property
    def usual_ends(self) -> frozenset[End]:
        """Of the steps that most requests are in."""
        return GENERATES if self.generates else POOLS

    @property
    def all_pools(self) -> tuple[KVPool, ...]:
        """[groups of tokens] the drafter's behind the target's."""
        return (*self.pools, *self.proposer.pools)

    @property
    def device_pools(self) -> tuple[KVPool | StatePool, ...]:
        """Those of states and encoders, too."""
        encoders = () if self.encoder is None else self.encoder.pools
        return (*self.all_pools, *(mixer.pool for mixer in self.mixers), *encoders)

    def max_emitted(self, *, is_round: bool) -> int:
        """Tokens that a row of a step emits at most."""
        return self.proposer.shape.max_path if is_round else 1

    def expansion(self, step: Step) -> Expansion | None:
        """What of a step that is no graph is expanded from latents."""
        rows = self.buffers.input_ids.shape[0]  # as many of prefixes at a time as a step brings
        return expansion_of(step, least=self.latent_expand_from, most_rows=rows)

    def chain(self, view: StepView) -> StepView:
        """The rows of a round as a causal chain, for derive and for who observes."""
        return self.buffers.as_chain(view)

    def named_tensors(self) -> dict[str, Tensor]:
        """The tensors of table, step, backend and drafter by name: all but weights and pools."""
        return {
            **self.table.named_tensors(),
            **self.buffers.named_tensors(),
            **tensors_in("backend", self.backend_buffers),
            **tensors_in("ragged", self.ragged_buffers),
            **tensors_in("encoder", self.encoder and self.encoder.backend_buffers),
            **{
                name: tensor
                for mixer in self.mixers
                for name, tensor in tensors_in(mixer.pool.spec.name, mixer.buffers).items()
            },
            **self.proposer.named_tensors(),
        }


def target_view(parts: Parts, view: StepView) -> StepView:
    """`view` with the target's groups of tokens alone: what its attention backend plans from."""
    return view.of(view.groups[: len(parts.pools)])


def target_forward(
    parts: Parts,
    view: StepView,
    *,
    is_round: bool = False,
    expansion: Expansion | None = None,
    taps: tuple[str, ...] = (),
    read: Tensor | None = None,
) -> Hidden:
    """Plan and run the target over the rows of `view`.

    expansion: of those that are expanded from latents, which the backend does not see; taps, read:
    as of `CausalLM`.
    """
    own = target_view(parts, view)
    ctx = StepContext(
        view=own,
        backend=parts.backend,
        plan=_backend_plan(parts, own, expansion),
        layers=parts.layers,
        states=tuple([mixer.plan(view, is_round=is_round) for mixer in parts.mixers]),
        encoder=None if parts.encoder is None else parts.encoder.plan(view),
        expanded=None
        if expansion is None
        else expanded_plan(own, expansion, parts.ragged, parts.ragged_buffers),
    )
    overlaid = None
    if view.overlay_slot is not None:
        assert parts.table.overlay is not None, "a step that reads an overlay has one"
        overlaid = OverlaidRows(parts.table.overlay.rows, view.overlay_slot)
    output: Hidden = parts.model(view.input_ids, view.rope_positions, ctx, taps, overlaid, read)
    return output


def _backend_plan(parts: Parts, own: StepView, expansion: Expansion | None) -> Any:
    """Of the rows that the backend serves; None where there are none."""
    if expansion is not None:
        if not expansion.first_row:
            return None
        own = own.leading(
            expansion.first_row,
            expansion.first_token,
            max_extend_len=expansion.longest_before,
        )
    return parts.backend.plan(own, parts.backend_buffers)


def taps_of(parts: Parts, output: Hidden) -> tuple[Tensor, ...]:
    """The hidden states that were asked for, in that order."""
    return tuple(output.taps[name] for name in parts.taps)


class StepProgram:
    """Steps of one padded size with one sampler tier; results stay on fixed addresses.

    A round drafts before the target computes: its rows are a root and drafts of every request, all
    of them sampled, and commit takes the path that was sampled.  Any other step samples behind the
    last row of each request.  runner/proposer.py has a worked example of a round.

    Its ends are those of its requests: where none generates, nothing is sampled and no row emits;
    where one pools, a vector of each request is made, too.
    """

    def __init__(
        self,
        parts: Parts,
        view: StepView,
        *,
        sampler: SamplerTier,
        logprobs: bool,
        is_round: bool = False,
        prompt_spans: tuple[PromptSpan, ...] = (),
        observed: bool = True,
        masked: bool = False,
        ends: frozenset[End] = GENERATES,
        expansion: Expansion | None = None,
    ) -> None:
        """observed: a drafter that observes follows.  masked: rows may have masks.  expansion: of
        the target's layers of latents."""
        self._parts = parts
        self._view = view
        self._rows = parts.chain(view) if is_round else view  # what derive fills
        self._sampler = sampler
        self._top_logprobs = MAX_LOGPROBS if logprobs else 0
        self._is_round = is_round
        self._prompt_spans = prompt_spans
        self._observed = observed and parts.proposer.observes
        # [padded_reqs]  int32  of a round, what commit says it emitted
        self._num_kept = self._emitted() if is_round else view.extend_lens
        self._masked = masked
        self._ends = ends
        # [padded_reqs] int64: the last row of each request; None: every row is sampled
        self._sampled = None if is_round or view.max_extend_len == 1 else view.logits_loc
        self._reads_all = bool(prompt_spans) or End.POOL in ends
        self._expansion = expansion
        self.prompt_logprobs: SampledLogprobs | None = None  # [num_scored]  after forward
        # [sampled rows, vocab]  after forward; the head's dtype.  None: nothing is sampled
        self.logits: Tensor | None = None

    def run(self) -> None:
        """The step's segments in order; none needs the host before the next."""
        parts = self._parts
        derive(parts.buffers, parts.table, self._rows, parts.page_sizes)
        tree = self._propose() if self._is_round else None
        output = target_forward(
            parts,
            self._view,
            is_round=self._is_round,
            expansion=self._expansion,
            taps=parts.taps if self._observed else (),
            read=None if self._reads_all else self._sampled,
        )
        self._score(output.hidden)
        accepted = self._commit(self._sample(tree), tree)
        path = None if accepted is None else accepted.path
        for committer in parts.committers:
            committer.commit(self._view, path, self._num_kept)
        if self._observed:
            self._observe(taps_of(parts, output), accepted)

    def _emitted(self) -> Tensor:
        """[padded_reqs] int32, once commit has run: tokens that each request emitted."""
        parts, reqs = self._parts, self._view.padded_reqs
        return parts.buffers.results_of(reqs, parts.max_emitted(is_round=self._is_round))[:, 0]

    def _propose(self) -> DraftTree:
        """Make a proposer's drafts the rows of the step."""
        parts, view = self._parts, self._view
        tree = parts.proposer.propose(
            RoundState(
                view=self._rows,
                token_ids=parts.table.token_ids,
                rope=parts.table.rope,
                sampling=parts.table.sampling,
                sampler=self._sampler,
                draws=parts.rejects,
            )
        )
        require_tree(tree, parts.proposer, padded_reqs=view.padded_reqs)
        if self._masked:
            tree = given_tree(tree, parts.buffers.given(view))
        view.input_ids.view(tree.tokens.shape).copy_(tree.tokens)
        if view.tree_mask is not None:
            assert tree.parents is not None, "see require_tree"
            parents = parts.buffers.parents[: view.padded_tokens]
            parents.view(tree.parents.shape).copy_(tree.parents)
            derive_tree(parents, view)
            derive_rope(parts.table.rope, view)
        return tree

    def _score(self, hidden: Tensor) -> None:
        """What the step's ends are made of: logits of each row that is sampled; of the prompt's
        tokens, where asked for; vectors.

        hidden: [padded_tokens, hidden] where such an end reads all, else [sampled rows, hidden].
        """
        parts, view = self._parts, self._view
        if self._prompt_spans:
            assert parts.model.head is not None, "admission refuses what the model has no end for"
            self.prompt_logprobs = prompt_logprobs(
                hidden,
                self._prompt_spans,
                view=view,
                token_ids=parts.table.token_ids,
                vocab_size=parts.model.head.vocab_size,
                logits_of=parts.model.logits,
            )
        if End.POOL in self._ends:
            assert parts.pooling is not None, "admission refuses what the model has no end for"
            self._pool(hidden, parts.pooling, parts.buffers.pooled[: view.padded_reqs])
        if End.GENERATE not in self._ends:
            return
        if self._reads_all and self._sampled is not None:
            hidden = hidden.index_select(0, self._sampled)
        self.logits = parts.model.logits(hidden)

    def _pool(self, hidden: Tensor, pooling: Pooling, pooled: Tensor) -> None:
        """pooled: [padded_reqs, pooled_width] float32, which is mutated."""
        head, starts = self._parts.model.pooled_head, self._view.cu_seqlens_q
        if head is None:
            pool_rows(hidden, starts, pooling, pooled)
            return
        rows = pooled.new_empty(pooled.shape[0], hidden.shape[1])
        pool_rows(hidden, starts, pooling, rows)
        pooled.copy_(head(rows))

    def _sample(self, tree: DraftTree | None) -> Sampled:
        """Of a round: what plain decoding would sample behind each row, or the draft kept."""
        table, view, tier = self._parts.table, self._view, self._sampler
        if self.logits is None:
            return unsampled(view.padded_reqs, view.row_ids)
        rows, positions = view.row_ids, view.kv_lens
        drafts = histories = None
        if tree is not None:
            rows, positions = rows.index_select(0, view.req_ids), view.positions + 1
            if tier is not SamplerTier.GREEDY:
                drafts = node_drafts(view)
            if tier is SamplerTier.PLUG_INS:
                histories = node_histories(table.token_ids, rows, view)
        return sample(
            self.logits,
            rows=rows,
            positions=positions,
            table=table.sampling,
            token_ids=table.token_ids,
            tier=tier,
            top_logprobs=self._top_logprobs,
            drafts=drafts,
            histories=histories,
            drawn=None if tree is None else self._drawn(tree),
            masks=self._parts.buffers.masks(self.logits.shape[0]) if self._masked else None,
        )

    def _drawn(self, tree: DraftTree) -> DrawnDrafts | None:
        """What rejection compares; None: drafts count where they are sampled again."""
        if not self._parts.rejects or self._sampler is SamplerTier.GREEDY:
            return None
        assert tree.q is not None, "the proposer draws no drafts"
        return DrawnDrafts(tree.tokens[:, 1:], tree.q, tree.d2t)

    def _commit(self, sampled: Sampled, tree: DraftTree | None) -> Accepted | None:
        """Commit what was sampled, of a round the path that agrees."""
        parts, view = self._parts, self._view
        if tree is None:
            return commit(parts.buffers, parts.table, view, sampled)
        max_path = parts.max_emitted(is_round=True)
        drafts = Drafts(tree.tokens, tree.parents, parts.table.sampling.max_drafts)
        if self._masked:
            drafts = given_most(drafts, parts.buffers.given(view), view)
        if parts.force_accept_len is not None:
            drafts, token_ids = force_drafts(
                drafts, sampled.token_ids, view, length=parts.force_accept_len, max_path=max_path
            )
            sampled = replace(sampled, token_ids=token_ids)
        accepted = commit(parts.buffers, parts.table, view, sampled, drafts, max_path=max_path)
        assert accepted is not None, "a round accepts something of its drafts"
        return accepted

    def _observe(self, taps: tuple[Tensor, ...], accepted: Accepted | None) -> None:
        """The drafter follows, over the rows in the order of their tokens."""
        parts, rows = self._parts, self._rows
        path = None if accepted is None or self._view.tree_mask is None else accepted.path
        next_ids = torch.empty_like(rows.positions)
        tap_rows = None if path is None else torch.empty_like(rows.positions)
        chain_rows(
            parts.table.token_ids,
            parts.table.kv_committed,
            StepRows(rows.row_ids, rows.req_ids, rows.positions),
            ChainRows(next_ids, tap_rows),
            path=path,
        )
        if tap_rows is not None:
            taps = tuple(tap.index_select(0, tap_rows) for tap in taps)
            rows = replace(rows, input_ids=rows.input_ids.index_select(0, tap_rows))
        last = rows.logits_loc if accepted is None else accepted.last
        parts.proposer.observe(Observed(view=rows, next_ids=next_ids, last=last, taps=taps))
