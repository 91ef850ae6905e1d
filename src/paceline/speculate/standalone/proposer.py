"""StandaloneProposer: a small language model of the same tokens drafts, with a cache of its own.

It reads, at position p, the token at p, and nothing of the target.  A round's first pass runs over
the root; what of the drafts was accepted is computed again when it is observed, so that its cache
ends where the target's does.
"""

import torch
from torch import Tensor

from paceline.core.draft_shape import DraftShape
from paceline.core.step import Step
from paceline.kernels.grow_tree import pass_parents
from paceline.models.causal_lm import CausalLM
from paceline.runner.proposer import DraftTree, Observed, Proposer, RoundState
from paceline.speculate.draft_cache import DraftCache
from paceline.speculate.draft_passes import OBSERVE_PASS, DraftPasses
from paceline.speculate.drafting import DraftRun, propose


class StandaloneProposer(Proposer):
    """Keeps nothing per request but KV."""

    name = "STANDALONE"
    observes = True
    model: CausalLM

    def __init__(
        self, shape: DraftShape, model: CausalLM, *, cache: DraftCache, passes: DraftPasses
    ) -> None:
        self.shape = shape
        self.pools, self.backend = cache.pools, cache.backend
        self.model = model
        self._cache = cache
        self._passes = passes

    def propose(self, state: RoundState) -> DraftTree:
        """num_steps passes, the first over the roots."""
        run = _StandaloneRun(self.model, self._passes, state, self.shape)
        return propose(run, state, self.shape)

    def observe(self, observed: Observed) -> None:
        """Write the KV of what the target computed."""
        view = self._cache.own_view(observed.view)
        context = self._cache.context(view, OBSERVE_PASS)
        self.model(view.input_ids, view.rope_positions, context, read=observed.last)

    def host_plan(self, step: Step) -> None:
        """Every pass of the step."""
        self._passes.host_plan(step)

    def named_tensors(self) -> dict[str, Tensor]:
        """The passes' rows and the attention backend's buffers, by name."""
        return {**self._passes.named_tensors(), **self._cache.named_tensors()}


class _StandaloneRun(DraftRun):
    """One round: the rows of the pass before; a tree's passes all begin with the root."""

    d2t = None

    def __init__(
        self, model: CausalLM, passes: DraftPasses, state: RoundState, shape: DraftShape
    ) -> None:
        self._model = model
        self._passes = passes
        self._step, self._rope = state.view, state.rope
        self._shape = shape
        self._pass_id = OBSERVE_PASS
        # [reqs, rows]  int64  of the last pass
        self._tokens = state.view.input_ids.view(state.view.padded_reqs, -1)[:, :1]
        # [reqs, rows]  int32  of a tree
        self._parents = torch.full_like(self._tokens, -1, dtype=torch.int32)

    def first_logits(self) -> Tensor:
        return self._forward(self._tokens, 1)

    def next_logits(self, tokens: Tensor, origin: Tensor) -> Tensor:
        if self._shape.is_chain:
            return self._forward(tokens, 1)
        self._parents = pass_parents(self._parents, origin)
        self._tokens = torch.cat((self._tokens, tokens), dim=1)
        return self._forward(self._tokens, self._shape.topk)

    def _forward(self, tokens: Tensor, wanted: int) -> Tensor:
        """[reqs * wanted, vocab] logits of the last `wanted` rows of each request."""
        self._pass_id += 1
        parents = None if self._shape.is_chain else self._parents
        view, ctx = self._passes.begin(
            self._step, self._pass_id, tokens, parents=parents, rope=self._rope
        )
        hidden = self._model(view.input_ids, view.rope_positions, ctx).hidden
        last = hidden.view(*tokens.shape, -1)[:, tokens.shape[1] - wanted :]
        return self._model.logits(last.flatten(0, 1))
