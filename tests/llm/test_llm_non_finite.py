"""Logits that are not finite fail their own request, by name, and nothing else."""

import math
from dataclasses import replace

import pytest
import torch
from llm_cases import (
    CONTEXT,
    GREEDY,
    Checkpoint,
    assert_idle,
    make_checkpoint,
    make_llm,
    shared_prompts,
    tokens_of,
)

from cache_probe import cached_len
from paceline.core.request.sampling_params import SamplingParams
from paceline.llm.boot import Knobs

POISON = 40  # its embedding is NaN in poisoned checkpoints; no shared prompt leads to it


def poison(token: int):
    """Weights whose embedding of one token is NaN."""

    def change(model) -> None:
        model.get_input_embeddings().weight[token] = math.nan

    return change


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("poisoned")
    return make_checkpoint("llama-gqa2-untied", folder, change=poison(POISON))


OPTIONS = [
    {"page_size": 4},
    {"page_size": 1, "chunked_prefill_size": 7},
    {"page_size": 16, "enforce_eager": True, "overlap": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_non_finite_logits_fail_their_request_and_no_other(
    checkpoint: Checkpoint, poisoned: Checkpoint, options
) -> None:
    """Neighbours, later readers of the same prefix, and later users of the same pages."""
    healthy = shared_prompts()
    sick = [*healthy[0][:12], POISON, *healthy[0][12:]]
    params = replace(GREEDY, max_tokens=20)
    answers = [tuple(a) for a in (checkpoint.generate(p, 20) for p in healthy)]
    assert not any(POISON in answer for answer in answers)
    pages = -(-3 * CONTEXT // options["page_size"]) + 1
    with make_llm(poisoned, knobs=Knobs(num_pages=(pages,)), **options) as llm:
        outputs = llm.generate([healthy[0], sick, *healthy[1:]], params)
        failed = outputs.pop(1).outputs[0]
        assert (failed.finish_reason, failed.token_ids) == ("error", ())
        assert failed.error == (
            "logits of request 'request-1' must be finite, got NaN or infinity; "
            "check the model's weights and dtype"
        )
        assert tokens_of(outputs) == answers
        assert_idle(llm)
        cached = cached_len(llm.engine.scheduler._cache, [*sick, 7, 7])
        assert cached <= 12, "pages that hold NaN were kept"
        for _ in range(3):
            assert tokens_of(llm.generate(healthy, params)) == answers
            assert llm.generate(sick, params)[0].outputs[0].finish_reason == "error"
        assert_idle(llm)


def test_a_request_that_turns_non_finite_keeps_what_it_had(poisoned: Checkpoint) -> None:
    """The sampled token itself is the poison; the next step fails."""
    [prompt, other] = shared_prompts()[:2]
    bias = {POISON: 100.0}
    forced = SamplingParams(temperature=0.0, logit_bias=bias, max_tokens=10, logprobs=1)
    with make_llm(poisoned, page_size=4) as llm:
        found, neighbour = llm.generate([prompt, other], [forced, GREEDY])
        assert found.outputs[0].token_ids == (POISON,)
        assert found.outputs[0].finish_reason == "error"
        assert "must be finite" in found.outputs[0].error
        assert len(found.outputs[0].logprobs) == 1
        assert neighbour.outputs[0].finish_reason == "length"
        assert_idle(llm)
        assert cached_len(llm.engine.scheduler._cache, [*prompt, POISON, 9, 9, 9]) <= len(prompt)


def test_padding_may_read_a_poisoned_token(tmp_path, checkpoint: Checkpoint) -> None:
    """Padded rows of a graph compute token 0; NaN there reaches no request."""
    sick = make_checkpoint("llama-gqa2-untied", tmp_path, change=poison(0))
    prompts = shared_prompts()[:5]  # five rows run in a graph of six
    params = [replace(GREEDY, max_tokens=20 + 2 * i) for i in range(5)]
    with make_llm(sick) as llm:
        outputs = llm.generate(prompts, params)
    for prompt, each, output in zip(prompts, params, outputs, strict=True):
        theirs = checkpoint.generate(prompt, each.max_tokens)
        assert 0 not in theirs
        assert output.outputs[0].token_ids == theirs
    assert torch.isnan(sick.theirs.get_input_embeddings().weight[0]).all()
