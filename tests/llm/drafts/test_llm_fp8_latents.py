"""Latents in float8: the engine's answers are transformers' with each latent rounded as the format
says (kernels/scaled_latents.py), computed here from the definition, by logarithms in float64.

transformers expands heads from the rounded latent, keeps its own cache and knows neither scales nor
pages, so writing, paging, moving, reading back and absorption are held to something without them.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from llm_cases import (
    Checkpoint,
    assert_idle,
    make_checkpoint,
    make_llm,
    shared_prompts,
)
from speculative_cases import save_relative
from torch import Tensor

from paceline.core.request.sampling_params import SamplingParams
from paceline.engine.answers.outputs import RequestOutput
from paceline.llm.boot import Knobs

CASE = "deepseek_v3-bias-groups"
FP8 = {"kv_cache_dtype": "fp8"}
SCORED = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=20)
ROW = 3 * (32 + 4 + 4 * 12)  # bytes of a token: layers of codes, a scale, and what turned
TIGHT = Knobs(num_pages=(33,), reserve_ahead=0, admission_margin=0)  # for the longest request alone
# A sum in another order may round a number to its neighbour in e4m3, an eighth away.
TOLERANCE = 1e-2


def rounded(latents: Tensor) -> Tensor:
    exact = latents.double()
    largest = exact.abs().amax(-1, keepdim=True).clamp(min=2.0**-14)
    scales = torch.exp2(torch.ceil(torch.log2(largest / 448)))
    return ((exact / scales).to(torch.float8_e4m3fn).double() * scales).to(latents.dtype)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    """Its norms differ by columns, so that rows have many largest numbers."""

    def spread(model: Any) -> None:
        for layer in model.model.layers:
            weight = layer.self_attn.kv_a_layernorm.weight
            weight.copy_(torch.exp2(torch.arange(len(weight)) % 9 - 4.0))

    made = make_checkpoint(CASE, tmp_path_factory.mktemp("latents"), change=spread)
    norms = [layer.self_attn.kv_a_layernorm for layer in made.theirs.model.layers]
    hooks = [norm.register_forward_hook(lambda *call: rounded(call[2])) for norm in norms]
    yield made
    for hook in hooks:
        hook.remove()


def error_of(checkpoint: Checkpoint, output: RequestOutput) -> float:
    """The largest difference of any log-probability from transformers'."""
    ids = [*output.prompt_token_ids, *output.outputs[0].token_ids[:-1]]
    logprobs = output.outputs[0].logprobs
    top_ids = torch.tensor([row.top_ids for row in logprobs])
    top = torch.tensor([row.top_values for row in logprobs])
    wanted = checkpoint.logits(ids)[len(output.prompt_token_ids) - 1 :].log_softmax(-1)
    return float((top - wanted.gather(1, top_ids)).abs().max())


@pytest.mark.parametrize(
    "options",
    [
        {"chunked_prefill_size": 7, "page_size": 4, "knobs": TIGHT},
        {"speculative_algorithm": "NGRAM", "page_size": 16},
    ],
    ids=["chunks", "rounds"],
)
def test_logprobs_are_those_of_rounded_latents(
    checkpoint: Checkpoint, options: dict[str, Any]
) -> None:
    prompts = shared_prompts()[:4]
    with make_llm(checkpoint, **FP8, **options) as llm:
        fresh = llm.generate(prompts, SCORED)
        [cached] = llm.generate(prompts[:1], SCORED)
        assert_idle(llm)
    assert cached.metrics.cached_tokens
    preemptions = sum(output.metrics.preemptions for output in fresh)
    assert (preemptions > 0) == ("knobs" in options)
    for output in [*fresh, cached]:
        assert error_of(checkpoint, output) < TOLERANCE


def test_trees_move_rows_with_their_scales(
    checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Rounds of trees: accepted rows move with their scales and with what turned."""
    relative = save_relative(CASE, tmp_path_factory.mktemp("relative"), noise=0.02)
    drafts: dict[str, Any] = {
        "speculative_algorithm": "STANDALONE",
        "speculative_draft_model_path": str(relative),
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 4,
        "enforce_eager": True,
    }
    with make_llm(checkpoint, **FP8, **drafts, page_size=4) as llm:
        outputs = llm.generate(shared_prompts()[:2], replace(SCORED, max_tokens=12))
        groups = llm.prepared.fit.groups
    assert [group.page_bytes for group in groups] == [4 * ROW] * 2
    assert sum(sum(output.metrics.accepted_by_position) for output in outputs) > 0
    for output in outputs:
        assert error_of(checkpoint, output) < TOLERANCE


def test_what_is_not_rounded_is_elsewhere(checkpoint: Checkpoint) -> None:
    with make_llm(checkpoint) as llm:
        [output] = llm.generate(shared_prompts()[:1], SCORED)
    assert error_of(checkpoint, output) > 5 * TOLERANCE
