"""FeatureProposer: a head drafts from the target's hidden states.

The head reads, at position p, the token at p + 1 and a feature of p: the target's, or where the
target has not been yet, the head's own output one position before.  What the head made of the last
accepted position is kept per request: the first drafts of a round follow from it.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.core.draft_shape import DraftShape
from paceline.core.step import Step
from paceline.kernels.grow_tree import pass_parents
from paceline.layers.attention import StepContext
from paceline.runner.proposer import DraftTree, Observed, Proposer, RoundState
from paceline.speculate.build import DraftPlacement, draft_cache, draft_passes
from paceline.speculate.draft_cache import DraftCache
from paceline.speculate.draft_passes import OBSERVE_PASS, DraftPasses
from paceline.speculate.drafter import Drafter
from paceline.speculate.drafting import DraftRun, propose


class FeatureHead(nn.Module):
    """What continues the target's hidden states.  All calls are device-only and recordable.

    Position p takes the token behind it, t[p + 1], and the target's feature at p, or, where the
    target has not been yet, the head's own feature of the position before.  Its result there is the
    feature that belongs to p + 1, and logits for t[p + 2].
    """

    hidden_size: int  # width of a feature
    d2t: Tensor | None  # [draft vocab]  int64  target id = draft id + d2t[draft id]; None: the same

    @abstractmethod
    def fuse(self, taps: Sequence[Tensor]) -> Tensor:
        """The target's hidden states, of the drafter's taps in their order, as features.

        taps: [num_taps] of [tokens, target hidden].  Returns [tokens, hidden].
        """

    @abstractmethod
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        features: Tensor,
        ctx: StepContext,
        read: Tensor | None = None,
    ) -> Tensor:
        """One pass over rows; mutates none of them.

        input_ids, positions: [tokens] int64, the token behind each position and the position;
        features: [tokens, hidden]; read: [rows] int64, the tokens whose result is read, None: all.
        Returns [rows, hidden]: what the next position takes as its feature, and `logits` for the
        token after it.
        """

    @abstractmethod
    def logits(self, features: Tensor) -> Tensor:
        """features [rows, hidden], as `forward` returned them -> [rows, draft vocab]."""


class FeatureProposer(Proposer):
    """Owns the recurrent feature of every request: [table rows, hidden]."""

    observes = True
    model: FeatureHead

    def __init__(
        self,
        name: str,
        shape: DraftShape,
        head: FeatureHead,
        *,
        taps: tuple[str, ...],
        cache: DraftCache,
        passes: DraftPasses,
        table_rows: int,
    ) -> None:
        self.name = name
        self.shape = shape
        self.taps = taps
        self.pools, self.backend = cache.pools, cache.backend
        self.model = head
        self._cache = cache
        self._passes = passes
        self._features = torch.zeros(
            table_rows, head.hidden_size, dtype=cache.dtype, device=cache.device
        )

    def propose(self, state: RoundState) -> DraftTree:
        """First drafts from the kept feature, then num_steps - 1 passes of the head."""
        run = _FeatureRun(self.model, self._passes, state, self._features, self.shape)
        return propose(run, state, self.shape)

    def observe(self, observed: Observed) -> None:
        """Run the head over what the target computed, and keep its last output of each request."""
        view = self._cache.own_view(observed.view)
        context = self._cache.context(view, OBSERVE_PASS)
        fused = self.model.fuse(observed.taps)
        kept = self.model(observed.next_ids, view.rope_positions, fused, context, observed.last)
        self._features.index_copy_(0, view.row_ids, kept)

    def host_plan(self, step: Step) -> None:
        """Every pass of the step."""
        self._passes.host_plan(step)

    def named_tensors(self) -> dict[str, Tensor]:
        """Features, the passes' rows and the attention backend's buffers, by name."""
        held = {**self._passes.named_tensors(), **self._cache.named_tensors()}
        return {**self.request_state(), **held}

    def request_state(self) -> dict[str, Tensor]:
        """The feature of each request."""
        return {"draft.features": self._features}


class _FeatureRun(DraftRun):
    """One round: what the passes so far were given, and their last output."""

    def __init__(
        self,
        head: FeatureHead,
        passes: DraftPasses,
        state: RoundState,
        features: Tensor,  # [table rows, hidden]
        shape: DraftShape,
    ) -> None:
        self.d2t = head.d2t
        self._head = head
        self._passes = passes
        self._step, self._rope = state.view, state.rope
        self._shape = shape
        self._last = features.index_select(0, state.view.row_ids).unsqueeze(1)  # [reqs, 1, hidden]
        self._pass_id = OBSERVE_PASS
        self._tokens: Tensor | None = None  # [reqs, rows]  int64  of a tree's last pass
        self._features: Tensor | None = None  # [reqs, rows, hidden]
        self._parents: Tensor | None = None  # [reqs, rows]  int32

    def first_logits(self) -> Tensor:
        return self._head.logits(self._last.flatten(0, 1))

    def next_logits(self, tokens: Tensor, origin: Tensor) -> Tensor:
        self._pass_id += 1
        if self._shape.is_chain:
            fed = self._last
        else:
            fed = self._last.gather(1, origin.unsqueeze(2).expand(-1, -1, self._last.shape[2]))
            tokens, fed = self._append(tokens, fed, origin)
        view, ctx = self._passes.begin(
            self._step, self._pass_id, tokens, parents=self._parents, rope=self._rope
        )
        out = self._head(view.input_ids, view.rope_positions, fed.flatten(0, 1), ctx)
        self._last = out.view(fed.shape)[:, -self._shape.topk :]
        return self._head.logits(self._last.flatten(0, 1))

    def _append(self, tokens: Tensor, fed: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of a tree's next pass: those of the pass before, and the new nodes."""
        before = self._parents
        if before is None:
            before = origin.new_empty(origin.shape[0], 0, dtype=torch.int32)
        self._parents = pass_parents(before, origin)
        if self._tokens is not None and self._features is not None:
            tokens = torch.cat((self._tokens, tokens), dim=1)
            fed = torch.cat((self._features, fed), dim=1)
        self._tokens, self._features = tokens, fed
        return tokens, fed


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureDrafter(Drafter):
    """A drafter whose module is a FeatureHead."""

    def proposer(self, module: FeatureHead, place: DraftPlacement) -> FeatureProposer:
        assert self.model is not None, self
        sinks = (None,) * self.model.num_layers
        cache = draft_cache(self.model, self.pass_rows, place, sinks=sinks)
        return FeatureProposer(
            self.algorithm,
            self.shape,
            module,
            taps=self.taps,
            cache=cache,
            passes=draft_passes(cache, self.shape, self.pass_rows, place),
            table_rows=place.limits.max_running + 1,
        )
