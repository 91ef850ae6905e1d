"""Scripted rounds: a proposer that drafts what a case says."""

from collections.abc import Sequence

import torch

from paceline.core.draft_shape import DraftShape
from paceline.proof.suite.case import Batch, Case
from paceline.proof.suite.trees import depths
from paceline.runner.proposer import NOBODY, DraftTree, Proposer, RoundState

_MOST_BRANCHES = 16


class Scripted(Proposer):
    """Drafts the rows of a batch, whatever the requests' histories.  The script is the host's, and
    stands between steps: no buffer of a step.

    tokens: [max_reqs, num_draft_tokens]  int64
    parents: [max_reqs, num_draft_tokens]  int32  -1: the root, and all of a padded row's
    """

    name = "scripted"

    def __init__(self, case: Case, device: torch.device) -> None:
        num, trees = case.max_extend_len, [b.parents for b in case.batches if b.parents is not None]
        deepest = max((max(depths(tree)) for each in trees for tree in each), default=num - 1)
        branches = min(_MOST_BRANCHES, num - 1) if trees else 1
        self.shape = DraftShape(num_steps=deepest, topk=branches, num_draft_tokens=num)
        self._has_trees = bool(trees)
        size = (max(case.captured_reqs, *(b.num_reqs for b in case.batches)), num)
        self.tokens = torch.zeros(size, dtype=torch.int64, device=device)
        self.parents = torch.zeros(size, dtype=torch.int32, device=device)

    def script(self, batch: Batch, ids: Sequence[Sequence[int]]) -> None:
        """What the next round drafts.  ids: [num_reqs] of each request."""
        self.tokens.zero_()
        self.parents.fill_(-1)
        for request, prefix in enumerate(batch.prefix_lens):
            if request not in batch.frozen:
                self.tokens[request].copy_(torch.tensor(ids[request][prefix:]))
            if batch.parents is not None:
                self.parents[request].copy_(torch.tensor(batch.parents[request]))

    def propose(self, state: RoundState) -> DraftTree:
        reqs = state.view.padded_reqs
        return DraftTree(self.tokens[:reqs], self.parents[:reqs] if self._has_trees else None)


def proposer_of(case: Case, device: torch.device) -> Proposer:
    """NOBODY where no step of the case is a round."""
    return NOBODY if case.batches[0].accepted is None else Scripted(case, device)
