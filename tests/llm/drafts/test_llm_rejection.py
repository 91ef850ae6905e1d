"""An engine that accepts by rejection: the same request, the same text, however rounds run."""

from dataclasses import replace

import pytest
from llm_cases import assert_idle, make_llm, random_prompts, recorded_steps, tokens_of
from speculative_cases import MODEL_DRAFTERS, PARAMS, Truth, llama_truth

from paceline.core.options.engine_options import REJECTION
from paceline.core.request.sampling_params import SamplingParams

LENGTHS = (20, 26, 5, 31)
SAMPLED = SamplingParams(temperature=0.8, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    return llama_truth(tmp_path_factory.mktemp("llama"), kinds=())


def seeded(params: SamplingParams) -> list[SamplingParams]:
    return [replace(params, seed=seed, max_tokens=40) for seed in range(len(LENGTHS))]


@pytest.mark.parametrize("drafter", MODEL_DRAFTERS)
def test_rounds_of_graphs_say_what_eager_ones_do(truth: Truth, drafter: str) -> None:
    texts = []
    options = truth.speculation(drafter) | {"speculative_acceptance": REJECTION}
    for eager in (True, False):
        with make_llm(truth.checkpoint, enforce_eager=eager, **options) as llm:
            outputs = llm.generate(random_prompts(LENGTHS), seeded(PARAMS["every-processor"]))
            assert_idle(llm)
        texts.append(tokens_of(outputs))
    assert texts[0] == texts[1]


def test_a_text_depends_neither_on_company_nor_on_overlap(truth: Truth) -> None:
    options = truth.speculation("EAGLE3") | {"speculative_acceptance": REJECTION}
    prompts, params = random_prompts(LENGTHS), seeded(SAMPLED)
    with make_llm(truth.checkpoint, **options) as llm:
        together = tokens_of(llm.generate(prompts, params))
        alone = [tokens_of(llm.generate([p], [q]))[0] for p, q in zip(prompts, params, strict=True)]
    with make_llm(truth.checkpoint, overlap=False, **options) as llm:
        assert tokens_of(llm.generate(prompts, params)) == together == alone


def test_greedy_text_and_that_of_requests_without_drafts_is_plain(truth: Truth) -> None:
    options = truth.speculation("EAGLE") | {"speculative_acceptance": REJECTION}
    prompts, params = random_prompts(LENGTHS), seeded(SAMPLED)
    params[1] = replace(params[1], temperature=0.0)
    params[2] = replace(params[2], speculative=False)
    with make_llm(truth.checkpoint) as llm:
        plain = tokens_of(llm.generate(prompts, params))
    with make_llm(truth.checkpoint, **options) as llm:
        drafted = tokens_of(llm.generate(prompts, params))
    assert [a == b for a, b in zip(plain, drafted, strict=True)] == [False, True, True, False]


def test_drafts_are_accepted_and_the_engine_says_by_which_rule(truth: Truth) -> None:
    options = truth.speculation("STANDALONE") | {"speculative_acceptance": REJECTION}
    with make_llm(truth.checkpoint, **options) as llm, recorded_steps(llm) as steps:
        outputs = llm.generate(random_prompts(LENGTHS), seeded(replace(SAMPLED, logprobs=2)))
        report = llm.report()
    assert any(step.is_round for step in steps)
    assert "rejection" in str(report), report
    for output in outputs:
        assert output.metrics is not None
        assert output.metrics.tokens_per_round is not None
        assert output.metrics.tokens_per_round > 2
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None
        assert len(logprobs) == 40
