"""LLM.score: completions are as likely as transformers says, and nothing is sampled for them."""

import pytest
import torch
from llm_cases import (
    VOCAB,
    Checkpoint,
    assert_idle,
    make_checkpoint,
    make_llm,
    random_prompts,
    text_of,
)

from paceline.core.errors import RequestError
from paceline.core.modes import End
from paceline.core.request.sampling_params import SamplingParams
from paceline.llm.llm import LLM

TOLERANCE = 1e-4  # as of test_llm_parity
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def theirs(checkpoint: Checkpoint, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """[len(completion)] log-probabilities by transformers."""
    ids = [*prompt, *completion]
    rows = checkpoint.logits(ids[:-1]).log_softmax(-1)[len(prompt) - 1 :]
    return rows.gather(1, torch.tensor(completion)[:, None])[:, 0]


@pytest.fixture
def pairs() -> tuple[list[list[int]], list[list[int]]]:
    return random_prompts([1, 20, 9, 33, 20]), random_prompts([3, 1, 14, 30, 7], seed=1)


@pytest.mark.parametrize(
    "options", [{}, {"chunked_prefill_size": 5}, {"enable_prefix_cache": False, "sanitize": True}]
)
def test_scores_are_those_of_transformers(checkpoint: Checkpoint, pairs, options) -> None:
    with make_llm(checkpoint, page_size=4, **options) as llm:
        for _ in range(2):  # the second time behind prefix hits
            scores = llm.score(*pairs)
            for score, prompt, completion in zip(scores, *pairs, strict=True):
                wanted = theirs(checkpoint, prompt, completion)
                assert score.token_ids == tuple(completion)
                assert torch.allclose(torch.tensor(score.logprobs), wanted, atol=TOLERANCE)
                assert abs(score.logprob - wanted.sum().item()) < TOLERANCE * len(completion)
        assert_idle(llm)


def test_a_prompt_is_found_in_the_cache_and_only_what_is_scored_computed(
    checkpoint: Checkpoint,
) -> None:
    [prompt] = random_prompts([40])
    with make_llm(checkpoint, page_size=4) as llm:
        llm.score([prompt], [[5]])
        stats = llm.engine.scheduler.cache.stats()
        llm.score([prompt, prompt], [[6], [7, 8]])
        found = llm.engine.scheduler.cache.stats().hit_tokens - stats.hit_tokens
    assert found == 2 * 36  # the logits of the 40th token are needed, and pages are whole


def test_texts_are_joined_and_then_encoded(checkpoint: Checkpoint, pairs) -> None:
    texts = [[text_of(ids) for ids in each] for each in pairs]
    with make_llm(checkpoint) as llm:
        assert llm.score(*texts) == llm.score(*pairs)


def test_scores_beside_answers_change_neither(checkpoint: Checkpoint, pairs) -> None:
    """One step has rows of both ends."""
    prompts, completions = pairs
    with make_llm(checkpoint, sanitize=True) as llm:
        alone = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]
        wanted = llm.score(prompts, completions)
        trackers = llm.submit(prompts, GREEDY)
        llm.engine.step()
        scores = llm.score(prompts, completions)
        while any(not tracker.is_finished for tracker in trackers):
            llm.engine.step()
    assert [tracker.snapshot().outputs[0].token_ids for tracker in trackers] == alone
    for score, other in zip(scores, wanted, strict=True):
        assert score.token_ids == other.token_ids
        assert score.logprob == pytest.approx(other.logprob, abs=TOLERANCE)


def test_nothing_is_sampled_for_a_score(checkpoint: Checkpoint, pairs, monkeypatch) -> None:
    ends: list[frozenset[End]] = []
    with make_llm(checkpoint) as llm:
        launch = llm.engine._runner.launch
        monkeypatch.setattr(
            llm.engine._runner, "launch", lambda step: (ends.append(step.ends), launch(step))[1]
        )
        llm.score(*pairs)
    assert set(ends) == {frozenset({End.SCORE})}


def test_a_scored_request_may_fill_the_context(checkpoint: Checkpoint) -> None:
    [ids] = random_prompts([128])
    with make_llm(checkpoint) as llm:
        [score] = llm.score([ids[:100]], [ids[100:]])
        assert len(score.logprobs) == 28
        with pytest.raises(RequestError, match=r"prompt must be 1 to 128 tokens \(context 128\)"):
            llm.score([ids], [[5]])


@pytest.mark.parametrize(
    ("prompts", "completions", "text"),
    [
        ([[4]], [[5], [6]], "completions must be one for each of 1 prompts, got 2; see LLM.score"),
        (
            [[4]],
            ["ab"],
            "a prompt and its completion must be both texts or both token ids, got one",
        ),
        ([[]], [[5]], "a prompt and its completion must be at least one token each, got no prompt"),
        ([[5]], [[]], "a prompt and its completion must be at least one token each, got no compl"),
        ([[5]], [[VOCAB]], f"prompt token id 1 must be an integer from 0 to {VOCAB - 1}, got"),
    ],
)
def test_what_cannot_be_scored_is_refused(
    checkpoint: Checkpoint, prompts: object, completions: object, text: str
) -> None:
    with make_llm(checkpoint) as llm, pytest.raises(RequestError) as caught:
        llm.score(prompts, completions)
    assert str(caught.value).startswith(text)


def test_a_score_that_is_not_finite_is_an_error(tmp_path, pairs) -> None:
    broken = make_checkpoint(
        "llama-gqa2-untied",
        tmp_path,
        change=lambda model: model.lm_head.weight[7].fill_(float("nan")),
    )
    with make_llm(broken) as llm:
        with pytest.raises(RequestError, match="score of the hidden states of request"):
            llm.score(*pairs)
        assert_idle(llm)


def test_an_engine_that_drafts_scores_and_pools_alike() -> None:
    """The drafter follows prompts that end without a token, too."""
    prompt, completion = "def fibonacci(n):\n    if n", " < 2:\n        return n"
    found = []
    for algorithm in ("off", "auto"):
        options = {"speculative_algorithm": algorithm}
        with LLM("bundled", dtype="float32", threads=1, pooling="mean", page_size=4, max_num_seqs=2,
                 max_model_len=128, **options) as llm:  # fmt: skip
            [score] = llm.score([prompt], [completion])
            [vector] = llm.embed([prompt + completion])
            [answer] = llm.generate([prompt + completion], GREEDY)
            found.append((score.logprobs, vector.vector.tolist(), answer.outputs[0].token_ids))
    plain, drafted = found
    assert plain[2] == drafted[2]
    assert plain[0] == pytest.approx(drafted[0], abs=TOLERANCE)
    assert plain[1] == pytest.approx(drafted[1], abs=1e-5)
