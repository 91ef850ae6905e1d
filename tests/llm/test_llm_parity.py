"""Log-probabilities of the engine's whole path are transformers', for every architecture.

Every token's log-probabilities, chosen and most likely, against one uncached transformers forward
over prompt and answer: prefill, chunks, pages in use order, the sampler's own log-softmax.
"""

from dataclasses import replace

import pytest
import torch
from llm_cases import (
    ARCHITECTURES,
    Checkpoint,
    Tokens,
    assert_idle,
    assert_same_or_tie,
    make_checkpoint,
    make_llm,
    pages_of,
    random_prompts,
)

from paceline.core.request.sampling_params import SamplingParams
from paceline.engine.answers.outputs import RequestOutput

NUM_TOKENS, OF_STATES = 32, 64  # those of models with states: an error would grow
BEHIND_A_HIT = 24  # the prefill differs; six pages, and the widest window leaves it behind
PROMPT_LENS = (40, 9, 33)
TOP = 20
TOLERANCE = 1e-4  # natural log units; logits reach some tens, float32 sums differ in order


@pytest.fixture(scope="module", params=ARCHITECTURES)
def checkpoint(request, tmp_path_factory) -> Checkpoint:
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


def assert_logprobs_equal(output: RequestOutput, checkpoint: Checkpoint) -> None:
    completion, prompt = output.outputs[0], list(output.prompt_token_ids)
    tokens = completion.token_ids
    logits = checkpoint.logits([*prompt, *tokens[:-1]])[len(prompt) - 1 :]
    theirs = logits.log_softmax(-1)
    assert_greedy(tokens, logits)
    chosen = torch.tensor([row.chosen for row in completion.logprobs])
    top_ids = torch.tensor([row.top_ids for row in completion.logprobs])
    top = torch.tensor([row.top_values for row in completion.logprobs])
    wanted = theirs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert_near(chosen, wanted)
    assert top.shape == (len(tokens), TOP)
    assert_near(top, theirs.topk(TOP).values)
    assert_near(top, theirs.gather(1, top_ids))


def assert_greedy(tokens: Tokens, logits: torch.Tensor) -> None:
    """Every token is the best behind those before it, or tied with it: what greedy search finds.

    logits: [num_tokens, vocab] float32 of transformers, behind each beginning of the text.
    """
    for at, (token, row) in enumerate(zip(tokens, logits, strict=True)):
        best = int(row.argmax())
        gap = (row.max() - row[token]).item(), row.abs().max().item()
        assert_same_or_tie((*tokens[:at], token), (*tokens[:at], best), lambda *_, gap=gap: gap)


def assert_near(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    error = (ours - theirs).abs().max().item()
    assert error < TOLERANCE, f"log-probabilities differ by {error:.2e}"


@pytest.mark.parametrize("chunk", [pytest.param(1024, marks=pytest.mark.slow), 7])
def test_logprobs_of_a_prefill_and_greedy_tokens_equal_transformers(
    checkpoint: Checkpoint, chunk: int
) -> None:
    """Together in one batch, and again behind a prefix hit.

    Whole prompts are slow: the test below has one of each length, behind which it decodes a token.
    """
    prompts = random_prompts(PROMPT_LENS, seed=2)
    num_tokens = OF_STATES if checkpoint.config.has_states else NUM_TOKENS
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=TOP)
    options = {"chunked_prefill_size": chunk} | pages_of(checkpoint, 4, every=12)
    with make_llm(checkpoint, **options) as llm:
        fresh = llm.generate(prompts, params)
        [cached] = llm.generate(prompts[0], replace(params, max_tokens=BEHIND_A_HIT))
        assert_idle(llm)
    assert cached.metrics.cached_tokens == 36
    for output, wanted in [*((each, num_tokens) for each in fresh), (cached, BEHIND_A_HIT)]:
        assert len(output.outputs[0].token_ids) == wanted
        assert_logprobs_equal(output, checkpoint)


def test_prefill_logprobs_at_every_length_equal_transformers(checkpoint: Checkpoint) -> None:
    """One token behind each beginning of a prompt, page boundaries and windows included."""
    [prompt] = random_prompts([40], seed=3)
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=TOP)
    options = {"enable_prefix_cache": False, "max_num_seqs": 8} | pages_of(checkpoint, 16)
    with make_llm(checkpoint, **options) as llm:
        outputs = llm.generate([prompt[:n] for n in range(1, len(prompt) + 1)], params)
    theirs = checkpoint.logits(prompt).log_softmax(-1)
    for position, output in enumerate(outputs):
        [row] = output.outputs[0].logprobs
        assert_near(torch.tensor(row.top_values), theirs[position].topk(TOP).values)
        assert_near(torch.tensor(row.chosen), theirs[position, output.outputs[0].token_ids[0]])
