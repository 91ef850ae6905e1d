"""How drafts are chosen from a drafter's logits: down a chain, or a tree of the likeliest nodes.

The tree is EAGLE-2's (Li et al. 2024): every node of the frontier brings its topk best children;
the topk best of them by cumulative log-probability are the next frontier, and of all that were seen
the best num_draft_tokens - 1 are verified.

For sample and match, drafts take the noise of the sampler: what it would choose.  For rejection,
they are drawn with noise of their own, and say from which distribution.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from paceline.core.draft_shape import DraftShape
from paceline.core.request.sampling_params import SamplerTier
from paceline.kernels.draft_topk import TopDrafts, draft_topk
from paceline.kernels.grow_tree import Candidates, grow_tree, select_tree
from paceline.layers.sampling import draft_seeds
from paceline.runner.proposer import DraftTree, RoundState


class DraftRun(ABC):
    """A drafter within one round: logits behind the root, then behind what was chosen."""

    d2t: Tensor | None  # [draft vocab]  int64  token id = draft id + d2t; None: they are equal

    @abstractmethod
    def first_logits(self) -> Tensor:
        """Behind the roots: [padded_reqs, draft vocab]."""

    @abstractmethod
    def next_logits(self, tokens: Tensor, origin: Tensor) -> Tensor:
        """Behind the nodes of the next depth: [padded_reqs * topk, draft vocab].

        tokens: [padded_reqs, topk] int64; origin: [padded_reqs, topk] int64, of which node of the
        depth before each is a child; at depth 1, and down a chain: 0.
        """


def propose(run: DraftRun, state: RoundState, shape: DraftShape) -> DraftTree:
    """Draft for every request of a round."""
    roots = state.view.input_ids.view(state.view.padded_reqs, -1)[:, 0]
    return _chain(run, state, roots, shape) if shape.is_chain else _tree(run, state, roots, shape)


def _chain(run: DraftRun, state: RoundState, roots: Tensor, shape: DraftShape) -> DraftTree:
    logits = run.first_logits()
    tokens, laws = [roots], list[Tensor]()
    origin = torch.zeros_like(roots).unsqueeze(1)
    draws = state.draws and state.sampler is not SamplerTier.GREEDY
    for depth in range(1, shape.num_steps + 1):
        if draws:
            drafts, law = _draw_from(logits, state, depth, run.d2t)
            laws.append(law)
        else:
            drafts = _best(logits, 1, state, depth, run.d2t)
        tokens.append(drafts.tokens[:, 0])
        if depth < shape.num_steps:
            logits = run.next_logits(drafts.tokens, origin)
    q = torch.stack(laws, dim=1) if draws else None
    return DraftTree(torch.stack(tokens, dim=1), None, q, run.d2t)


def _tree(run: DraftRun, state: RoundState, roots: Tensor, shape: DraftShape) -> DraftTree:
    candidates = Candidates.empty(roots.shape[0], shape, roots.device)
    drafts = _best(run.first_logits(), shape.topk, state, 1, run.d2t)
    frontier = grow_tree(drafts, None, candidates, step=0)
    for step in range(1, shape.num_steps):
        logits = run.next_logits(frontier.tokens, frontier.origin)
        drafts = _best(logits, shape.topk, state, step + 1, run.d2t)
        frontier = grow_tree(drafts, frontier, candidates, step=step)
    return DraftTree(*select_tree(candidates, roots, shape.num_draft_tokens))


def _best(logits: Tensor, k: int, state: RoundState, depth: int, d2t: Tensor | None) -> TopDrafts:
    """The k best drafts of that depth behind each row; rows of a request follow one another."""
    view, sampling = state.view, state.sampling
    if state.sampler is SamplerTier.GREEDY:  # nothing of the rows is read
        return draft_topk(
            logits,
            k,
            temperature=sampling.temperature,
            seeds=sampling.seed,
            positions=view.positions,
            d2t=d2t,
            noise=False,
        )
    width = logits.shape[0] // view.padded_reqs
    rows = view.row_ids.repeat_interleave(width) if width > 1 else view.row_ids
    prefix = view.prefix_lens.repeat_interleave(width) if width > 1 else view.prefix_lens
    return draft_topk(
        logits,
        k,
        temperature=sampling.temperature[rows],
        seeds=sampling.seed[rows],
        positions=prefix.long() + depth,
        d2t=d2t,
        noise=True,
    )


def _draw_from(
    logits: Tensor, state: RoundState, depth: int, d2t: Tensor | None
) -> tuple[TopDrafts, Tensor]:
    """A draft of that depth for each request, and q: [padded_reqs, draft vocab] float32.

    q = softmax(logits / temperature), all NaN if a logit is; greedy requests take the best draft.
    """
    view, sampling = state.view, state.sampling
    temperature = sampling.temperature[view.row_ids]
    is_greedy = temperature == 0
    logits = logits.float()
    scaled = logits - logits.amax(-1, keepdim=True)
    scaled = scaled / temperature.masked_fill(is_greedy, 1.0).unsqueeze(1)
    drafts = draft_topk(
        scaled,
        1,
        temperature=(~is_greedy).float(),
        seeds=draft_seeds(sampling.seed[view.row_ids]),
        positions=view.prefix_lens.long() + depth,
        d2t=d2t,
        noise=True,
    )
    return drafts, scaled.softmax(-1)
