"""The proposer's contract: what the runner asks of whoever drafts.

A round is one recorded function: derive, propose, verify, accept, commit, observe.  `propose`
writes a tree of drafts for every request; the target computes all of its rows in one pass, and
samples at each what plain decoding would; `observe` is told what any step of the target computed,
prompt chunks included, so that the drafter's own cache follows.  Both are device-only, of static
shapes and recordable: no host reads, nothing kept between calls but in `named_tensors`.

Worked example: one request, 7 tokens committed, history [.. a]: `a`, at position 7, is the root,
the newest sampled token, which has no KV yet.

    tree       tokens [a b c d], parents [-1 0 0 1]     b and c follow a, d follows b
    verify     rows at slots of 7, 8, 9, 10, positions 7, 8, 8, 9
    sampled    after a: c, after b: x, after c: y, after d: z
    accept     a -> c: path [0, 2], emitted c y         c's KV moves from slot 9 to slot 8
    commit     history [.. a c y], 9 tokens committed, the next root is y, at position 9
    observe    rows in the order of a chain: positions 7, 8, 9, 10; the first two are accepted, and
               the token behind each is in the history: c, y.  last = row 1
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from paceline.attention.contract import AttentionBackend
from paceline.cache.pool import KVPool
from paceline.core.draft_shape import NO_DRAFTS, DraftShape
from paceline.core.errors import KernelArgumentError
from paceline.core.request.sampling_params import SamplerTier
from paceline.core.step import Step
from paceline.kernels.derive_rope import RopeRows
from paceline.kernels.step_view import StepView
from paceline.layers.sampling import SamplingTable


class DraftTree(NamedTuple):
    """Drafts of every request.  Siblings differ in token; a row's parent is an earlier row."""

    tokens: Tensor  # [padded_reqs, num_draft_tokens]  int64  column 0: the root
    parents: Tensor | None  # [padded_reqs, num_draft_tokens]  int32  row of the same request; -1:
    # the root, and rows that hang nowhere and are never accepted.  None: a chain
    q: Tensor | None = None  # [padded_reqs, num_steps, draft vocab]  float32  of a chain: what each
    # draft was drawn from, independently of the noise of sampling; NaN: unknown
    d2t: Tensor | None = None  # [draft vocab]  int64  of q: token id = draft id + d2t; None: equal


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoundState:
    """What a proposer may read before verification."""

    view: StepView  # the round's rows as a causal chain; prefix_lens: tokens committed
    token_ids: Tensor  # [table rows, max_tokens]  int32  prefix_lens + 1 tokens are known
    sampling: SamplingTable
    sampler: SamplerTier  # GREEDY: no row draws noise
    rope: RopeRows | None = None  # of the table; None: rows turn by their positions
    draws: bool = False  # drafts of requests that sample are drawn, and the tree says from which q


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Observed:
    """What a step of the target computed, after its commit."""

    view: StepView  # the step's rows, of each request in the order of its tokens: a causal chain
    next_ids: Tensor  # [padded_tokens]  int64  the token behind each row: the prompt's, or sampled;
    # behind the last accepted row the newest token
    last: Tensor  # [padded_reqs]  int64  row of the step: the last accepted of each request
    taps: tuple[Tensor, ...]  # of [padded_tokens, hidden], in the order of `Proposer.taps`


class Proposer(ABC):
    """Drafts for every request of an engine; NOBODY proposes none.

    Its cache groups stand behind the target's in every tuple of groups; their KV covers as many
    tokens as the target's: kv_committed of the request table holds for both.  The defaults are
    those of one that computes nothing.
    """

    name: str
    shape: DraftShape
    pools: tuple[KVPool, ...] = ()  # [num_draft_groups] of its cache groups
    backend: AttentionBackend | None = None  # what runs its layers; None: none attends
    taps: tuple[str, ...] = ()  # hidden states of the target that `observe` wants
    model: nn.Module | None = None  # what it computes with; None: nothing is learnt
    observes: bool = False  # True: steps end with `observe`, else with their commit

    @abstractmethod
    def propose(self, state: RoundState) -> DraftTree:
        """A tree for every request of the round, padded rows included."""

    def observe(self, observed: Observed) -> None:
        """Take in what the target computed; rows behind the last accepted one hold anything."""
        return None

    def host_plan(self, step: Step) -> None:
        """Let the attention backend of the draft passes plan on the host, before the step runs.

        `step` as for AttentionBackend.host_plan.  Nothing to do unless the backend plans so.
        """
        return None

    def named_tensors(self) -> dict[str, Tensor]:
        """Everything whose address a graph may hold, by name, KV pools excepted."""
        return self.request_state()

    def request_state(self) -> dict[str, Tensor]:
        """Of these what is kept per request besides KV, [table rows, ...] floats each, by name."""
        return {}


class Nobody(Proposer):
    """Proposes nothing: a round of its is a decode step."""

    name = "nobody"
    shape = NO_DRAFTS

    def propose(self, state: RoundState) -> DraftTree:
        """The roots alone."""
        return DraftTree(state.view.input_ids.unsqueeze(1), None)


NOBODY = Nobody()


def require_tree(tree: DraftTree, proposer: Proposer, *, padded_reqs: int) -> None:
    """Refuse what a proposer may not return, by its form alone: what is drafted, the device knows.

    Raises KernelArgumentError.
    """
    shape = (padded_reqs, proposer.shape.num_draft_tokens)
    wanted = {
        "tokens": (torch.int64, shape),
        "parents": None if proposer.shape.is_chain else (torch.int32, shape),
    }
    for name, form in wanted.items():
        got: object = getattr(tree, name, tree)
        if form != ((got.dtype, got.shape) if isinstance(got, Tensor) else got):
            raise KernelArgumentError.about(
                f"{name} of the drafts by {proposer.name}",
                expected="None, of a chain"
                if form is None
                else f"{form[0]} {list(shape)}, of each padded request its root and drafts",
                got=f"{got.dtype} {list(got.shape)}" if isinstance(got, Tensor) else got,
                remedy="return what Proposer.propose promises",
            )
