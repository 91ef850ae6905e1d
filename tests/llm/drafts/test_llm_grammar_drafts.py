"""Beside a drafter: who has a grammar takes what is forced, and what drafters told that it allows;
its text is that of plain decoding, and the others draft on."""

from dataclasses import replace
from typing import Any

import pytest
from grammar_turns import Turns
from llm_cases import assert_idle, make_llm, random_prompts, tokens_of
from speculative_cases import Truth, llama_truth

from paceline.core.request.sampling_params import SamplingParams

# Two tokens without a choice, three places that take almost all, and two that take few.
FREE = range(2, 158)
TURNS = Turns([range(10, 20), (7,), (40,), FREE, FREE, FREE, range(40, 90, 7)], length=26)
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=30, ignore_eos=True, seed=4)
PROMPTS = random_prompts((20, 9, 14))


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    return llama_truth(tmp_path_factory.mktemp("llama"), kinds=())


@pytest.mark.parametrize(
    ("drafter", "topk", "options"),
    [
        ("EAGLE3", 4, {"enforce_eager": True}),
        ("STANDALONE", 2, {"overlap": False}),
        pytest.param("EAGLE", 1, {}, marks=pytest.mark.slow),
        pytest.param("NGRAM", 1, {"overlap": False}, marks=pytest.mark.slow),
        ("NGRAM", 2, {}),
        pytest.param("STANDALONE", 2, {}, marks=pytest.mark.slow),
        ("EAGLE", 1, {"speculative_acceptance": "rejection"}),
    ],
)
def test_others_draft_and_say_what_they_say_alone(
    truth: Truth, drafter: str, topk: int, options: dict[str, Any]
) -> None:
    wanted = [GREEDY, replace(GREEDY, logprobs=2), DRAWN]
    if options.get("speculative_acceptance"):  # what is drawn differs, and does not beside others
        wanted[1] = DRAWN
    grammars = [None, TURNS, None]
    with make_llm(truth.checkpoint) as plain:
        bound = plain.generate(PROMPTS, wanted, grammar=grammars)
    drafts = truth.speculation(drafter, topk) | options
    with make_llm(truth.checkpoint, sanitize=True, **drafts) as llm:
        free = llm.generate(PROMPTS, wanted)
        outputs = llm.generate(PROMPTS, wanted, grammar=grammars)
        alone = llm.generate(PROMPTS[1:2], wanted[1], grammar=TURNS)
        assert_idle(llm)
    assert tokens_of(outputs)[::2] == tokens_of(free)[::2]
    assert tokens_of(outputs)[1] == tokens_of(bound)[1] == tokens_of(alone)[0]
    for output in (outputs[1], alone[0]):
        metrics = output.metrics
        accepted = sum(metrics.accepted_by_position)
        assert metrics.fallbacks == ("grammar",)
        assert sum(output.outputs[0].is_drafted) == accepted >= metrics.forced_tokens >= 6
        if drafter == "STANDALONE":  # it guesses well behind texts that no model says, too
            assert accepted > metrics.forced_tokens
    assert outputs[0].metrics.forced_tokens == 0
    assert outputs[0].metrics.rounds > 0
    assert outputs[0].metrics.fallbacks == ()
