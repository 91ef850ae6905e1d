"""Rejection: whatever is drafted, what is said follows the law of plain sampling."""

import math
from dataclasses import dataclass, field

import pytest
import torch
from laws import SIGNIFICANCE, law_of, p_value, table_of
from torch import Tensor

from paceline.core.request.sampling_params import Asks, SamplerTier, SamplingParams
from paceline.kernels.edit_logits import NO_DRAFT
from paceline.layers.sampling import DrawnDrafts, SamplingTable, rejection, sample
from paceline.layers.sampling.noise import coins, draft_seeds, gumbel

VOCAB = 6
DRAFT_IDS = torch.tensor([0, 2, 3, 5])  # of a draft vocabulary
ROOT, PROMPT = 1, 4
DRAWS = 100_000
FEWER = 4_000  # where logits are edited, row by row

_generator = torch.Generator().manual_seed(0)
TARGET = torch.randn(VOCAB, VOCAB, generator=_generator) * 1.5  # logits by the token before
DRAFT = TARGET + torch.randn(VOCAB, VOCAB, generator=_generator) * 0.7

CASES = {
    "plain": SamplingParams(temperature=0.8),
    "hot": SamplingParams(temperature=1.7),
    "top_k": SamplingParams(temperature=0.8, top_k=3),
    "top_p": SamplingParams(temperature=1.0, top_p=0.8),
    "min_p": SamplingParams(temperature=1.0, min_p=0.1),
    "penalties": SamplingParams(
        presence_penalty=0.8, frequency_penalty=0.6, repetition_penalty=1.4
    ),
    "bias": SamplingParams(logit_bias={2: 1.5, 0: -100.0}, top_p=0.9),
}


@dataclass
class World:
    """Chains of two drafts of many requests with the same parameters."""

    params: SamplingParams
    ids: Tensor = field(default_factory=lambda: torch.arange(VOCAB))  # [draft vocab] of the drafter
    claimed: float = 1.0  # temperature of the q that is told, by that of the q drawn from
    draws: int = DRAWS
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(1))

    def table(self) -> SamplingTable:
        return table_of_rows([self.params])

    def draft(self, roots: Tensor) -> DrawnDrafts:
        tokens, laws = [roots], []
        for _ in range(2):
            logits = DRAFT[tokens[-1]][:, self.ids] / self.params.temperature
            drawn = torch.multinomial(logits.softmax(-1), 1, generator=self.generator)
            tokens.append(self.ids[drawn[:, 0]])
            laws.append((logits / self.claimed).softmax(-1))
        d2t = self.ids - torch.arange(len(self.ids))
        return DrawnDrafts(torch.stack(tokens[1:], 1), torch.stack(laws, 1), d2t)

    def verify(self, known: list[Tensor], drawn: DrawnDrafts) -> Tensor:
        """[draws, 3]: what is said behind the last of the `known` tokens and behind each draft."""
        nodes = torch.cat((known[-1].unsqueeze(1), drawn.tokens), dim=1)
        drafted = drawn.tokens.unsqueeze(1).repeat(1, 3, 1)
        for draft in range(2):
            drafted[:, : draft + 1, draft] = NO_DRAFT
        told = torch.stack(known, 1).unsqueeze(1).expand(-1, 3, -1)
        positions = torch.arange(self.draws).unsqueeze(1) * 8 + len(known) + torch.arange(3) + 8
        sampled = sample(
            TARGET[nodes.flatten()],
            rows=torch.ones(3 * self.draws, dtype=torch.int64),
            positions=positions.flatten(),
            table=self.table(),
            token_ids=torch.full((2, 1), PROMPT, dtype=torch.int32),
            tier=self.params.sampler_tier,
            top_logprobs=0,
            drafts=torch.cat((told, drafted), 2).flatten(0, 1),
            drawn=drawn,
        )
        return sampled.token_ids.view(self.draws, 3)

    def two_tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """(first, second, whether the first was the draft), of as many rounds as they take."""
        roots = torch.full((self.draws,), ROOT)
        drawn = self.draft(roots)
        said = self.verify([roots], drawn)
        first, kept = said[:, 0], said[:, 0] == drawn.tokens[:, 0]
        later = self.verify([roots, first], self.draft(first))[:, 0]
        return first, torch.where(kept, said[:, 1], later), kept

    def laws(self) -> tuple[Tensor, Tensor]:
        """([vocab] of the first token, [vocab, vocab] of the second behind each first)."""
        behind = [
            law_of(TARGET[token], self.params, [PROMPT, ROOT, token]) for token in range(VOCAB)
        ]
        return law_of(TARGET[ROOT], self.params, [PROMPT, ROOT]), torch.stack(behind)


