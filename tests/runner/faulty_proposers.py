"""Drafters with one fault each, of the kind that touches dead bytes; an EAGLE head does the rest.

A drafter's fault cannot change the text, but for another root: each shows in its drafts, or in what
it keeps, alone.
"""

import torch
from tiny_drafters import MakeProposer
from tiny_runner import VOCAB
from torch import Tensor

from paceline.core.step import Step
from paceline.runner.proposer import DraftTree, Observed, Proposer, RoundState
from paceline.speculate.feature_proposer import FeatureProposer

OUTSIDE = 8  # a row of nobody's in the step


class WrappedProposer(Proposer):
    """Right: `extra` adds nothing to the drafts."""

    def __init__(self, inner: FeatureProposer) -> None:
        self.name, self.shape = inner.name, inner.shape
        self.pools, self.taps, self.model = inner.pools, inner.taps, inner.model
        self.observes, self.backend = inner.observes, inner.backend
        self.inner = inner
        self.features = inner.request_state()["draft.features"]

    def propose(self, state: RoundState) -> DraftTree:
        extra = self.extra(state)
        tree = self.inner.propose(state)
        if extra is None:
            return tree
        tree.tokens[:, 1:].add_(extra).remainder_(VOCAB)
        return tree

    def extra(self, state: RoundState) -> Tensor | None:
        return None

    def observe(self, observed: Observed) -> None:
        self.inner.observe(observed)

    def host_plan(self, step: Step) -> None:
        self.inner.host_plan(step)

    def named_tensors(self) -> dict[str, Tensor]:
        return self.inner.named_tensors()

    def request_state(self) -> dict[str, Tensor]:
        return self.inner.request_state()


class ReadsUnknownToken(WrappedProposer):
    """Drafts from the token behind the root."""

    def extra(self, state: RoundState) -> Tensor:
        behind = (state.view.prefix_lens + 1).long()
        return state.token_ids[state.view.row_ids, behind].unsqueeze(1)


class ReadsOthersFeature(WrappedProposer):
    """Drafts from the feature of a request that is not in the round."""

    def extra(self, state: RoundState) -> Tensor:
        return (self.features[OUTSIDE] == 0).all().long()


class WritesOthersFeature(WrappedProposer):
    """Writes one."""

    def observe(self, observed: Observed) -> None:
        self.inner.observe(observed)
        self.features[OUTSIDE].fill_(1.0)


class SaysAnotherRoot(WrappedProposer):
    """Puts its own token where the newest one stands, which alone changes the text."""

    def propose(self, state: RoundState) -> DraftTree:
        tree = super().propose(state)
        tree.tokens[:, 0].add_(1).remainder_(VOCAB)
        return tree


class ForgetsToObserve(WrappedProposer):
    """Keeps the feature of the step before."""

    def observe(self, observed: Observed) -> None:
        before = self.features.clone()
        self.inner.observe(observed)
        self.features.copy_(before)


class ReadsStaleRows(WrappedProposer):
    """Drafts from what the passes of the round before left."""

    def extra(self, state: RoundState) -> Tensor:
        return self.inner.named_tensors()["draft.input_ids"][:1].clone()


class ReadsDrafts(WrappedProposer):
    """Drafts from a slot of its cache that the round has not written yet."""

    def extra(self, state: RoundState) -> Tensor:
        view, pool = state.view, self.pools[0]
        slots = view.groups[-1].out_cache_loc.view(view.padded_reqs, -1)[:, -1:]
        values = pool.layer(0).parts["v"].flatten(0, 1).index_select(0, slots.flatten())
        return values.isnan().any(2).any(1).long().unsqueeze(1)


class HasHiddenState(WrappedProposer):
    """Counts its rounds where nobody looks."""

    def __init__(self, inner: FeatureProposer) -> None:
        super().__init__(inner)
        self._calls = torch.zeros(1, dtype=torch.int64)

    def extra(self, state: RoundState) -> Tensor:
        self._calls.add_(1)
        return self._calls


def wrapped(make: MakeProposer, fault: type[WrappedProposer]) -> MakeProposer:
    """`make`'s EAGLE head with a fault."""
    return lambda limits: fault(make(limits))
