"""longrope: the context limit decides for every position at once: short factors or long ones."""

from pathlib import Path

import pytest
import torch
import transformers
from llm_cases import (
    Checkpoint,
    assert_same_or_tie,
    make_llm,
    random_prompts,
    save_tokenizer,
    tiny_checkpoints,
    tokens_of,
)

from paceline.core.request.sampling_params import SamplingParams
from paceline.engine.answers.outputs import RequestOutput
from paceline.llm.llm import LLM

TRAINED, CONTEXT = 48, 128
TOP = 20
TOLERANCE = 1e-4  # natural log units
ALL_LONG = {"short_factor": tiny_checkpoints.LONGROPE["long_factor"]}


def save(folder: Path, **rope: object) -> Checkpoint:
    """A Phi-3 with a trained context of 48 and a limit of 128; the same weights in every call."""
    settings = tiny_checkpoints.longrope(TRAINED, CONTEXT, **rope)
    config = transformers.Phi3Config(**settings)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    theirs = transformers.Phi3ForCausalLM(config).eval().requires_grad_(False)
    theirs.generation_config.eos_token_id = [2, 3]
    theirs.save_pretrained(folder)
    save_tokenizer(folder)
    return Checkpoint(folder, theirs)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return save(tmp_path_factory.mktemp("longrope"))


@pytest.fixture(scope="module")
def all_long(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The same weights where transformers knows the long factors only."""
    return save(tmp_path_factory.mktemp("all-long"), **ALL_LONG)


def greedy(llm: LLM, prompts: list[list[int]], num_tokens: int) -> list[RequestOutput]:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=TOP)
    return llm.generate(prompts, params)


def assert_answers(output: RequestOutput, theirs: Checkpoint) -> None:
    """Greedy tokens and their log-probabilities equal those of `theirs`."""
    prompt, completion = list(output.prompt_token_ids), output.outputs[0]
    wanted = theirs.generate(prompt, len(completion.token_ids))
    assert_same_or_tie(completion.token_ids, wanted, theirs.gap(prompt))
    ids = [*prompt, *completion.token_ids[:-1]]
    rows = theirs.logits(ids)[len(prompt) - 1 :].log_softmax(-1)
    top = torch.tensor([row.top_values for row in completion.logprobs])
    assert (top - rows.topk(TOP).values).abs().max() < TOLERANCE


def event_reasons(llm: LLM) -> set[str]:
    return {event["reason"] for event in llm.report()["events"]}


def test_unasked_the_context_is_the_trained_one_and_answers_are_those_of_transformers(
    checkpoint: Checkpoint,
) -> None:
    with make_llm(checkpoint, page_size=4) as llm:
        option = llm.report()["options"]["max_model_len"]
        outputs = greedy(llm, random_prompts((20, 9), seed=5), TRAINED - 20)
        assert "rope_long_factors" not in event_reasons(llm)
    assert option["value"] == TRAINED
    assert "trained context; a longer one, up to 128, changes every answer" in option["origin"]
    for output in outputs:
        assert_answers(output, checkpoint)


def test_prompts_beyond_the_trained_context_are_answered_as_by_transformers(
    checkpoint: Checkpoint,
) -> None:
    """Fresh, and again behind a prefix hit."""
    with make_llm(checkpoint, page_size=4, max_model_len=CONTEXT) as llm:
        prompts = random_prompts((TRAINED + 1, 60), seed=6)
        outputs = greedy(llm, prompts, 40)
        outputs += greedy(llm, prompts[1:], 40)
        assert "rope_long_factors" in event_reasons(llm)
    assert outputs[-1].metrics.cached_tokens == 56
    for output in outputs:
        assert_answers(output, checkpoint)


def test_a_long_context_answers_short_prompts_with_the_long_factors_too(
    checkpoint: Checkpoint, all_long: Checkpoint
) -> None:
    """Within the trained context, and across its end, where transformers would start again."""
    with make_llm(checkpoint, page_size=4, max_model_len=TRAINED + 1) as llm:
        within = greedy(llm, random_prompts((20,), seed=7), 20)
    with make_llm(checkpoint, page_size=4, max_model_len=CONTEXT) as llm:
        across = greedy(llm, random_prompts((40,), seed=8), 30)
    for output in [*within, *across]:
        assert_answers(output, all_long)


def test_both_sets_of_factors_give_other_answers(
    checkpoint: Checkpoint, all_long: Checkpoint
) -> None:
    """So that the tests above can tell them apart."""
    prompts = random_prompts((20, 9), seed=5)
    answers = [checkpoint.generate(prompt, 28) for prompt in prompts]
    assert answers != [all_long.generate(prompt, 28) for prompt in prompts]


def test_an_answer_does_not_depend_on_the_prefix_being_cached(checkpoint: Checkpoint) -> None:
    """A short request leaves keys that a long one uses."""
    [long] = random_prompts((90,), seed=9)
    with make_llm(checkpoint, page_size=4, max_model_len=CONTEXT) as llm:
        greedy(llm, [long[:20]], 8)
        [cached] = greedy(llm, [long], 16)
    with make_llm(checkpoint, max_model_len=CONTEXT, enable_prefix_cache=False) as llm:
        [fresh] = greedy(llm, [long], 16)
    assert cached.metrics.cached_tokens == 20
    gap = checkpoint.gap(long)
    assert_same_or_tie(*(tokens_of([output])[0] for output in (cached, fresh)), gap)