def table_of_rows(rows: list[SamplingParams]) -> SamplingTable:
    table = SamplingTable(len(rows) + 1, torch.device("cpu"))
    for row, params in enumerate(rows, start=1):
        packed = table.pack(params, prompt_len=1, max_len=9, eos_token_ids=(), default_seed=row)
        for name, tensor in table.named_tensors().items():
            tensor[row] = torch.from_numpy(getattr(packed, name))
    return table


def p_of_two_tokens(world: World) -> float:
    """That of their joint law."""
    first, second, _ = world.two_tokens()
    law, behind = world.laws()
    joint = (law.unsqueeze(1) * behind).flatten()
    return p_value(table_of(first, second, VOCAB).view(1, -1), joint.unsqueeze(0))


@pytest.mark.parametrize("params", CASES.values(), ids=CASES)
def test_two_tokens_follow_the_joint_law_of_plain_sampling(params):
    has_edits = params.asks & ~(Asks.DRAW | Asks.FILTER)
    assert p_of_two_tokens(World(params, draws=FEWER if has_edits else DRAWS)) > SIGNIFICANCE


def test_a_draft_vocabulary_changes_no_law():
    assert p_of_two_tokens(World(CASES["top_p"], ids=DRAFT_IDS)) > SIGNIFICANCE


@pytest.mark.parametrize("was_kept", [True, False])
def test_the_second_token_follows_its_law_whatever_became_of_the_first_draft(was_kept):
    world = World(CASES["plain"])
    first, second, kept = world.two_tokens()
    here = kept == was_kept
    assert here.sum() > DRAWS // 10
    assert p_value(table_of(first[here], second[here], VOCAB), world.laws()[1]) > SIGNIFICANCE


def test_drafts_are_kept_as_often_as_the_laws_overlap():
    world = World(CASES["plain"])
    _, _, kept = world.two_tokens()
    q = (DRAFT[ROOT].double() / world.params.temperature).softmax(-1)
    overlap = float(torch.minimum(world.laws()[0], q).sum())
    spread = math.sqrt(overlap * (1 - overlap) / DRAWS)
    assert abs(float(kept.double().mean()) - overlap) < 4 * spread


def keep_by_probability(coins: Tensor, p: Tensor, q: Tensor) -> Tensor:
    return coins < p


def keep_a_little_more(coins: Tensor, p: Tensor, q: Tensor) -> Tensor:
    return coins * q * 0.9 < p


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("_is_kept", keep_by_probability),
        ("_is_kept", keep_a_little_more),
        ("_residual", lambda p, q: p),
        ("_residual", lambda p, q: (p - q).abs()),
    ],
    ids=["coin-below-p", "lossy-threshold", "residual-is-p", "residual-is-distance"],
)
def test_a_wrong_rule_is_told_by_the_law(name, wrong, monkeypatch):
    monkeypatch.setattr(rejection, name, wrong)
    assert p_of_two_tokens(World(CASES["plain"])) < SIGNIFICANCE


@pytest.mark.parametrize("claimed", [0.9, 1.1])
def test_a_q_of_another_temperature_is_told_by_the_law(claimed):
    assert p_of_two_tokens(World(CASES["plain"], claimed=claimed)) < SIGNIFICANCE


@pytest.mark.parametrize("no_probability", [0.0, math.nan])
def test_a_draft_that_was_drawn_from_nothing_changes_no_law(no_probability):
    world, best = World(CASES["top_k"]), int(TARGET[ROOT].argmax())
    drawn = DrawnDrafts(
        torch.full((DRAWS, 2), best), torch.full((DRAWS, 2, VOCAB), no_probability), None
    )
    said = world.verify([torch.full((DRAWS,), ROOT)], drawn)[:, 0]
    counts = torch.bincount(said, minlength=VOCAB).double()
    assert p_value(counts.unsqueeze(0), world.laws()[0].unsqueeze(0)) > SIGNIFICANCE


