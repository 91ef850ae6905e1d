"""NgramProposer: drafts what followed the request's last tokens where they occurred before."""

from paceline.core.draft_shape import DraftShape
from paceline.kernels.ngram_lookup import ngram_lookup
from paceline.runner.proposer import DraftTree, Proposer, RoundState


class NgramProposer(Proposer):
    """Prompt lookup in the history that the device has anyway; owns nothing, and any model has it.

    min_n, max_n: tokens of a match, at least and at most.
    """

    name = "NGRAM"

    def __init__(self, shape: DraftShape, *, min_n: int, max_n: int) -> None:
        self.shape = shape
        self._min_n = min_n
        self._max_n = max_n

    def propose(self, state: RoundState) -> DraftTree:
        """Copies from the history; a chain without a match repeats the root."""
        view = state.view
        drafts = ngram_lookup(
            state.token_ids,
            view.row_ids,
            view.prefix_lens + 1,
            shape=self.shape,
            min_n=self._min_n,
            max_n=self._max_n,
        )
        return DraftTree(drafts.tokens, drafts.parents)
