"""How drafts are chosen, on scripted logits: whose noise, at which place, in how many passes."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from paceline.core.draft_shape import DraftShape
from paceline.core.request.sampling_params import SamplerTier, SamplingParams
from paceline.kernels.ngram_lookup import ngram_lookup
from paceline.layers.sampling import SamplingTable, draft_seeds, gumbel
from paceline.runner.proposer import RoundState
from paceline.speculate.drafting import DraftRun, propose
from paceline.speculate.ngram.proposer import NgramProposer

VOCAB = 40
PREFIX = (6, 11)
ROWS = (1, 2)
CHAIN = DraftShape(num_steps=3, topk=1, num_draft_tokens=4)


@dataclass
class FlatRun(DraftRun):
    """A drafter without an opinion: what is drafted is the noise's choice."""

    d2t = None
    slope: float = 0.0  # of the logits, by token id
    num_passes: int = 0
    given: list[Tensor] = field(default_factory=list)

    def first_logits(self) -> Tensor:
        return self._logits(len(ROWS))

    def next_logits(self, tokens: Tensor, origin: Tensor) -> Tensor:
        self.num_passes += 1
        self.given.append(tokens.clone())
        return self._logits(tokens.numel())

    def _logits(self, rows: int) -> Tensor:
        return (torch.arange(VOCAB) * self.slope).expand(rows, VOCAB).clone()


def make_state(
    params: list[SamplingParams], shape: DraftShape, *, draws: bool = False
) -> RoundState:
    table = SamplingTable(3, torch.device("cpu"))
    for row, wanted in zip(ROWS, params, strict=True):
        packed = table.pack(wanted, prompt_len=1, max_len=60, eos_token_ids=(), default_seed=0)
        table.floats[row] = torch.from_numpy(packed.floats)
        table.ints[row] = torch.from_numpy(packed.ints)
    tokens = torch.zeros(len(ROWS), shape.num_draft_tokens, dtype=torch.int64)
    tokens[:, 0] = torch.tensor([3, 4])
    view = SimpleNamespace(
        row_ids=torch.tensor(ROWS),
        prefix_lens=torch.tensor(PREFIX, dtype=torch.int32),
        input_ids=tokens.flatten(),
        positions=torch.zeros(tokens.numel(), dtype=torch.int64),
        padded_reqs=len(ROWS),
    )
    tier = max(wanted.sampler_tier for wanted in params)
    return RoundState(
        view=view, token_ids=torch.zeros(3, 64).int(), sampling=table, sampler=tier, draws=draws
    )


SEEDS = torch.tensor([5, 9])
SAMPLED = [SamplingParams(seed=int(seed)) for seed in SEEDS]


def chosen_by(seeds: Tensor, ahead: int) -> list[int]:
    """What noise alone chooses for the token `ahead` places behind the prefix."""
    positions = torch.tensor(PREFIX) + ahead
    return gumbel(seeds, positions, VOCAB).argmax(-1).tolist()


def test_a_chain_takes_the_noise_that_the_sampler_will_take() -> None:
    """The root stands at the prefix; what follows it is the first draft."""
    run = FlatRun()
    tree = propose(run, make_state(SAMPLED, CHAIN), CHAIN)
    assert tree.tokens[:, 0].tolist() == [3, 4]
    for depth in (1, 2, 3):
        assert tree.tokens[:, depth].tolist() == chosen_by(SEEDS, depth)
    assert tree.q is None


def test_a_chain_runs_no_pass_behind_its_last_draft() -> None:
    run = FlatRun()
    tree = propose(run, make_state(SAMPLED, CHAIN), CHAIN)
    assert run.num_passes == CHAIN.num_steps - 1
    fed = torch.cat(run.given, dim=1)
    assert torch.equal(fed, tree.tokens[:, 1:3])


def test_every_depth_of_a_tree_takes_its_own_noise() -> None:
    """Children of all nodes of a depth are the same two tokens here: the noise's favourites."""
    shape = DraftShape(num_steps=3, topk=2, num_draft_tokens=11)  # every candidate
    tree = propose(FlatRun(), make_state(SAMPLED, shape), shape)
    for request, seed in enumerate(SEEDS):
        depths = {0: 0}
        for row, parent in enumerate(tree.parents[request].tolist()):
            if row:
                depths[row] = depths[parent] + 1
        for depth in (1, 2, 3):
            tokens = {int(tree.tokens[request, row]) for row, at in depths.items() if at == depth}
            noise = gumbel(seed[None], torch.tensor([PREFIX[request] + depth]), VOCAB)[0]
            assert tokens == set(noise.topk(2).indices.tolist())


def test_drafts_for_rejection_are_drawn_with_noise_of_their_own() -> None:
    tree = propose(FlatRun(), make_state(SAMPLED, CHAIN, draws=True), CHAIN)
    for depth in (1, 2, 3):
        assert tree.tokens[:, depth].tolist() == chosen_by(draft_seeds(SEEDS), depth)
        assert tree.tokens[:, depth].tolist() != chosen_by(SEEDS, depth)


def test_q_is_what_a_draft_was_drawn_from() -> None:
    params = [SamplingParams(seed=5, temperature=0.5), SamplingParams(seed=9, temperature=2.0)]
    tree = propose(FlatRun(slope=0.1), make_state(params, CHAIN, draws=True), CHAIN)
    for request, temperature in enumerate((0.5, 2.0)):
        law = (torch.arange(VOCAB) * 0.1 / temperature).softmax(-1)
        torch.testing.assert_close(tree.q[request], law.expand(3, VOCAB))


@pytest.mark.parametrize("draws", [False, True])
def test_a_greedy_request_among_others_drafts_the_likeliest(draws: bool) -> None:
    params = [SamplingParams(seed=5), SamplingParams(temperature=0.0, seed=9)]
    state = make_state(params, CHAIN, draws=draws)
    assert state.sampler is SamplerTier.BY_ROW
    tree = propose(FlatRun(slope=1e-3), state, CHAIN)
    assert tree.tokens[1, 1:].tolist() == [VOCAB - 1] * 3
    assert tree.tokens[0, 1:].tolist() != [VOCAB - 1] * 3


def test_a_lookup_begins_with_the_newest_token() -> None:
    """[7 8 9 7 8]: with the last token known, 9 7 8 follows; without, 8 9 7 does."""
    shape = DraftShape(num_steps=3, topk=1, num_draft_tokens=4)
    history = torch.zeros(3, 16, dtype=torch.int32)
    history[1:, :5] = torch.tensor([7, 8, 9, 7, 8])
    view = SimpleNamespace(row_ids=torch.tensor(ROWS), prefix_lens=torch.tensor([4, 4]).int())
    state = RoundState(
        view=view,
        token_ids=history,
        sampling=SamplingTable(3, torch.device("cpu")),
        sampler=SamplerTier.GREEDY,
    )
    tree = NgramProposer(shape, min_n=1, max_n=2).propose(state)
    assert tree.tokens.tolist() == [[8, 9, 7, 8]] * 2
    direct = ngram_lookup(
        history, view.row_ids, view.prefix_lens + 1, shape=shape, min_n=1, max_n=2
    )
    assert torch.equal(tree.tokens, direct.tokens)