def test_a_drafter_with_the_law_of_the_target_is_always_kept():
    world = World(CASES["plain"], draws=FEWER)
    law = (TARGET / world.params.temperature).softmax(-1)
    first = torch.multinomial(law[[ROOT] * world.draws], 1, generator=world.generator)[:, 0]
    second = torch.multinomial(law[first], 1, generator=world.generator)[:, 0]
    drawn = DrawnDrafts(
        torch.stack((first, second), 1),
        torch.stack((law[[ROOT] * len(first)], law[first]), 1),
        None,
    )
    said = world.verify([torch.full((world.draws,), ROOT)], drawn)
    assert (said[:, :2] == drawn.tokens).all()


def test_where_rounding_leaves_no_residual_plain_sampling_speaks():
    generator = torch.Generator().manual_seed(4)
    law = torch.randn(60, VOCAB, generator=generator)
    noise = gumbel(torch.arange(60), torch.arange(60), VOCAB)
    plain = rejection.PlainRows(law + noise, law, noise, torch.ones(60), torch.ones(60) > 0)
    q = law.view(20, 3, VOCAB)[:, :-1].softmax(-1)
    said = rejection.reject(plain, DrawnDrafts(torch.zeros(20, 2, dtype=torch.int64), q, None))
    assert torch.equal(said, (law + noise).argmax(-1))


MIXED = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9),
    SamplingParams(temperature=0.9, speculative=False),
]


def mixed_rows(drawn: DrawnDrafts | None, **changes: object) -> object:
    """Three requests of three rows each: greedy, sampling, and sampling without drafts."""
    generator = torch.Generator().manual_seed(2)
    arguments = {
        "logits": torch.randn(9, VOCAB, generator=generator),
        "rows": torch.arange(1, 4).repeat_interleave(3),
        "positions": torch.arange(5, 8).repeat(3),
        "table": table_of_rows(MIXED),
        "token_ids": torch.zeros(4, 1, dtype=torch.int32),
        "tier": SamplerTier.BY_ROW,
        "top_logprobs": 2,
    } | changes
    return sample(arguments.pop("logits"), drawn=drawn, **arguments)


def never_kept(seed: int) -> DrawnDrafts:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (3, 2), generator=generator)
    return DrawnDrafts(tokens, torch.rand(3, 2, VOCAB, generator=generator), None)


@pytest.mark.parametrize("seed", range(20))
def test_greedy_requests_and_those_that_do_not_draft_say_what_they_say_alone(seed):
    plain, mixed = mixed_rows(None).token_ids, mixed_rows(never_kept(seed)).token_ids
    alone = torch.tensor([0, 1, 2, 5, 6, 7, 8])  # all but two rows with drafts behind them
    assert torch.equal(mixed[alone], plain[alone])


def test_log_probabilities_are_of_what_is_said_by_the_raw_distribution():
    drawn = never_kept(0)
    logits = torch.randn(9, VOCAB, generator=torch.Generator().manual_seed(5))
    sampled = mixed_rows(drawn, logits=logits)
    raw = logits.log_softmax(-1).gather(1, sampled.token_ids.unsqueeze(1))[:, 0]
    assert torch.equal(sampled.chosen_logprob, raw)


def test_a_row_that_is_not_finite_fails_alone():
    logits = torch.randn(9, VOCAB, generator=torch.Generator().manual_seed(5))
    drawn, broken = never_kept(0), logits.clone()
    broken[4, 2] = math.nan
    clean, sampled = mixed_rows(drawn, logits=logits), mixed_rows(drawn, logits=broken)
    others = torch.arange(9) != 4
    assert torch.equal(sampled.finite, others)
    assert torch.equal(sampled.token_ids[others], clean.token_ids[others])
    assert sampled.token_ids[4] == 0


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1])
def test_coins_and_the_noise_of_drafts_are_independent_of_the_noise_of_sampling(seed):
    seeds, positions = torch.full((50_000,), seed), torch.arange(50_000)
    toss = coins(seeds, positions).double()
    ranked = (torch.arange(50_000) + 0.5) / 50_000
    assert (toss.sort().values - ranked).abs().max() < 1.63 / math.sqrt(50_000)  # at 1 %
    plain = gumbel(seeds, positions, 2).T.double()
    drafts = gumbel(draft_seeds(seeds), positions, 2).T.double()
    found = torch.corrcoef(torch.stack((toss, *plain, *drafts)))
    assert (found - torch.eye(5)).abs().max() < 4.5 / math.sqrt(50_000)
