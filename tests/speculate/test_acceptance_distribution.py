"""Texts follow the law of plain decoding by either rule of acceptance, and by no wrong one."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from laws import SIGNIFICANCE, law_of, p_value, table_of
from markov import DRAFT, DRAFT_IDS, TARGET, VOCAB, Said, speak

from paceline.core.request.sampling_params import SamplingParams
from paceline.kernels.draft_topk import draft_topk
from paceline.layers.sampling import rejection, sample
from paceline.runner import program
from paceline.runner.commit import commit
from paceline.runner.recording.recorded import RecordedGraph
from paceline.speculate import drafting

LENGTH, REQUESTS = 100, 512
SAMPLED = SamplingParams(temperature=0.8, max_tokens=None, ignore_eos=True)
CASES = {
    "plain": SAMPLED,
    "cold": replace(SAMPLED, temperature=0.4),
    "top_k": replace(SAMPLED, top_k=3),
    "top_p": replace(SAMPLED, temperature=1.0, top_p=0.85),
}
RULES = pytest.mark.parametrize("rejects", [False, True], ids=["sample-and-match", "rejection"])


def seeded(params: SamplingParams, num: int = REQUESTS) -> list[SamplingParams]:
    return [replace(params, seed=seed) for seed in range(num)]


def p_of(said: Said, params: SamplingParams) -> float:
    """That each token follows its law behind the token before."""
    law = torch.stack([law_of(logits, params) for logits in TARGET])
    return p_value(table_of(*said.pairs(), VOCAB), law)


@RULES
@pytest.mark.parametrize("params", CASES.values(), ids=CASES)
def test_texts_follow_the_law_of_plain_decoding(params, rejects):
    said = speak(seeded(params), length=LENGTH, rejects=rejects)
    assert said.tokens_per_round() > 2
    assert p_of(said, params) > SIGNIFICANCE


@RULES
def test_a_draft_vocabulary_changes_no_law(rejects):
    said = speak(seeded(SAMPLED), length=LENGTH, rejects=rejects, ids=DRAFT_IDS)
    assert said.tokens_per_round() > 1.3
    assert p_of(said, SAMPLED) > SIGNIFICANCE


def test_a_drafter_that_computes_nan_changes_no_law():
    draft = DRAFT.clone()
    draft[2, 3] = draft[4, 0] = math.nan
    said = speak(seeded(SAMPLED), length=LENGTH, rejects=True, draft=draft)
    assert p_of(said, SAMPLED) > SIGNIFICANCE


def test_a_recorded_round_says_what_an_eager_one_does(monkeypatch):
    params = [*seeded(SAMPLED, 20), replace(SAMPLED, temperature=0.0)]
    replayed: list[RecordedGraph] = []
    replay = RecordedGraph.replay
    monkeypatch.setattr(
        RecordedGraph, "replay", lambda graph: (replayed.append(graph), replay(graph))
    )
    eager = speak(params, length=60, rejects=True)
    assert not replayed
    assert speak(params, length=60, rejects=True, capture=True) == eager
    assert len(replayed) > 10


def test_greedy_requests_and_those_that_do_not_draft_say_what_they_say_alone():
    greedy, off = replace(SAMPLED, temperature=0.0), replace(SAMPLED, speculative=False, seed=5)
    params = [*seeded(SAMPLED, 4), greedy, off]
    plain, mixed = (speak(params, length=60, rejects=rejects) for rejects in (False, True))
    assert mixed.texts[4:] == plain.texts[4:]
    assert mixed.rounds[4:] == plain.rounds[4:]
    assert [mixed.texts[n] == plain.texts[n] for n in range(4)] == [False] * 4
    greedy_text = torch.tensor(mixed.texts[4])
    assert torch.equal(TARGET.argmax(-1)[greedy_text[:-1]], greedy_text[1:])


def test_rejection_accepts_more_than_matching_drafts_of_other_noise(monkeypatch):
    rejected = speak(seeded(SAMPLED), length=LENGTH, rejects=True)

    def other_noise(*args: object, seeds: torch.Tensor, **rest: object) -> object:
        return draft_topk(*args, seeds=seeds + 2**40, **rest)

    monkeypatch.setattr(drafting, "draft_topk", other_noise)
    matched = speak(seeded(SAMPLED), length=LENGTH, rejects=False)
    assert rejected.tokens_per_round() > 1.2 * matched.tokens_per_round()


def of_frozen_positions(logits, *, positions, **rest):
    """Every row of a request takes the noise of its root's."""
    roots = positions.view(REQUESTS, -1)[:, :1]
    return sample(
        logits, positions=roots.expand(-1, positions.numel() // REQUESTS).flatten(), **rest
    )


def keep_likely_drafts(buffers, table, view, sampled, drafts=None, **rest):
    """Take a draft where it is the target's best, whatever was sampled."""
    if drafts is not None:
        token_ids = sampled.token_ids.view(drafts.tokens.shape)
        best = TARGET.argmax(-1)[drafts.tokens[:, :-1]]
        likely = torch.where(best == drafts.tokens[:, 1:], best, token_ids[:, :-1])
        sampled = replace(sampled, token_ids=torch.cat((likely, token_ids[:, -1:]), dim=1))
    return commit(buffers, table, view, sampled, drafts, **rest)


WRONG: dict[str, tuple[bool, object, str, Callable]] = {
    "match-at-frozen-positions": (False, program, "sample", of_frozen_positions),
    "match-or-likely": (False, program, "commit", keep_likely_drafts),
    "reject-or-likely": (True, program, "commit", keep_likely_drafts),
    "coin-below-p": (True, rejection, "_is_kept", lambda coins, p, q: coins < p),
    "residual-is-p": (True, rejection, "_residual", lambda p, q: p),
    "drafts-of-the-noise-of-sampling": (True, drafting, "draft_seeds", lambda seeds: seeds),
}


@pytest.mark.parametrize(("rejects", "module", "name", "wrong"), WRONG.values(), ids=WRONG)
def test_a_wrong_rule_is_told_by_the_law(rejects, module, name, wrong, monkeypatch):
    monkeypatch.setattr(module, name, wrong)
    said = speak(seeded(SAMPLED), length=LENGTH, rejects=rejects)
    assert p_of(said, SAMPLED) < SIGNIFICANCE
